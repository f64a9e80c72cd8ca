"""Decisions of Sandblaster L-BFGS: line searches, directions, and which replica computes what.

Nothing here has a socket, a vector or a clock. Dean et al. 2012, "Large Scale Distributed Deep
Networks", sec. 4.2.
"""
