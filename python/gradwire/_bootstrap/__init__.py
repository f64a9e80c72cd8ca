"""How ranks come to be connected: they meet at a store, prove who they are, and build a mesh.

So do the ranks of a part of a communicator (`split`), and those that survive a failure (`shrink`).
"""
