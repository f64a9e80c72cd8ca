"""Connecting ranks: they meet at a store, authenticate each other, and build a mesh.

The ranks of a part of a communicator do so too (`split`), and the survivors of a failure
(`shrink`).
"""
