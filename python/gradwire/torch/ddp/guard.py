"""Guard: raises when a backward bypassed the hook, before the ranks' models diverge unnoticed.

It happens when only the inner module is compiled (pytorch#109774), when the reducer is left out
silently (pytorch#152735, #187732), and in a second backward through one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from gradwire._errors import Error

_Gradient: TypeAlias = tuple[torch.Tensor | None, int]  # with its version

_NAMED = 5  # parameters, in an error


class Guard:
    """Watches backwards through the outputs of forwards whose gradients DDP must synchronise."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], backwards_averaged: Callable[[], int]
    ) -> None:
        """`parameters` are by name; `backwards_averaged` counts backwards that reached the hook."""
        self._parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self._count = backwards_averaged
        self._seen = 0
        self._watches = False
        # Parameters without a gradient, while others have one and the hook has not run yet.
        self._missing: list[str] = []
        self._on_leaves: list[RemovableHandle] = []
        self.on_backward: Callable[[], None] | None = None  # called when a backward begins
        self._before: list[_Gradient] = []

    def require_averaged(self) -> None:
        """Raises Error when gradients of an earlier forward were never averaged."""
        if self._missing and self._count() == self._seen:
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
        if self.on_backward is not None:
            self.on_backward()
        if not self._missing or self._count() != self._seen:
            self._seen, self._missing = self._count(), []
            self._before = _accumulated(self._parameters.values())
        # A static graph submits its first buckets in such a callback, too: run after that one.
        _after_backward(lambda: _after_backward(self._check))

    def _check(self) -> None:
        self._watches = False
        self.remove_leaf_hooks()
        if self._count() != self._seen:
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
