"""What `register` hangs on a DDP model: hooks around its forward, a guard, and replaced methods.

DDP sends a model's buffers, agrees on new buckets in the second forward, and counts who still has
inputs in `join()`, over the process group, whose errors do not name a lost rank. Methods are
replaced on the instance, where DDP offers no hook: buffers travel over gradwire instead, and
forward and `join()` raise the error of the hook's State in place of torch's. When a version of
torch lacks one of these methods, its own behaviour remains.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire._errors import Error
from gradwire.torch.ddp.hook import Steps
from gradwire.torch.ddp.state import State
from gradwire.torch.exchange.hook_state import warn_of_copy

_BUFFERS = "_distributed_broadcast_coalesced"
_FORWARD = "_pre_forward"
_JOIN = "join"
_FAILURE_SECONDS = 2.0  # in which the loss of a rank that made a collective fail becomes known

_Gradient: TypeAlias = tuple[torch.Tensor | None, int]  # with its version

_NAMED = 5  # parameters, in an error


def install(
    ddp: DistributedDataParallel, state: State, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Installs all of this; `parameters` are those whose gradients DDP averages, by name.

    Every forward with gradients raises the state's error, and its backward is guarded, in eval()
    too: trainers call train() on the module inside, and leave the wrapper as it was.
    """
    guard = Guard(parameters, state._steps)
    state._guarded = guard.require_averaged
    hooks = (
        ddp.register_forward_pre_hook(partial(_before_forward, state, guard)),
        ddp.register_forward_hook(partial(_after_forward, state, guard)),
    )
    model = weakref.ref(ddp)
    if hasattr(type(ddp), _BUFFERS):
        setattr(ddp, _BUFFERS, partial(_broadcast, state, model))
    if hasattr(type(ddp), _FORWARD):
        setattr(ddp, _FORWARD, partial(_pre_forward, state, model))
    setattr(ddp, _JOIN, partial(_Join, state, model))
    _copy_without_hook(ddp, hooks)


def _before_forward(state: State, guard: Guard, _: DistributedDataParallel, __: Any) -> None:
    guard.remove_leaf_hooks()
    if torch.is_grad_enabled():
        if not state._has_forward:
            state._has_forward = True
            state._watch.note_forward()
        state._steps.begin_forward()


def _after_forward(
    state: State, guard: Guard, ddp: DistributedDataParallel, _: Any, output: Any
) -> None:
    steps = state._steps
    trains = torch.is_grad_enabled() and ddp.require_backward_grad_sync and not steps.closed
    steps.end_forward(trains=trains)
    if trains:
        guard.require_averaged()  # after DDP's own forward, whose error is more precise
        guard.after_forward(output)


class Guard:
    """Raises when a backward bypassed the hook, before the ranks' models diverge unnoticed.

    It happens when only the inner module is compiled (pytorch#109774), when the reducer is left out
    silently (pytorch#152735, #187732), and in a second backward through one forward. The guard
    watches backwards through the outputs of forwards whose gradients DDP must synchronise.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], steps: Steps) -> None:
        """`parameters` are by name; `steps` are those that the hook makes of backwards."""
        self._parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self._steps = steps
        self._seen = 0
        self._watches = False
        # Parameters without a gradient, while others have one and the hook has not run yet.
        self._missing: list[str] = []
        self._on_leaves: list[RemovableHandle] = []
        self._before: list[_Gradient] = []

    def require_averaged(self) -> None:
        """Raises Error when gradients of an earlier forward were never averaged."""
        if self._missing and self._steps.submitted_steps == self._seen:
            self._refuse()

    def after_forward(self, output: Any) -> None:
        """Has autograd call back when a backward reaches the output."""
        for each in _tensors(output):
            if each.requires_grad:
                handle = each.register_hook(self._on_gradient)
                if each.is_leaf:
                    self._on_leaves.append(handle)

    def remove_leaf_hooks(self) -> None:
        """Removes the hooks on leaves, such as parameters, that an earlier forward returned.

        Leaves outlive that forward, and their later gradients need not come from it.
        """
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves = []

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self._watches:
            return
        self._watches = True
        self._steps.begin_backward()
        if not self._missing or self._steps.submitted_steps != self._seen:
            self._seen, self._missing = self._steps.submitted_steps, []
            self._before = _accumulated(self._parameters.values())
        # A static graph submits its first buckets in such a callback, too: run after that one.
        _after_backward(lambda: _after_backward(self._check))

    def _check(self) -> None:
        self._watches = False
        self.remove_leaf_hooks()
        if self._steps.submitted_steps != self._seen:
            self._before = []
            return
        now = _accumulated(self._parameters.values())
        without = [
            name
            for name, its, old in zip(self._parameters, now, self._before, strict=True)
            if not _moved(its, old)
        ]
        self._missing = without if len(without) < len(self._parameters) else []
        if not without:
            self._refuse()

    def _refuse(self) -> None:
        missing, self._missing = self._missing, []
        raise Error(
            "backward has ended, and DDP did not give its gradients to gradwire's hook, so each "
            "rank has its own: compile the DDP model and not the module inside, run backward once "
            "for each forward, and give every parameter a gradient or set "
            f"find_unused_parameters=True{_without_gradient(missing)}"
        )


def _without_gradient(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"; no gradient came for {', '.join(names[:_NAMED])}{more}"


def _after_backward(call: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(call)


def _accumulated(parameters: Iterable[torch.Tensor]) -> list[_Gradient]:
    """The gradients of parameters, and how often each was written."""
    gradients = [each.grad for each in parameters]
    return [(each, -1 if each is None else each._version) for each in gradients]


def _moved(now: _Gradient, old: _Gradient) -> bool:
    return now[0] is not None and (now[0] is not old[0] or now[1] != old[1])


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _tensors(each)
    elif hasattr(output, "__dataclass_fields__"):
        yield from _tensors(list(vars(output).values()))


def _broadcast(
    state: State,
    model: weakref.ref[DistributedDataParallel],
    tensors: Sequence[torch.Tensor],
    buffer_size: int,
    authoritative_rank: int = 0,
) -> None:
    """Sends the model's buffers over the state's communicator until that is closed.

    DDP's public hooks do not tell which rank's buffers count: within `join()` it is not rank 0.
    """
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


def _copy_without_hook(ddp: DistributedDataParallel, hooks: Sequence[RemovableHandle]) -> None:
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
