"""A DDP model's buffers over gradwire, so that a lost rank has a name in forward too.

DDP offers no public hook that knows whose buffers count (within `join()` it is not rank 0), so the
method that it sends them with is replaced on the model. A torch without it keeps its own way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from gradwire.torch._state import State

_METHOD = "_distributed_broadcast_coalesced"


def broadcast_buffers_by(ddp: DistributedDataParallel, state: State) -> None:
    """Lets the model's buffers travel over the state's communicator until that is closed."""
    if hasattr(type(ddp), _METHOD):
        setattr(ddp, _METHOD, partial(_broadcast, state, weakref.ref(ddp)))


def _broadcast(
    state: State,
    model: weakref.ref[DistributedDataParallel],
    tensors: Sequence[torch.Tensor],
    buffer_size: int,
    authoritative_rank: int = 0,
) -> None:
    if state.closed or any(each.device.type != "cpu" for each in tensors):
        default = getattr(DistributedDataParallel, _METHOD)
        default(model(), tensors, buffer_size, authoritative_rank)
        return
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        found = [each for each in tensors if each.dtype is dtype]
        sent = [each.contiguous() for each in found]
        state.communicator.broadcast(sent, root=authoritative_rank)
        for each, received in zip(found, sent, strict=True):
            if each is not received:
                each.copy_(received)
