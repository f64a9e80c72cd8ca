"""Raises when a backward left DDP's hook out, before the ranks' models drift apart unnoticed.

It happens when only the inner module is compiled (pytorch#109774), when the reducer is left without
a word (pytorch#152735, #187732), and at a second backward through one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from gradwire._errors import Error


class Guard:
    """Watches backwards through the outputs of forwards that DDP is to synchronise."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], backwards_averaged: Callable[[], int]
    ) -> None:
        """`backwards_averaged` counts those of which the hook was given the last bucket."""
        self._parameters = [each for each in parameters if each.requires_grad]
        self._count = backwards_averaged
        self._seen = 0
        self._watches = False
        self._partly = False  # some gradients came, and the hook did not run yet
        self._before: list[tuple[torch.Tensor | None, int]] = []

    def require_averaged(self) -> None:
        """Raises where gradients of an earlier forward were never averaged."""
        if self._partly and self._count() == self._seen:
            self._refuse()

    def after_forward(self, output: Any) -> None:
        """Has autograd tell when a backward reaches the output."""
        for each in _tensors(output):
            if each.requires_grad:
                each.register_hook(self._on_gradient)

    def _on_gradient(self, _: torch.Tensor) -> None:
        if self._watches:
            return
        self._watches = True
        if not self._partly or self._count() != self._seen:
            self._seen, self._partly = self._count(), False
            self._before = [_accumulated(each) for each in self._parameters]
        # A static graph hands over its first buckets in such a callback, too: come after it.
        _at_the_end(lambda: _at_the_end(self._check))

    def _check(self) -> None:
        self._watches = False
        if self._count() != self._seen:
            self._before = []
            return
        moved = [
            now[0] is not None and (now[0] is not old[0] or now[1] != old[1])
            for now, old in zip(map(_accumulated, self._parameters), self._before, strict=True)
        ]
        self._partly = any(moved)
        if all(moved):
            self._refuse()

    def _refuse(self) -> None:
        self._partly = False
        raise Error(
            "backward has ended, and DDP did not give its gradients to gradwire's hook, so each "
            "rank has its own: compile the DDP model and not the module inside, run backward once "
            "for each forward, and give every parameter a gradient or set "
            "find_unused_parameters=True"
        )


def _at_the_end(call: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(call)


def _accumulated(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


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
