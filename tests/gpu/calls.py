"""Collective calls, made on CPU arrays and on those of a GPU by the same ranks, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradwire
import numpy as np

from tests.gpu.arrays import Cpu, Place

POISON = 0xAB  # the bytes of outputs before a call
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_KEPT = ("residual", "tau", "calls", "memory")  # not the filter: it changes no result


@dataclass(frozen=True)
class Case:
    """A call, or several that follow each other with the same residuals."""

    collective: str = "all_reduce"
    algorithm: str = "auto"
    n: int = 1001  # elements of x, or of each of its blocks
    dtype: str = "float32"
    op: str = "sum"
    codec: str = "none"
    feedback: bool = False
    calls: int = 1
    shift: int = 0  # elements by which arrays are unaligned
    shapes: tuple[tuple[int, ...], ...] = ()  # of several arrays, in place of n; in place
    keys: tuple[tuple[str, int], ...] = ()
    in_place: bool = False
    asynchronous: bool = False
    seed: int = 0

    def __str__(self) -> str:
        words = [self.collective, self.algorithm, str(self.shapes or self.n), self.dtype, self.op]
        words += [self.codec] if self.codec != "none" else []
        words += ["feedback"] if self.feedback else []
        words += ["unaligned"] if self.shift else []
        return " ".join(words)


@dataclass
class Found:
    """What a case left on a rank."""

    results: list[bytes] = field(default_factory=list)  # of every call
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: str = ""


def problems(
    comm: gradwire.Communicator, cases: Iterable[Case], place: Place
) -> tuple[list[str], int]:
    """What differs on this rank between CPU and GPU, and how many cases neither takes.

    Every rank calls it with the same cases.
    """
    found, refused = [], 0
    with place.on_stream():
        for case in cases:
            on_cpu, on_gpu = run(comm, case, Cpu()), run(comm, case, place)
            refused += bool(on_cpu.refused)
            different = difference(on_gpu, on_cpu)
            if different:
                found.append(f"{case}, rank {comm.rank} of {comm.size}: {different}")
    return found, refused


def difference(one: Found, other: Found) -> str:
    """How the first differs from the second; empty where nothing does."""
    if bool(one.refused) != bool(other.refused):
        return f"refused ({one.refused or other.refused}) on one of the two"
    for call, (a, b) in enumerate(zip(one.results, other.results, strict=True)):
        if a != b:
            return f"the results of call {call} differ"
    if one.kept.keys() != other.kept.keys():
        return "the keys differ"
    for key, kept in other.kept.items():
        for what in _KEPT:
            if np.asarray(one.kept[key][what]).tobytes() != np.asarray(kept[what]).tobytes():
                return f"{what} of {key} differs"
    return ""


def run(comm: gradwire.Communicator, case: Case, place: Place) -> Found:
    """Makes the case's calls."""
    found = Found()
    feedback = gradwire.ErrorFeedback() if case.feedback else None
    try:
        for call in range(case.calls):
            found.results.append(_call(comm, case, call, place, feedback))
    except (gradwire.InvalidArgument, gradwire.ScheduleError) as error:
        found.refused = str(error)
    if feedback is not None:
        found.kept = feedback.state_dict()
    return found


def _call(comm: gradwire.Communicator, case: Case, call: int, place: Place, feedback: Any) -> bytes:
    x, out = _arrays(case, comm, call, place)
    options: dict[str, Any] = {"algorithm": case.algorithm}
    root = comm.size // 2
    if case.collective in _REDUCING:
        options |= {"op": case.op, "codec": case.codec}
        options["feedback"] = feedback if case.feedback else False
        if case.feedback:
            options |= {"keys": list(case.keys)} if case.keys else {"key": "k"}
    if case.collective in _ROOTED:
        options["root"] = root
    if out is not None:
        options["out"] = out
    method = getattr(comm, case.collective)
    result = method(x, async_op=case.asynchronous, **options)
    if case.asynchronous:
        result = result.wait()
    written = x if out is None else out
    if case.collective in ("reduce", "gather") and comm.rank != root:
        return b""
    several = written if isinstance(written, list) else [written]
    return b"".join(place.get(each).tobytes() for each in several)


def _arrays(case: Case, comm: gradwire.Communicator, call: int, place: Place) -> tuple[Any, Any]:
    """x and out of a call; either may be None."""
    rank, p, at_root = comm.rank, comm.size, comm.rank == comm.size // 2
    if case.shapes:
        several = [
            values(case, shape, rank, call, index) for index, shape in enumerate(case.shapes)
        ]
        return [place.put(each, case.shift) for each in several], None

    def full(blocks: int) -> Any:
        return place.put(values(case, (blocks * case.n,), rank, call), case.shift)

    def empty(blocks: int) -> Any:
        room = np.full(blocks * case.n * _dtype(case.dtype).itemsize, POISON, np.uint8)
        return place.put(room.view(_dtype(case.dtype)), case.shift)

    blocks_in = p if case.collective in ("reduce_scatter", "scatter", "all_to_all") else 1
    blocks_out = p if case.collective in ("all_gather", "gather", "all_to_all") else 1
    if case.collective == "scatter":
        return (full(blocks_in) if at_root else None), empty(1)
    if case.collective == "broadcast" or case.in_place:
        return full(1), None
    if case.collective in ("reduce", "gather") and not at_root:
        return full(blocks_in), None
    return full(blocks_in), empty(blocks_out)


def values(case: Case, shape: Sequence[int], rank: int, call: int, index: int = 0) -> np.ndarray:
    """A rank's input of a call."""
    random = np.random.default_rng([case.seed, rank, call, index])
    dtype = _dtype(case.dtype)
    if dtype.kind in "iu":
        return random.integers(0 if dtype.kind == "u" else -50, 50, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
