"""A count in /proc of everything that a process holds, and whether it grows."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple


class Census(NamedTuple):
    """Everything that a process holds."""

    threads: int
    descriptors: Counter[str]
    shared: list[str]
    mappings: int
    resident: int  # bytes


def census() -> Census:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return held()


def held() -> Census:
    """Counts at this moment; in a forked process gc would copy all of its memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Census(
        threads(),
        Counter(map(_kind, os.listdir("/proc/self/fd"))),
        [line for line in maps if "memfd" in line],
        len(maps),
        pages * os.sysconf("SC_PAGE_SIZE"),
    )


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>: the fifth count is hblkhd, the 8th uordblks."""

    _fields_ = (("counts", ctypes.c_size_t * 10),)


def allocated() -> tuple[int, int]:
    """Bytes that malloc has given, and blocks of at most 512 B that Python makes of its own."""
    gc.collect()
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _MallocInfo
    found = count().counts
    return found[4] + found[7], sys.getallocatedblocks()


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _kind(descriptor: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the one that listed the others
        return "the listing"
    return target.split(":[")[0]


def growth(counts: Sequence[int]) -> float:
    """Growth per round: the median slope over all pairs of rounds (the Theil-Sen estimator).

    A count that takes turns between two values, or rises once, has not grown.
    """
    pairs = combinations(enumerate(counts), 2)
    return statistics.median((after - before) / (j - i) for (i, before), (j, after) in pairs)
