"""Calls in a CUDA graph, and calls that are repeated, on a GPU.

A captured all_reduce, replayed with other inputs, gives the results and
the residuals of as many plain calls; a repeated call neither waits for the GPU nor allocates.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import gradwire
import numpy as np

from tests.gpu import arrays
from tests.gpu.calls import Case, Found, difference, values
from tests.gpu.loopback import spawn
from tests.gpu.rows import Row

CODECS = (
    "none",
    "fp16",
    "int8:rounding=stochastic,seed=5",
    "onebit",
    "threshold",
    "topk",
    "lowrank:rank=2",
)
_SECONDS = 60.0  # of a wait
_BUSY_CYCLES = 1_000_000_000  # half a second of a GPU
_REPEATED = 10  # few enough for a GPU to have them all in its queue


def main() -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    simulated = parser.parse_args().simulated
    place = arrays.place(simulated)
    n, replays = (12 * 20, 5) if simulated else (300 * 400, 20)
    for p, codec in product((1, 2), CODECS[::2] if simulated else CODECS):
        case = Case(n=n, algorithm="ring", op="avg", codec=codec, feedback=codec != "none")
        _check(f"graph, {replays} replays", p, partial(replayed, case, replays, place), codec)
        _check("repeated calls neither wait nor allocate", p, partial(repeated, case, place), codec)
    return 0


def _check(
    group: str, p: int, body: Callable[[gradwire.Communicator, _Shared], str], codec: str
) -> None:
    """A row of what the body says on each rank; nothing is well."""
    with Row(group, f"{codec}, p={p}") as row:
        shared = _Shared(threading.Barrier(p, timeout=_SECONDS))
        told = spawn(p, lambda comm: body(comm, shared))
        row.expect_none([each for each in told if each], p)


@dataclass
class _Shared:
    """Of ranks that are threads."""

    barrier: threading.Barrier
    graph: Any = None
    fork: Any = None  # an event behind the beginning of the capture
    ends: list[Any] = field(default_factory=list)  # of the other ranks' parts of it


# ---- Replays -----------------------------------------------------------------------------------


def replayed(
    case: Case, replays: int, place: Any, comm: gradwire.Communicator, shared: _Shared
) -> str:
    """How replays differ from plain calls on this rank; both after a first call."""
    with place.on_stream():
        plain = _Calls(comm, case, place)
        for call in range(1 + replays):
            plain.set_input(call)
            plain.make()
            plain.keep()
        graphed = _Calls(comm, case, place)
        graphed.set_input(0)
        graphed.make()
        graphed.keep()
        place.wait()
        shared.barrier.wait()
        _capture(comm, shared, graphed, place)
        for call in range(1, 1 + replays):
            graphed.set_input(call)
            place.wait()
            shared.barrier.wait()
            if comm.rank == 0:
                shared.graph.replay()
                place.wait()
            shared.barrier.wait()
            graphed.keep()
        return difference(graphed.found(), plain.found())


class _Calls:
    """Calls in place on one array."""

    def __init__(self, comm: gradwire.Communicator, case: Case, place: Any) -> None:
        self._comm, self._case, self._place = comm, case, place
        self._shape = (20, case.n // 20) if "lowrank" in case.codec else (case.n,)
        self._x = place.put(np.zeros(self._shape, np.float32))
        self._feedback = gradwire.ErrorFeedback() if case.feedback else None
        self._results: list[bytes] = []

    def set_input(self, call: int) -> None:
        self._place.fill(self._x, values(self._case, self._shape, self._comm.rank, call))

    def make(self) -> None:
        options = {"feedback": self._feedback, "key": "k"} if self._feedback else {}
        case = self._case
        self._comm.all_reduce(
            self._x, op=case.op, algorithm=case.algorithm, codec=case.codec, **options
        )

    def keep(self) -> None:
        self._results.append(self._place.get(self._x).tobytes())

    def found(self) -> Found:
        return Found(self._results, self._feedback.state_dict() if self._feedback else {})


def _capture(comm: gradwire.Communicator, shared: _Shared, calls: _Calls, place: Any) -> None:
    """One call of all ranks in one graph, which rank 0's stream begins."""
    from gradwire import _core

    if comm.rank == 0:
        shared.graph = _graph(place, comm.size)
        shared.ends = []
        with shared.graph.capture():
            shared.fork = _core.CudaEvent(0)
            shared.fork.record(place.stream)
            shared.barrier.wait()
            calls.make()
            shared.barrier.wait()
            for end in shared.ends:
                end.wait(place.stream)
    else:
        shared.barrier.wait()
        shared.fork.wait(place.stream)
        calls.make()
        end = _core.CudaEvent(0)
        end.record(place.stream)
        shared.ends.append(end)
        shared.barrier.wait()
    shared.barrier.wait()


