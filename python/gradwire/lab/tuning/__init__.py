"""Measurement of collectives on the running ranks, and the cost model fitted to it."""
