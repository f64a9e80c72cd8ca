"""Methods of a DDP model that are replaced on the instance, where DDP offers no hook.

DDP sends a model's buffers, agrees on new buckets in the second forward, and counts who still has
inputs in `join()`, over the process group, whose errors do not name a lost rank. Buffers travel
over gradwire instead, and forward and `join()` raise the error of the hook's State in place of
torch's. When a version of torch lacks one of these methods, its own behaviour remains.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire._errors import Error
from gradwire.torch.ddp.state import State
from gradwire.torch.exchange.hook_state import warn_of_copy

_BUFFERS = "_distributed_broadcast_coalesced"
_FORWARD = "_pre_forward"
_JOIN = "join"
_FAILURE_SECONDS = 2.0  # in which the loss of a rank that made a collective fail becomes known


def broadcast_buffers_by(ddp: DistributedDataParallel, state: State) -> None:
    """Sends the model's buffers over the state's communicator until that is closed.

    DDP's public hooks do not tell which rank's buffers count: within `join()` it is not rank 0.
    """
    if hasattr(type(ddp), _BUFFERS):
        setattr(ddp, _BUFFERS, partial(_broadcast, state, weakref.ref(ddp)))


def _broadcast(
    state: State,
    model: weakref.ref[DistributedDataParallel],
    tensors: Sequence[torch.Tensor],
    buffer_size: int,
    authoritative_rank: int = 0,
) -> None:
    if state.closed or any(each.device.type != "cpu" for each in tensors):
        default = getattr(DistributedDataParallel, _BUFFERS)
        default(model(), tensors, buffer_size, authoritative_rank)
        return
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        found = [each for each in tensors if each.dtype is dtype]
        sent = [each.contiguous() for each in found]
        state.communicator.broadcast(sent, root=authoritative_rank)
        for each, received in zip(found, sent, strict=True):
            if each is not received:
                each.copy_(received)


def explain_in_forward(ddp: DistributedDataParallel, state: State) -> None:
    """Makes the model's forward raise the state's error in place of torch's."""
    if hasattr(type(ddp), _FORWARD):
        setattr(ddp, _FORWARD, partial(_pre_forward, state, weakref.ref(ddp)))


def _explain(state: State, error: BaseException | None) -> None:
    """Raises the state's error from one of torch's, if the state has one."""
    if isinstance(error, RuntimeError) and not (isinstance(error, Error) or state.closed):
        try:
            state._steps.check_failure(_FAILURE_SECONDS)
        except Error as its:
            raise its from error


def _pre_forward(
    state: State, model: weakref.ref[DistributedDataParallel], *inputs: Any, **named: Any
) -> Any:
    ddp = model()
    try:
        return getattr(type(ddp), _FORWARD)(ddp, *inputs, **named)
    except RuntimeError as error:
        _explain(state, error)
        raise


def join_by(ddp: DistributedDataParallel, state: State) -> None:
    """Makes the model's `join()` raise the state's error in place of torch's."""
    setattr(ddp, _JOIN, partial(_Join, state, weakref.ref(ddp)))


class _Join:
    """The context manager of torch's `join()`; raises the state's error in place of torch's."""

    def __init__(
        self, state: State, model: weakref.ref[DistributedDataParallel], *args: Any, **named: Any
    ) -> None:
        self._state = state
        join: Any = DistributedDataParallel.join
        self._torchs: AbstractContextManager[object] = join(model(), *args, **named)

    def __enter__(self) -> object:
        return self._torchs.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._torchs.__exit__(kind, error, trace)
        except RuntimeError as its:
            _explain(self._state, its)
            raise
        _explain(self._state, error)


def copy_without_hook(ddp: DistributedDataParallel, hooks: Sequence[RemovableHandle]) -> None:
    """Leaves the replaced methods and the model's forward `hooks` out of copies.

    `copy.deepcopy`, `AveragedModel` and `torch.save` accept a plain DDP model. The hook's State
    holds connections and threads, which cannot be copied, and a copy does not need them: it is not
    trained, or is wrapped anew. So `__getstate__`, with which copies begin, is replaced as well.
    """
    ids = [each.id for each in hooks]
    ours = ("__getstate__", _BUFFERS, _FORWARD, _JOIN)
    setattr(ddp, "__getstate__", partial(_state, weakref.ref(ddp), ours, ids))  # noqa: B010


def _state(
    model: weakref.ref[DistributedDataParallel], replaced: Collection[str], ids: Collection[int]
) -> dict[str, Any]:
    ddp = model()
    assert ddp is not None  # the method is this model's attribute
    attributes: dict[str, Any] = type(ddp).__getstate__(ddp)
    warn_of_copy()
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        kept = attributes[name].items()
        attributes[name] = OrderedDict((id, hook) for id, hook in kept if id not in ids)
    attributes["_comm_hooks"] = []  # DDP takes one
    return {name: each for name, each in attributes.items() if name not in replaced}
