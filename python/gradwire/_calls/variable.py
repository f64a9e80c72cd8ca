"""Collectives of blocks whose shapes only their senders know: shapes travel first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire._arrays.operands import Operand, device_of, empty, operand, operands, same_dtype
from gradwire._base import arguments
from gradwire._base.deadline import Deadline
from gradwire._calls.communicator_like import CommunicatorLike
from gradwire._errors import InvalidArgument

_MOST_DIMENSIONS = 32
_NAME_BYTES = 24  # of a dtype


class VariableCollectives:
    """Methods of the communicator for blocks of any shapes, which travel first.

    The methods wait for both. `algorithm` is that of the second. All blocks of all ranks have the
    same dtype, of any kind; otherwise every rank raises InvalidArgument, which names two ranks that
    differ.
    """

    def all_gather_v(
        self: CommunicatorLike, x: Any, *, algorithm: str = "auto", timeout: float | None = None
    ) -> list[Any]:
        """All ranks' `x` in a list by rank, on all ranks: new arrays, each of its rank's shape.

        `x` is one array, whose shape may differ between ranks. `timeout` is in seconds for the
        whole call, the communicator's if None.
        """
        arguments.text(algorithm, "algorithm")
        deadline = Deadline(self._seconds(timeout))
        own = operand(x, "x")
        heads = self.all_gather(_head(own)[np.newaxis], timeout=deadline.left)
        out = [empty(own, shape) for shape in _shapes("all_gather_v", heads)]
        self.all_gather(x, algorithm=algorithm, out=out, timeout=deadline.left)
        return out

    def all_to_all_v(
        self: CommunicatorLike,
        x: Sequence[Any],
        *,
        algorithm: str = "auto",
        timeout: float | None = None,
    ) -> list[Any]:
        """Array d of rank s's `x` becomes array s of rank d's result, a list of new arrays.

        `x` is a list of one array for each rank, of any shapes, such as `numpy.split` makes of an
        array. `timeout` is in seconds for the whole call, the
        communicator's if None.
        """
        arguments.text(algorithm, "algorithm")
        deadline = Deadline(self._seconds(timeout))
        if not isinstance(x, list | tuple) or len(x) != self.size:
            raise arguments.wrong(x, "x", f"a list with one array for each of {self.size} ranks")
        blocks = operands(x, "x")
        same_dtype(blocks)
        device_of(blocks)
        heads = self.all_to_all(np.stack([_head(each) for each in blocks]), timeout=deadline.left)
        out = [empty(blocks[0], shape) for shape in _shapes("all_to_all_v", heads)]
        self.all_to_all(list(x), algorithm=algorithm, out=out, timeout=deadline.left)
        return out


class _Head(NamedTuple):
    """The dtype and shape of a block, which travel first."""

    dtype: str
    shape: tuple[int, ...]


def _head(block: Operand) -> NDArray[np.int64]:
    """Encodes the dtype's name, the number of dimensions, and the shape."""
    if len(block.shape) > _MOST_DIMENSIONS:
        raise InvalidArgument(
            f"{block.what} has {len(block.shape)} dimensions, more than {_MOST_DIMENSIONS}"
        )
    made = np.zeros(_NAME_BYTES // 8 + 1 + _MOST_DIMENSIONS, np.int64)
    name = np.frombuffer(block.dtype.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), np.int64)
    made[: len(name)] = name
    made[len(name)] = len(block.shape)
    made[len(name) + 1 :][: len(block.shape)] = block.shape
    return made


def _read(head: NDArray[np.int64]) -> _Head:
    names = _NAME_BYTES // 8
    dimensions = int(head[names])
    shape = tuple(head[names + 1 :][:dimensions].tolist())
    return _Head(head[:names].tobytes().rstrip(b"\0").decode(), shape)


def _shapes(name: str, heads: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """The shapes by rank; raises InvalidArgument, alike on all ranks, when dtypes differ."""
    found = [_read(head) for head in heads]
    for rank, head in enumerate(found):
        if head.dtype != found[0].dtype:
            raise InvalidArgument(
                f"{name}: rank 0 gives {found[0].dtype} and rank {rank} {head.dtype}: one "
                "operation has one dtype"
            )
    return [head.shape for head in found]
