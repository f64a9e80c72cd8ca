"""Entries that ranks leave in torch's store, where others may read and write."""
