"""Schedules: algorithms as lists of edges, which can be made, verified and drawn."""