def _graph(place: Any, ranks: int) -> Any:
    if isinstance(place, arrays.Simulated):
        return _SimulatedGraph(place)
    return _CudaGraph("global" if ranks == 1 else "relaxed")


class _CudaGraph:
    def __init__(self, mode: str) -> None:
        import torch

        self._torch, self._mode = torch, mode
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        stream = self._torch.cuda.current_stream()
        with self._torch.cuda.graph(self._graph, stream=stream, capture_error_mode=self._mode):
            yield

    def replay(self) -> None:
        self._graph.replay()


class _SimulatedGraph:
    def __init__(self, place: arrays.Simulated) -> None:
        self._place, self._library = place, arrays.simulated_library()
        self._library.simulated_cuda_end_capture.restype = ctypes.c_void_p
        self._graph: int | None = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        stream = ctypes.c_void_p(self._place.stream)
        self._library.simulated_cuda_begin_capture(stream)
        yield
        self._graph = self._library.simulated_cuda_end_capture(stream)
        assert self._graph, "the capture is invalid"

    def replay(self) -> None:
        status = self._library.simulated_cuda_launch_graph(
            ctypes.c_void_p(self._graph), ctypes.c_void_p(self._place.stream)
        )
        assert status == 0, f"the launch said {status}"

    def __del__(self) -> None:
        self._library.simulated_cuda_free_graph(ctypes.c_void_p(self._graph))


# ---- Repeated calls ----------------------------------------------------------------------------


def repeated(case: Case, place: Any, comm: gradwire.Communicator, shared: _Shared) -> str:
    """What a repeated call did that it should not; empty: nothing."""
    with place.on_stream():
        calls = _Calls(comm, case, place)
        for call in range(2):
            calls.set_input(call)
            calls.make()
        place.wait()
        comm.barrier()
        watch = _SimulatedCounts() if isinstance(place, arrays.Simulated) else _CudaCounts()
        told = [_watched(watch, turn, calls, place, shared) for turn in watch.turns]
        return told[-1]


def _watched(
    watch: _SimulatedCounts | _CudaCounts, turn: int, calls: _Calls, place: Any, shared: _Shared
) -> str:
    shared.barrier.wait()
    watch.begin(turn)
    shared.barrier.wait()
    for _ in range(_REPEATED):
        calls.make()
    told = watch.end()
    shared.barrier.wait()  # before anybody waits for the device
    watch.forget()
    place.wait()
    return told


class _SimulatedCounts:
    """Of all threads."""

    turns = (0,)

    def __init__(self) -> None:
        self._library = arrays.simulated_library()

    def _counts(self) -> Sequence[int]:
        library = self._library
        return library.simulated_cuda_waits(), library.simulated_cuda_allocations()

    def begin(self, _turn: int) -> None:
        self._before = self._counts()

    def end(self) -> str:
        after = self._counts()
        return "" if after == self._before else f"waits, allocations: {self._before} to {after}"

    def forget(self) -> None:
        pass


class _CudaCounts:
    """A GPU that is busy when calls begin still is when they have returned.

    The memory that is free is the device's, so nobody else may use it. In a first turn the GPU is
    busy for no time: what only a first use allocates, be it a kernel that is loaded then, is there.
    """

    turns = (1, _BUSY_CYCLES)

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def _allocated(self) -> tuple[int, int]:
        free, _ = self._torch.cuda.mem_get_info()
        return free, self._torch.cuda.memory_stats()["allocation.all.allocated"]

    def begin(self, cycles: int) -> None:
        torch = self._torch
        self._before = self._allocated()
        self._busy = torch.cuda.Event()
        torch.cuda._sleep(cycles)
        self._busy.record()
        torch.cuda.set_sync_debug_mode("error")
        self._start = perf_counter()

    def end(self) -> str:
        seconds = perf_counter() - self._start
        waited = self._busy.query()
        after = self._allocated()
        if waited:
            return f"{_REPEATED} calls came back after {seconds:.3f} s, when the GPU was idle"
        return "" if after == self._before else f"free, allocations: {self._before} to {after}"

    def forget(self) -> None:
        self._torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    sys.exit(main())
