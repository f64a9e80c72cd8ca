"""Schedules: algorithms as lists of edges, which can be made, checked and drawn."""
