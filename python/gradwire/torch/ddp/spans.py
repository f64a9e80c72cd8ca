"""StepSpans: a training step in traces: forward, backward, wait, optimizer, and the whole."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradwire._trace import clock
from gradwire._trace.track import Track


class StepSpans:
    """Records one model's steps, while its communicator records.

    A step is from its first forward to the end of the optimizer's step.
    """

    def __init__(self, track: Track, parameters: Mapping[torch.Tensor, object]) -> None:
        """`parameters` are those that the optimizer of these steps has, or some of them."""
        self._track, self._parameters = track, parameters
        self._step: int | None = None  # when it began
        self._forward: int | None = None
        self._backward: int | None = None
        self._optimizer: int | None = None
        self._steps = 0
        its = weakref.WeakMethod(self._begin_optimizer), weakref.WeakMethod(self._end_optimizer)
        hooks = [
            register_optimizer_step_pre_hook(lambda *given: _call(its[0], given[0])),
            register_optimizer_step_post_hook(lambda *given: _call(its[1], given[0])),
        ]
        weakref.finalize(self, _remove, hooks)

    def begin_forward(self) -> None:
        """Notes the begin of a forward, and of a step if there is none."""
        self._forward = clock.now()
        if self._step is None:
            self._step = self._forward

    def end_forward(self) -> None:
        """Records the forward."""
        self._record("forward", self._forward)
        self._forward = None

    def begin_backward(self) -> None:
        """Notes the begin of a backward, unless it is known."""
        if self._backward is None:
            self._backward = clock.now()

    def end_backward(self, waits_since: int | None) -> None:
        """Records the backward, and that it waited for averages since then."""
        self._record("wait for averages", waits_since)
        self._record("backward", self._backward)
        self._backward = None

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps_ours(optimizer):
            self._optimizer = clock.now()

    def _end_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._optimizer is not None and self._steps_ours(optimizer):
            self._record("optimizer", self._optimizer)
            self._record(f"step {self._steps}", self._step)
            self._steps += 1
            self._step = self._optimizer = None

    def _steps_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        return any(each in self._parameters for group in groups for each in group["params"])

    def _record(self, name: str, begin: int | None) -> None:
        if begin is not None:
            self._track.span(name, begin)


def _call(method: weakref.WeakMethod[Any], optimizer: torch.optim.Optimizer) -> None:
    found = method()
    if found is not None:
        found(optimizer)


def _remove(hooks: list[RemovableHandle]) -> None:
    for each in hooks:
        each.remove()
