"""The inputs and outputs of each collective, as the core takes them, from the caller's arrays.

Collectives with blocks take them in two forms: one array, cut evenly along its first dimension, or
a list with one array for each rank, of any sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

from gradwire._arrays.operands import (
    Operand,
    empty,
    is_list,
    operand,
    operands,
    same_dtype,
    writable,
)
from gradwire._errors import InvalidArgument

Check: TypeAlias = Literal["shape", "size"] | None
_Shape: TypeAlias = tuple[int, ...]
_ASKED = ("all_gather", "shape")  # otherwise blocks may have any shapes


class Place(NamedTuple):
    """The caller's rank and the communicator's size."""

    rank: int
    size: int


class Buffers(NamedTuple):
    """One rank's inputs and outputs of a collective."""

    inputs: Sequence[Operand]
    outputs: Sequence[Operand]
    result: Any  # the return value of the call


def all_reduce(x: Any, out: Any) -> Buffers:
    """Outputs of the same sizes as the inputs; without `out` they are the inputs."""
    inputs = operands(x, "x")
    outputs = inputs if out is None or out is x else _like(inputs, operands(out, "out"))
    return _checked(inputs, outputs, x if out is None else out, partners=outputs)


def reduce(x: Any, out: Any, root: int, place: Place) -> Buffers:
    """Buffers of all_reduce at the root; no outputs on the other ranks."""
    if place.rank == root:
        return all_reduce(x, out)
    return _checked(operands(x, "x"), [], None)


def broadcast(x: Any, root: int, place: Place) -> Buffers:
    """One array or list, written in place on every rank but the root."""
    outputs = operands(x, "x")
    return _checked(outputs if place.rank == root else [], outputs, x, partners=outputs)


def reduce_scatter(x: Any, out: Any, place: Place) -> Buffers:
    """p blocks in, one out, which may overlap: the core reads all input before it writes."""
    if is_list(out):
        return _reduce_scatter_several(x, out, place)
    inputs = _blocks(x, "x", place.size)
    given = empty(inputs[place.rank], _block_shape(x, inputs, place)) if out is None else out
    output = operand(given, "out")
    same_dtype([*inputs, output])
    return Buffers(inputs, writable([output]), given)


def all_gather(x: Any, out: Any, place: Place) -> Buffers:
    """One block in, p out."""
    if is_list(x):
        return _all_gather_several(x, out, place)
    own = operand(x, "x")
    given = empty(own, _gathered_shape(own, place.size)) if out is None else out
    outputs = _blocks(given, "out", place.size)
    return _checked([own], outputs, given, partners=[outputs[place.rank]])


def gather(x: Any, out: Any, root: int, place: Place) -> Buffers:
    """Buffers of all_gather at the root; no outputs on the other ranks."""
    own = operand(x, "x")
    return all_gather(x, out, place) if place.rank == root else _checked([own], [], None)


def scatter(x: Any, out: Any, root: int, place: Place) -> Buffers:
    """p blocks in at the root, one out on every rank, whose shape only the root can infer."""
    if place.rank != root:
        if out is None:
            raise InvalidArgument(
                f"rank {place.rank} is not the root ({root}) and cannot know what it will "
                "receive: give out="
            )
        return _checked([], [operand(out, "out")], out)
    inputs = _blocks(x, "x", place.size)
    given = empty(inputs[place.rank], _block_shape(x, inputs, place)) if out is None else out
    output = operand(given, "out")
    return _checked(inputs, [output], given, partners=_only(place, output))


def all_to_all(x: Any, out: Any, place: Place) -> Buffers:
    """p blocks in, p out."""
    inputs = _blocks(x, "x", place.size)
    if out is None and is_list(x):
        raise InvalidArgument("only the caller knows how much each rank sends: give a list as out=")
    given = empty(inputs[0], operand(x, "x").shape) if out is None else out
    outputs = _blocks(given, "out", place.size)
    return _checked(inputs, outputs, given, partners=_only(place, outputs[place.rank]))


def _reduce_scatter_several(x: Any, out: Sequence[Any], place: Place) -> Buffers:
    """Several arrays of p blocks in, as many blocks out."""
    outputs = operands(out, "out")
    wholes = _several(x, "x", len(out))
    inputs = _by_rank([_blocks(each, f"x[{i}]", place.size) for i, each in enumerate(wholes)])
    same_dtype([*inputs, *outputs])
    _require_blocks(inputs[place.rank * len(outputs) :], outputs)
    _require_disjoint([], writable(outputs))
    return Buffers(inputs, outputs, out)


def _all_gather_several(x: Sequence[Any], out: Any, place: Place) -> Buffers:
    """Several blocks in, as many arrays of p blocks out."""
    owns = operands(x, "x")
    if out is None:
        out = [empty(each, _gathered_shape(each, place.size)) for each in owns]
    wholes = _several(out, "out", len(owns))
    outputs = _by_rank([_blocks(each, f"out[{i}]", place.size) for i, each in enumerate(wholes)])
    mine = outputs[place.rank * len(owns) :][: len(owns)]
    _require_blocks(mine, owns)
    return _checked(owns, outputs, out, partners=mine)


