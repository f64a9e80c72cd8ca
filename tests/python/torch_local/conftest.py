"""Ranks that are threads: each computes on its own alone."""

from one_thread import one_thread_a_rank

__all__ = ["one_thread_a_rank"]
