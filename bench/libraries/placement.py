"""Where the cores lie, by how long a cache line travels between two of them; and the floor program.

Both are in shm_floor.cc, which is compiled into build/peers when it is first needed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path

from bench.common.report import ROOT

_SOURCE = Path(__file__).with_name("shm_floor.cc")
_BUILT = ROOT / "build" / "peers" / "shm_floor.so"
_FLAGS = ("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
_SAME = 1.5  # times as long at most: no placement is so near to another


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles it where it is older than its source."""
    if not _BUILT.exists() or _BUILT.stat().st_mtime < _SOURCE.stat().st_mtime:
        _BUILT.parent.mkdir(parents=True, exist_ok=True)
        made = _BUILT.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *_FLAGS, "-o", str(made), str(_SOURCE)], check=True)
        made.replace(_BUILT)
    found = ctypes.CDLL(str(_BUILT))
    found.line_round_trip.restype = ctypes.c_double
    found.floor_bytes.restype = ctypes.c_size_t
    found.floor_join.restype = ctypes.c_void_p
    found.floor_all_reduce.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found


def round_trip() -> float:
    """Nanoseconds of a line from one core to another and back; 0 where there is one core."""
    cores = sorted(os.sched_getaffinity(0))
    return library().line_round_trip(cores[0], cores[-1]) if len(cores) > 1 else 0.0


def unchanged(round_trips: list[float]) -> bool:
    """Whether all were measured on one placement."""
    return max(round_trips) <= _SAME * min(round_trips)
