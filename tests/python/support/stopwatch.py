"""Time that ranks take, without what a busy machine keeps them waiting for a processor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path


def queued_threads(pid: int | None = None) -> dict[int, float]:
    """Seconds for which each thread of a process, by default this one, was ready to run but did
    not; empty of a process that has ended, 0 where the kernel does not count them."""
    found = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
            with contextlib.suppress(OSError):
                found[int(task.name)] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


def queued(pid: int | None = None) -> float:
    """Seconds that all threads of a process which have not ended were queued."""
    return sum(queued_threads(pid).values())


def queued_since(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Seconds that a process's present threads were queued since an earlier look at them."""
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in now.items())


def own_time(pid: int | None = None) -> float:
    """The monotonic time, had the process never been queued."""
    return time.monotonic() - queued(pid)


def once_it_waits(action: Callable[[], object]) -> None:
    """Does it in another thread, once the main thread has hardly run for a quarter of a second.

    After a fixed time a busy machine may not have brought it there.
    """
    task = Path(f"/proc/self/task/{os.getpid()}/schedstat")

    def busy() -> float:
        """Seconds that the main thread ran or was ready to."""
        return sum(map(int, task.read_text().split()[:2])) / 1e9

    def watch() -> None:
        took = 1.0
        while took > 0.02:
            before = busy()
            time.sleep(0.25)
            took = busy() - before
        action()

    threading.Thread(target=watch, daemon=True).start()


class Stopwatch:
    """Seconds since one of some ranks started it, less those in which this or that one was queued.

    What the two take by themselves is all that it counts: on an idle machine all of the time, and
    what they sleep on any. Threads that were queued at the same time count each, so on a busy
    machine it may say less than that, but never less than 0. Made before the ranks are forked.
    """

    def __init__(self, ranks: int) -> None:
        self.started = RawValue(ctypes.c_double)  # by the monotonic clock
        self._starter = RawValue(ctypes.c_int)
        self._pids = RawArray(ctypes.c_int, ranks)
        self._queued = RawArray(ctypes.c_double, ranks)

    def join(self, rank: int) -> None:
        """Says that this process is that rank."""
        self._pids[rank] = os.getpid()

    def start(self) -> None:
        """Starts counting, for all ranks that have joined."""
        self._starter.value = os.getpid()
        self._queued[:] = [queued(pid) if pid else 0.0 for pid in self._pids]
        self.started.value = time.monotonic()

    @property
    def elapsed(self) -> float:
        """All seconds since its start."""
        return time.monotonic() - self.started.value

    @property
    def seconds(self) -> float:
        """Seconds since the start, on any rank that has joined."""
        elapsed, concerned = self.elapsed, {self._starter.value, os.getpid()}
        waited = sum(
            max(queued(pid) - before, 0.0)
            for pid, before in zip(self._pids, self._queued, strict=True)
            if pid in concerned
        )
        return max(elapsed - waited, 0.0)
