"""One collective call: how a rank makes it, and what must come out, bit for bit.

Inputs are small non-negative integers, so that every order of additions and fp16 and bf16 too give
the same bits, and one oracle serves all of them. What codecs give that lose more is known to be
finite, and to be the same on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from gradwire import Communicator, ErrorFeedback, Schedule

_PERIOD = 4093  # prime: no chunk, segment or page is a multiple of it
_FOLDS = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


@dataclass(frozen=True)
class Call:
    """A call of every rank of a communicator. `count` is of one rank's block."""

    collective: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithm: str = "auto"
    schedule: str = ""  # the text of one of the user's own
    codec: str = "none"
    async_op: bool = False
    communicator: int = 0  # 0: the one of all ranks; n: the n-th that was split off

    def __str__(self) -> str:
        values = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        given = [f"{name}={value}" for name, value, usual in values[2:] if value != usual]
        return f"{self.collective}({', '.join([str(self.count), *given])})"


REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
CUT_EVENLY = ("reduce_scatter", "all_to_all")
EXACT = ("none", "fp16", "bf16")  # codecs that lose nothing of the inputs here
COLUMNS = 50  # of a matrix for lowrank
COLLECTIVES = (*REDUCING, "all_gather", "broadcast", "gather", "scatter", "all_to_all", "barrier")
SHIFT = "shift"  # send to the next rank, receive from the one before


class Pending:
    """A call in flight; `wrong()` waits for it and counts the elements that are not right."""

    def __init__(
        self, comm: Communicator, call: Call, index: int, feedback: ErrorFeedback | None = None
    ) -> None:
        """`feedback` is this rank's for the communicator; codecs that are not exact need it."""
        self.call, self.index = call, index
        self.digest = 0  # of the result, where that is the same on all ranks
        self._expected = _expected(call, index, comm.rank, comm.size)
        self._finish = _start(comm, call, index, feedback)

    def wrong(self) -> int:
        """The number of elements of the result that differ from the oracle's, in any bit."""
        found, expected = self._finish(), self._expected
        if expected is None:
            return int(found is not None)
        if found.size != expected.size or found.dtype != expected.dtype:
            return int(expected.size) or 1
        if self.call.codec not in EXACT:
            self.digest = zlib.crc32(found.tobytes())
            return int(np.count_nonzero(~np.isfinite(found)))
        return int(np.count_nonzero((_bytes(found) != _bytes(expected)).any(axis=1)))


def _bytes(x: Any) -> Any:
    """A row for each element."""
    return x.view(np.uint8).reshape(x.size, x.itemsize)


def _start(
    comm: Communicator, call: Call, index: int, feedback: ErrorFeedback | None
) -> Callable[[], Any]:
    if call.collective == SHIFT:
        return _shift(comm, call, index)
    args, options = _arguments(comm, call, index)
    if call.codec not in EXACT:
        # A key may be in one unfinished call only, and calls that wait leave none unfinished.
        key = f"call {index}" if call.async_op else f"{call.count} elements"
        options |= {"feedback": feedback, "key": key}
    if call.codec.startswith("lowrank"):
        args[0] = args[0].reshape(-1, COLUMNS)
    begun = getattr(comm, call.collective)(*args, async_op=call.async_op, **options)
    return begun.wait if call.async_op else lambda: begun


def _arguments(comm: Communicator, call: Call, index: int) -> tuple[list[Any], dict[str, Any]]:
    if call.collective == "barrier":
        return [], {}
    options: dict[str, Any] = {"algorithm": call.algorithm}
    if call.schedule:
        options["schedule"] = Schedule.parse(call.schedule)
    if call.collective in REDUCING:
        options |= {"op": call.op, "codec": call.codec}
    if call.collective in ROOTED:
        options["root"] = call.root
    if call.collective == "scatter" and comm.rank != call.root:
        return [], options | {"out": np.empty(call.count, call.dtype)}
    blocks = comm.size if call.collective in (*CUT_EVENLY, "scatter") else 1
    return [_values(call, index, comm.rank, blocks)], options


def _shift(comm: Communicator, call: Call, index: int) -> Callable[[], Any]:
    got = np.empty(call.count, call.dtype)
    if comm.size == 1:
        return lambda: _values(call, index, 0)
    sent = comm.send(_values(call, index, comm.rank), (comm.rank + 1) % comm.size, async_op=True)
    received = comm.recv(got, (comm.rank - 1) % comm.size, async_op=True)

    def finish() -> Any:
        received.wait()
        sent.wait()
        return got

    return finish


def _values(call: Call, index: int, rank: int, blocks: int = 1) -> Any:
    return np.resize(_pattern(call, index, rank), call.count * blocks)


def _pattern(call: Call, index: int, rank: int) -> Any:
    i = np.arange(_PERIOD)
    noise = (i * (7919 * rank + 104729) + i * i // 7 + 31 * index + rank) % 5
    values = noise % 2 + 1 if call.op == "prod" else noise
    if np.dtype(call.dtype).kind == "c":
        values = values + 1j * values[::-1]
    return values.astype(call.dtype)


def _expected(call: Call, index: int, rank: int, size: int) -> Any:
    """The result that this rank must get; None if it gets nothing."""
    if call.collective == "barrier" or (
        call.collective in ("reduce", "gather") and rank != call.root
    ):
        return None
    if call.collective in REDUCING:
        blocks = size if call.collective == "reduce_scatter" else 1
        folded = np.resize(_folded(call, index, size), call.count * blocks)
        return _block(folded, rank, call) if blocks > 1 else folded
    if call.collective in ("all_gather", "gather"):
        return np.concatenate([_values(call, index, each) for each in range(size)])
    if call.collective == "all_to_all":
        sent = [_values(call, index, each, size) for each in range(size)]
        return np.concatenate([_block(each, rank, call) for each in sent])
    if call.collective == "scatter":
        return _block(_values(call, index, call.root, size), rank, call)
    return _values(call, index, call.root if call.collective == "broadcast" else (rank - 1) % size)


def _block(x: Any, rank: int, call: Call) -> Any:
    return x[rank * call.count : (rank + 1) * call.count]


def _folded(call: Call, index: int, size: int) -> Any:
    total = _pattern(call, index, 0)
    for rank in range(1, size):
        total = _FOLDS[call.op](total, _pattern(call, index, rank)).astype(call.dtype)
    return _average(total, size) if call.op == "avg" else total


def _average(total: Any, size: int) -> Any:
    """Rounded as it is defined to be; complex numbers are pairs."""
    numbers = total.view(total.real.dtype)
    wide = np.float64 if numbers.dtype == np.float64 else np.float32
    averages = (numbers.astype(wide) * (wide(1) / wide(size))).astype(numbers.dtype)
    return averages.view(total.dtype)
