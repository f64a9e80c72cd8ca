"""Shapes as texts, which ranks compare with each other."""

from __future__ import annotations

import functools
from math import prod
from typing import Literal, TypeAlias

from gradwire._arrays.buffers import Buffers
from gradwire._arrays.operands import Operand
from gradwire._errors import InvalidArgument

Check: TypeAlias = Literal["shape", "size"] | None
_Shape: TypeAlias = tuple[int, ...]
_ASKED = ("all_gather", "shape")  # otherwise blocks may have any shapes


def text_of(name: str, buffers: Buffers, check: Check) -> str | None:
    """The shapes of the arrays that must be alike on all ranks; None when none are compared.

    Raises InvalidArgument for an unknown `check`.
    """
    if check not in (None, "shape", "size"):
        raise InvalidArgument(
            f"check={check!r}: give 'shape' to compare shapes in every call, 'size' to compare "
            "numbers of elements only, or None to compare shapes in the first call that has them"
        )
    if check == "size":
        return None
    if name in ("all_reduce", "reduce", "reduce_scatter") or (name, check) == _ASKED:
        return _text(tuple(map(_own_shape, buffers.inputs)))
    if name == "broadcast":
        return _text(tuple(map(_own_shape, buffers.outputs)))
    return None  # each rank may have its own shapes


def _own_shape(block: Operand) -> _Shape:
    """The shape of an operand; that of the block if it is a block of an array."""
    if prod(block.shape) == block.elements:
        return block.shape
    first, *rest = block.shape
    return (block.elements // max(1, prod(rest)), *rest) if first else block.shape


@functools.lru_cache(maxsize=1024)
def _text(shapes: tuple[_Shape, ...]) -> str:
    """Shapes as a text, without dimensions of size 1, which do not count."""
    return ", ".join(str(tuple(size for size in shape if size != 1)) for shape in shapes)
