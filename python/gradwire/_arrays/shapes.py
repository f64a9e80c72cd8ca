"""How shapes are compared between ranks: as a text that all of them must give alike."""

from __future__ import annotations

import functools
from math import prod
from typing import Literal, TypeAlias

from gradwire._arrays.buffers import Buffers
from gradwire._arrays.operands import Operand
from gradwire._errors import InvalidArgument

Check: TypeAlias = Literal["shape", "size"] | None
_Shape: TypeAlias = tuple[int, ...]
_ASKED = ("all_gather", "shape")  # else its blocks may have any shapes


def text_of(name: str, buffers: Buffers, check: Check) -> str | None:
    """Of the arrays that every rank gives in the same shapes; None where nothing is compared.

    Raises InvalidArgument for another `check`.
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
    return None  # each rank may have its own


def _own_shape(block: Operand) -> _Shape:
    """That of a block of an array, where it is one."""
    if prod(block.shape) == block.elements:
        return block.shape
    first, *rest = block.shape
    return (block.elements // max(1, prod(rest)), *rest) if first else block.shape


@functools.lru_cache(maxsize=1024)
def _text(shapes: tuple[_Shape, ...]) -> str:
    """Without dimensions of size 1, which change nothing."""
    return ", ".join(str(tuple(size for size in shape if size != 1)) for shape in shapes)
