"""OpenMP in a forked process."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def use_one_thread() -> None:
    """Makes OpenMP compute in the calling thread alone; a fork calls it first.

    A fork copies GNU's record of its pool of threads, but not the threads: libgomp waits for ever
    for them in the next parallel region of the thread that forked.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # MKL's too, which counts its own
    for path in _loaded("libgomp"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_set_num_threads(1)


def _loaded(name: str) -> set[str]:
    """The paths of this process's libraries of that name."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        fields = (line.split(maxsplit=5) for line in maps)
        paths = {each[5].rstrip("\n") for each in fields if len(each) == 6}
        return {each for each in paths if each.rpartition("/")[2].startswith(name)}
    return set()
