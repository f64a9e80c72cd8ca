"""The state's way to ranks that do not have it: from all that have it, a part from each.

A state is plain values, which travel by pickle from the first holder, and tensors, whose bytes form
one line. Each holder sends an equal part of this line to every receiver. With one holder, as at the
start of a training, that is a broadcast. No bit is lost: over slow links floats travel in the codec
"lossless".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradwire._communicator import Communicator
from gradwire.torch._ranks.broadcasts import mapped
from gradwire.torch.exchange.links import link_of, measured

# Packing pays below this rate for each rank (docs/compression.md), measuring it for larger states.
_SLOW, _LONG = 1.5e9, 4 << 20  # bit/s, bytes
_PACKED = (torch.float32, torch.bfloat16, torch.float16)


class _Slot(NamedTuple):
    """A placeholder for a tensor."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def share(
    communicator: Communicator,
    holders: Sequence[int],
    receivers: Sequence[int],
    state: Any,
    check: Callable[[Any], None],
) -> Any:
    """Gives the receivers the holders' state, and returns it; all ranks call it.

    The state is any nesting of dicts, lists and tuples, with tensors, the same on all holders; None
    on receivers. Tensors come on the CPU. `check` raises on receivers what it does not like in the
    plain values.
    """
    tensors: list[torch.Tensor] = []
    has_it = communicator.rank in holders
    packed = pack(state, tensors) if has_it else None
    packed, slots = communicator.broadcast_object(
        (packed, [(each.dtype, tuple(each.shape)) for each in tensors]), root=holders[0]
    )
    if not has_it:
        check(packed)
        tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in slots]
    lines = list(map(_flat, tensors))
    sharing = _sharing(communicator, holders, receivers)
    codec = _codec(communicator, sum(each.nbytes for each in lines), sharing)
    if len(holders) == 1:
        for line in filter(len, lines):
            communicator.broadcast(line, root=holders[0], codec=codec)
    else:
        _send_parts(communicator, holders, receivers, lines, codec)
    return unpack(packed, tensors)


def _sharing(ranks: Communicator, holders: Sequence[int], receivers: Sequence[int]) -> int:
    """The ranks of a host whose parts of a state go through its NIC at once; 1 for a broadcast."""
    if len(holders) == 1 or len(ranks.hosts) == 1:
        return 1
    return max(len({*host} & {*some}) for host in ranks.hosts for some in (holders, receivers))


def _codec(ranks: Communicator, nbytes: int, sharing: int) -> str:
    """The codec of a state, the same on all ranks, which call it together."""
    if nbytes < _LONG:
        return "none"
    # A measurement between sites takes many of their long round trips.
    slow = len(ranks.sites) > 1 or _rate(ranks) / sharing < _SLOW
    return "lossless" if slow else "none"


def _rate(ranks: Communicator) -> float:
    """The rate of their links, in bit/s."""
    if len(ranks.hosts) == 1 and not ranks.cost_model.parameters["within.beta"]:
        return math.inf  # shared memory
    return 8 / measured(ranks).parameters[f"{link_of(ranks)}.beta"]


def _send_parts(
    communicator: Communicator,
    holders: Sequence[int],
    receivers: Sequence[int],
    lines: Sequence[torch.Tensor],
    codec: str,
) -> None:
    total, count = sum(each.nbytes for each in lines), len(holders)
    ends = [total * i // count for i in range(count + 1)]
    works = []
    for i, holder in enumerate(holders):
        for piece in _cut(lines, ends[i], ends[i + 1]):
            if communicator.rank == holder:
                works += [
                    communicator.send(piece, to, codec=codec, async_op=True) for to in receivers
                ]
            elif communicator.rank in receivers:
                works.append(communicator.recv(piece, holder, async_op=True))
    for work in works:
        work.wait()


def _cut(lines: Sequence[torch.Tensor], begin: int, end: int) -> Iterator[torch.Tensor]:
    """The pieces between two bytes of lines that lie end to end, in whole elements."""
    at = 0
    for line in lines:
        size = line.element_size()
        first, last = (-(-max(each - at, 0) // size) for each in (begin, end))
        if first < min(last, len(line)):
            yield line[first:last]
        at += line.nbytes


def pack(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with placeholders for tensors, which are appended to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(_line_of(value))
        return _Slot(len(tensors) - 1, value.dtype, tuple(value.shape))
    return mapped(value, lambda each: pack(each, tensors))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one dimension; as bytes where the codec does nothing."""
    flat = tensor.view(-1)
    return flat if flat.dtype in _PACKED else flat.view(torch.uint8)


def _line_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, contiguous; NumPy has strides of 0 for one element or none."""
    own = tensor.detach().cpu().contiguous()
    return (
        torch.empty(own.shape, dtype=own.dtype, device="cpu").copy_(own) if own.numel() < 2 else own
    )


def unpack(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value with tensors in place of the placeholders."""
    if isinstance(value, _Slot):
        return tensors[value.number]
    return mapped(value, lambda each: unpack(each, tensors))
