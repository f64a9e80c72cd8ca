"""Collectives on networks of any size, by events or closed forms; losses of long runs."""
