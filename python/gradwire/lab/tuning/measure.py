"""Measurement of collectives: their speed, and whether results are right.

Sizes and bandwidths are defined as in nccl-tests: bytes are those of the whole buffer (all ranks'
blocks together if each rank has one), algbw = bytes / time, and busbw = algbw × a factor that makes
it the bandwidth of the busiest link, which compares with the hardware's for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from gradwire import _core
from gradwire._base.group import Group
from gradwire._errors import InvalidArgument

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)
_ONE_BUFFER = ("all_reduce", "broadcast", "reduce")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_PERIOD = 8  # of the test pattern, in elements
_FOLDS = {
    **{"min": np.minimum, "max": np.maximum, "prod": np.multiply},
    **{"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor},
    **{"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor},
}
_POISON = 77  # content of an output before the call


@dataclass(frozen=True)
class Case:
    """A collective to measure, over `count` elements, the blocks of all ranks together."""

    collective: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str = "auto"
    codec: str = "none"
    root: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.count * int(numpy_dtype(self.dtype).itemsize)

    def busbw_factor(self, ranks: int) -> float:
        """The factor busbw / algbw, as nccl-tests defines it."""
        if self.collective in ("broadcast", "reduce"):
            return 1.0
        halves = 2 if self.collective == "all_reduce" else 1
        return halves * (ranks - 1) / ranks


@dataclass(frozen=True)
class Result:
    """A measured case; `wrong` is None with a lossy codec, whose results are not checked."""

    case: Case
    ranks: int
    seconds: float
    wrong: int | None

    @property
    def algbw(self) -> float:
        """The algorithm bandwidth in GB/s (10⁹ bytes)."""
        return self.case.nbytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """The bus bandwidth in GB/s (10⁹ bytes): that of the busiest link."""
        return self.algbw * self.case.busbw_factor(self.ranks)


def case_of_bytes(nbytes: int, ranks: int, **options: Any) -> Case:
    """The case whose whole buffer is nearest to `nbytes` from below, with one element or more."""
    case = Case(count=0, **options)
    unit = 1 if case.collective in _ONE_BUFFER else ranks
    size = numpy_dtype(case.dtype).itemsize * unit
    return Case(count=max(1, nbytes // size) * unit, **options)


def measure(comm: Group, case: Case, *, iterations: int, warmup: int, checks: int = 1) -> Result:
    """Checks the results of `checks` calls, then times the case."""
    found = [wrong_elements(comm, case) for _ in range(checks)]
    known = [each for each in found if each is not None]
    wrong = sum(known) if known else None
    return Result(case, comm.size, seconds(comm, case, iterations=iterations, warmup=warmup), wrong)


def seconds(comm: Group, case: Case, *, iterations: int, warmup: int) -> float:
    """The average seconds of calls back to back, on the slowest rank."""
    call = timed_call(comm, case)
    for _ in range(warmup):
        call()
    comm.barrier()
    start = perf_counter()
    for _ in range(iterations):
        call()
    return slowest(comm, (perf_counter() - start) / iterations)


def slowest(comm: Group, seconds: float) -> float:
    """The largest value of any rank, on all ranks."""
    times = np.array([seconds])
    comm.all_reduce(times, op="max")
    return float(times[0])


def timed_call(comm: Group, case: Case, room: Array | None = None) -> Callable[[], object]:
    """A function that makes the call, over its own buffers, or in place over `room`.

    Buffers hold zeros: repeated sums of anything else would overflow, and the speed of exact codecs
    does not depend on the values.
    """
    send, receive = _buffers(comm, case) if room is None else (room, room)
    send.fill(0)
    return _bind(comm, case, send, receive)


def wrong_elements(comm: Group, case: Case) -> int | None:
    """The number of wrong elements in one call's results, on all ranks together."""
    if _core.Codec(case.codec).biased:
        return None
    send, receive = _buffers(comm, case)
    send[...] = _inputs(comm, case, len(send))
    _bind(comm, case, send, receive)()
    wrong = np.array([_differences(comm, case, receive)], dtype=np.int64)
    comm.all_reduce(wrong)
    return int(wrong[0])


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; bfloat16 comes from the package ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidArgument("dtype bfloat16 needs the package ml_dtypes") from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def _buffers(comm: Group, case: Case) -> tuple[Array, Array]:
    """The input and output of this rank, the same buffer if the call is in place."""
    sends = case.count // comm.size if case.collective in ("all_gather", "gather") else case.count
    send = np.empty(sends, numpy_dtype(case.dtype))
    if case.collective in ("all_reduce", "broadcast"):
        return send, send
    to_block = case.collective in ("reduce_scatter", "scatter")
    receives = case.count // comm.size if to_block else case.count
    return send, np.full(receives, _POISON, send.dtype)


