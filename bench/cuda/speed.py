"""How fast the kernels of gradwire's CUDA part are, beside a copy and torch's own operations.

A stage of bench/gpu.py, on a GPU alone. Of each size and job, the copy, the kernel and torch take
turns; the figures are medians of turns. A turn is a graph of as many repetitions as take some
milliseconds, on one set of arrays after the other, so that none is in the cache when its turn
comes. A copy is the driver's or a kernel's, whichever is faster. torch's operations that wait for
the GPU are repeated without a graph.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.cuda import torch_jobs
from bench.cuda.floors import FLOORS, GOAL, SIZES, Floor, share
from tests.gpu.rows import Row, tell

_BEYOND_CACHES = 256 << 20  # bytes of x of all sets
_TURN = 3e-3  # seconds
_TURNS = 7
_MOST = 256  # repetitions in a turn
_AHEAD_CYCLES = 200_000  # of a GPU that is kept busy until a turn is in its queue


def main() -> int:
    """Prints the rows and times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", help="gradwire's CUDA part")
    parser.add_argument("jobs", help="the library of gpu_jobs.cc")
    options = parser.parse_args()
    jobs = Jobs(options.jobs, options.library)
    for n in reversed(SIZES):
        for floor in FLOORS:
            with Row("speed", f"{floor.job}, {n}"):
                tell(**_times(jobs, floor, n))
            gc.collect()
            torch.cuda.empty_cache()
    return 0


def _times(jobs: Jobs, floor: Floor, n: int) -> dict[str, object]:
    sets = max(1, math.ceil(_BEYOND_CACHES / (4 * n)))
    turns = [*_copies(n, sets), jobs.turn(floor.job, n, sets)]
    job = torch_jobs.make(floor.job, n, sets)
    turns.append(_turn_of_torch(job, sets))
    seconds: list[list[float]] = [[] for _ in turns]
    for _ in range(_TURNS):
        for turn, times in zip(turns, seconds, strict=True):
            times.append(turn.seconds())
    *copies, own, other = (statistics.median(each) for each in seconds)
    copy = min(copies)
    reached = share(floor, n, own, 8 * n / copy)
    return {
        "job": floor.job,
        "n": n,
        "floor": floor.bytes,
        "seconds": own,
        "copy_seconds": copy,
        "torch_seconds": other,
        "beside": floor.beside,
        "share": reached,
        "reached": reached >= GOAL,
        "spread": (max(seconds[-2]) - min(seconds[-2])) / own,
    }


def _turn_of_torch(job: torch_jobs.Job, sets: int) -> _Turn:
    """In a graph, unless that is more than torch can do."""
    if not job.waits:
        try:
            return _Turn(job.run, sets)
        except RuntimeError:
            torch.cuda.synchronize()
    return _Turn(job.run, sets, in_graph=False)


def _copies(n: int, sets: int) -> list[_Turn]:
    """By the driver, which is slow for a gigabyte, and by a kernel; the faster one counts."""
    x = [torch.randn(n, device="cuda") for _ in range(sets)]
    y = [torch.empty_like(each) for each in x]
    return [
        _Turn(lambda i: y[i].copy_(x[i]), sets),
        _Turn(lambda i: torch.neg(x[i], out=y[i]), sets),
    ]


class _Turn:
    """Repetitions of something, timed together."""

    def __init__(self, run: Callable[[int], object], sets: int, *, in_graph: bool = True) -> None:
        self._run, self._sets = run, sets
        self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # what it works on was made elsewhere
        with torch.cuda.stream(self._stream):
            for i in range(3):
                run(i % sets)
            once = self._time(lambda: run(0))
        self._repetitions = min(_MOST, max(1, round(_TURN / once)))
        self._repeat: Callable[[], object] = self._all
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._all()
            self._repeat = graph.replay
        with torch.cuda.stream(self._stream):
            self._repeat()

    def seconds(self) -> float:
        """Of one repetition."""
        with torch.cuda.stream(self._stream):
            return self._time(self._repeat) / self._repetitions

    def _all(self) -> None:
        for i in range(self._repetitions):
            self._run(i % self._sets)

    def _time(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass
class _Made:
    """A job of the library, which lives as long as something runs it."""

    jobs: Jobs
    address: int

    def __call__(self, index: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.jobs.check(self.jobs.library.gpu_job_run(self.address, index, stream) == 0)

    def __del__(self) -> None:
        self.jobs.library.gpu_job_free(self.address)


class Jobs:
    """Those of gpu_jobs.cc, over a CUDA part."""

    def __init__(self, path: str, plugin: str) -> None:
        self.library = ctypes.CDLL(str(Path(path).absolute()))
        self.library.gpu_job_make.restype = ctypes.c_void_p
        self.library.gpu_job_make.argtypes = [
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_int,
        ]
        self.library.gpu_job_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self.library.gpu_job_free.argtypes = [ctypes.c_void_p]
        self.library.gpu_job_error.restype = ctypes.c_char_p
        self._plugin = plugin.encode()

    def turn(self, name: str, n: int, sets: int) -> _Turn:
        """Of one job, on so many sets of arrays."""
        made = self.library.gpu_job_make(self._plugin, name.encode(), n, sets)
        self.check(made)
        return _Turn(_Made(self, made), sets)

    def run(self, name: str, n: int) -> None:
        """Once, on one set of arrays, on the default stream."""
        made = self.library.gpu_job_make(self._plugin, name.encode(), n, 1)
        self.check(made)
        self.check(self.library.gpu_job_run(made, 0, None) == 0)
        self.library.gpu_job_free(made)

    def check(self, well: object) -> None:
        """Raises what the library says last, unless all is well."""
        if not well:
            raise RuntimeError(self.library.gpu_job_error().decode())


if __name__ == "__main__":
    sys.exit(main())
