"""Benchmarks: programs that are run as `python -m bench.ROOM.PROGRAM`; README.md lists them."""