def require_one_on_gpu(name: str, buffers: Buffers) -> None:
    """Raises InvalidArgument for several arrays where GPUs take one."""
    if len(buffers.outputs if name == "reduce_scatter" else buffers.inputs) > 1 and name in (
        "reduce_scatter",
        "all_gather",
    ):
        raise InvalidArgument(f"{name} of several arrays is for the CPU: call it for each array")


def _several(given: Any, what: str, count: int) -> list[Any]:
    """Checks a list of `count` arrays; returns it."""
    if not is_list(given) or len(given) != count:
        found = f"{len(given)} arrays" if is_list(given) else f"a {type(given).__name__}"
        raise InvalidArgument(
            f"{what} is {found}: give a list of {count} arrays, as on the other side"
        )
    for i, each in enumerate(given):
        operand(each, f"{what}[{i}]")
    return list(given)


def _by_rank(blocks: Sequence[Sequence[Operand]]) -> list[Operand]:
    """Orders blocks by rank: rank 0's of every array, then rank 1's, and so on."""
    return [each for of_rank in zip(*blocks, strict=True) for each in of_rank]


def _require_blocks(blocks: Sequence[Operand], alone: Sequence[Operand]) -> None:
    for block, each in zip(blocks, alone, strict=False):
        if block.elements != each.elements:
            raise InvalidArgument(
                f"{block.what} has {block.elements} elements and {each.what} has {each.elements}"
            )


def _like(inputs: list[Operand], outputs: list[Operand]) -> list[Operand]:
    if len(inputs) != len(outputs):
        raise InvalidArgument(f"x has {len(inputs)} arrays and out has {len(outputs)}")
    for a, b in zip(inputs, outputs, strict=True):
        if a.elements != b.elements:
            raise InvalidArgument(
                f"{a.what} has {a.elements} elements and {b.what} has {b.elements}: "
                "a result is as long as what it is made from"
            )
    return outputs


def _blocks(x: Any, what: str, size: int) -> list[Operand]:
    if is_list(x):
        if len(x) != size:
            raise InvalidArgument(f"{what} has {len(x)} arrays: give one for each of {size} ranks")
        return operands(x, what)
    whole = operand(x, what)
    if not whole.shape or whole.shape[0] % size:
        raise InvalidArgument(
            f"{what} has the shape {whole.shape}, whose first dimension cannot be cut into {size} "
            "equal blocks: give a list with one array for each rank"
        )
    return [whole.run(index, size) for index in range(size)]


def _block_shape(x: Any, blocks: Sequence[Operand], place: Place) -> tuple[int, ...]:
    shape = blocks[place.rank].shape
    return shape if is_list(x) else (shape[0] // place.size, *shape[1:])


def _gathered_shape(block: Operand, size: int) -> tuple[int, ...]:
    first, *rest = block.shape or (1,)
    return (first * size, *rest)


def _only(place: Place, partner: Operand) -> list[Operand | None]:
    return [partner if rank == place.rank else None for rank in range(place.size)]


def _checked(
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    result: Any,
    partners: Sequence[Operand | None] = (),
) -> Buffers:
    """Checks types and overlaps: an input may share its partner's memory, and no other output's."""
    same_dtype([*inputs, *outputs])
    writable(outputs)
    alone = [
        each
        for i, each in enumerate(inputs)
        if i >= len(partners) or not _same_memory(each, partners[i])
    ]
    _require_disjoint(alone, outputs)
    return Buffers(inputs, outputs, result)


def _same_memory(a: Operand, b: Operand | None) -> bool:
    return b is not None and (a.address, a.nbytes) == (b.address, b.nbytes)


def _require_disjoint(inputs: Sequence[Operand], outputs: Sequence[Operand]) -> None:
    if len(inputs) + len(outputs) < 2:
        return
    regions = [(each, False) for each in inputs] + [(each, True) for each in outputs]
    regions.sort(key=lambda region: region[0].address)
    last_read: Operand | None = None
    last_written: Operand | None = None
    for each, is_output in regions:
        for before in (last_written, last_read if is_output else None):
            if before is not None and each.address < before.address + before.nbytes and each.nbytes:
                raise InvalidArgument(
                    f"{before.what} and {each.what} overlap in memory, and one of them is written"
                )
        if is_output:
            last_written = _later(last_written, each)
        else:
            last_read = _later(last_read, each)


def _later(a: Operand | None, b: Operand) -> Operand:
    """The operand that ends later in memory."""
    return b if a is None or b.address + b.nbytes > a.address + a.nbytes else a


def shapes_text(name: str, buffers: Buffers, check: Check) -> str | None:
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
        return _joined(tuple(map(_own_shape, buffers.inputs)))
    if name == "broadcast":
        return _joined(tuple(map(_own_shape, buffers.outputs)))
    return None  # each rank may have its own shapes


def _own_shape(block: Operand) -> _Shape:
    """The shape of an operand; that of the block if it is a block of an array."""
    if prod(block.shape) == block.elements:
        return block.shape
    first, *rest = block.shape
    return (block.elements // max(1, prod(rest)), *rest) if first else block.shape


@functools.lru_cache(maxsize=1024)
def _joined(shapes: tuple[_Shape, ...]) -> str:
    """Shapes as a text, without dimensions of size 1, which do not count."""
    return ", ".join(str(tuple(size for size in shape if size != 1)) for shape in shapes)