def _is_plain_sum(case: Case) -> bool:
    return (case.collective, case.op, case.codec) == ("all_reduce", "sum", "none")


def _bind(comm: Group, case: Case, send: Array, receive: Array) -> Callable[[], object]:
    if _is_plain_sum(case) and receive is send:  # as programs write it: options cost 0.2 us
        all_reduce, algorithm = comm.all_reduce, case.algorithm
        return lambda: all_reduce(send, algorithm=algorithm)
    options: dict[str, Any] = {"algorithm": case.algorithm}
    if case.collective in REDUCING:
        options |= {"op": case.op, "codec": case.codec}
        if _core.Codec(case.codec).biased:
            options["feedback"] = False
    if case.collective in _ROOTED:
        options["root"] = case.root
    at_root = comm.rank == case.root
    if receive is not send and (at_root or case.collective not in ("reduce", "gather")):
        options["out"] = receive
    given = None if case.collective == "scatter" and not at_root else send
    method = getattr(comm, case.collective)
    return lambda: method(given, **options)


def _differences(comm: Group, case: Case, received: Array) -> int:
    if case.collective in ("reduce", "gather") and comm.rank != case.root:
        return 0
    expected = _expected(comm, case)
    if case.op != "avg":
        return int(np.count_nonzero(received != expected))
    eps = 2.0**-7 if case.dtype == "bfloat16" else float(np.finfo(received.dtype).eps)
    wide = np.complex128 if received.dtype.kind == "c" else np.float64
    error = np.abs(received.astype(wide) - expected.astype(wide))
    return int(np.count_nonzero(error > 2 * eps * np.abs(expected.astype(wide))))


def _pattern(case: Case, rank: int, count: int, start: int = 0) -> Array:
    """Elements of a rank's test input: small integers, whose sums every type can hold."""
    positions = np.arange(start, start + _PERIOD) + 3 * rank
    values = positions % 2 + 1 if case.op == "prod" else positions % _PERIOD
    if case.dtype == "bool":
        values = positions % 2
    return np.resize(values.astype(np.int64), count)


def _inputs(comm: Group, case: Case, count: int) -> Array:
    return _pattern(case, comm.rank, count).astype(numpy_dtype(case.dtype))


def _expected(comm: Group, case: Case) -> Array:
    p, block = comm.size, case.count // comm.size
    if case.collective in REDUCING:
        blockwise = case.collective == "reduce_scatter"
        start, count = (comm.rank * block, block) if blockwise else (0, case.count)
        values = _reduced(case, (_pattern(case, r, count, start) for r in range(p)), p)
    elif case.collective == "broadcast":
        values = _pattern(case, case.root, case.count)
    elif case.collective == "scatter":
        values = _pattern(case, case.root, block, comm.rank * block)
    else:
        start = comm.rank * block if case.collective == "all_to_all" else 0
        values = np.concatenate([_pattern(case, r, block, start) for r in range(p)])
    return values.astype(numpy_dtype(case.dtype))


def _reduced(case: Case, contributions: Iterable[Array], ranks: int) -> Array:
    values: Array = reduce(_FOLDS.get(case.op, np.add), contributions)
    return values / ranks if case.op == "avg" else values
