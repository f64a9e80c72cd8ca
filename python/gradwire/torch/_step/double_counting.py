"""Refuses what would count momentum or a gradient twice where the hook has the momentum.

Optimizers are looked at in each of their steps, as schedulers (OneCycleLR) and checkpoints set
momentum later than `register`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument

_log = logging.getLogger("gradwire")


class _Hook(Protocol):
    """The State of a DDP model."""

    _names: dict[torch.Tensor, str]
    communicator: Communicator

    @property
    def closed(self) -> bool: ...


def require_no_momentum(
    optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]
) -> None:
    """Raises InvalidArgument for an optimizer that has momentum of its own for one of these."""
    for group in optimizer.param_groups:
        own = group.get("momentum") or 0
        if own > 0 and _has_any(group, parameters):
            raise InvalidArgument(
                f"{type(optimizer).__name__} has momentum={own} and gradwire's hook momentum= too, "
                "which would count it twice: build the optimizer with momentum=0, or leave "
                "momentum= out of register(); OneCycleLR needs cycle_momentum=False"
            )


def watch_optimizers(state: _Hook) -> None:
    """Looks at each step of any optimizer of the state's parameters, until it is closed."""
    handle = register_optimizer_step_pre_hook(_Watch(state))
    weakref.finalize(state, handle.remove)


class _Watch:
    """What torch calls before the step of every optimizer; does not keep the state."""

    def __init__(self, state: _Hook) -> None:
        self._state, self._warned = weakref.ref(state), False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        state = self._state()
        if state is None or state.closed:
            return
        require_no_momentum(optimizer, state._names)
        if not self._warned and state.communicator.rank == 0:
            self._warned = warn_of_betas(optimizer, state._names)


def warn_of_betas(optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]) -> bool:
    """Logs where an optimizer of Adam's kind smooths what the hook has smoothed; says whether."""
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if betas and betas[0] and _has_any(group, parameters):
            _log.warning(
                "%s has momentum of its own (betas=%s) and gradwire's hook momentum= too, so "
                "gradients are smoothed twice: leave momentum= out of register(), or set the first "
                "beta to 0",
                type(optimizer).__name__,
                tuple(betas),
            )
            return True
    return False


def _has_any(group: Mapping[str, Any], parameters: Mapping[torch.Tensor, str]) -> bool:
    return any(each in parameters for each in group["params"])


class Accumulated:
    """Finds gradients that were added to an average which the hook has delivered before.

    DDP would hand over their sum, in which momentum would count the former gradients again.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._delivered: set[str] = set()  # parameters whose .grad may hold an average
        self._added_to: set[str] = set()  # of these, where a gradient was added
        self._parameters = {name: weakref.ref(parameter) for parameter, name in names.items()}
        accumulated = weakref.ref(self)
        hooks = [
            parameter.register_hook(_Look(accumulated, self._parameters[name], name))
            for parameter, name in names.items()
            if parameter.requires_grad
        ]
        self.let_go = weakref.finalize(self, _remove, hooks)
        self.let_go.atexit = False

    def look(self, name: str, before: torch.Tensor | None) -> None:
        """A gradient of the parameter is about to be added to what was there `before`."""
        if name not in self._delivered:
            return
        if before is not None and bool(before.any()):
            self._added_to.add(name)
        else:  # zeroed since
            self._delivered.discard(name)
            self._added_to.discard(name)

    def deliver(self, names: Iterable[str]) -> None:
        """The parameters' .grad now hold averages."""
        self._delivered.update(names)

    def require_none(self, names: Iterable[str]) -> None:
        """Raises InvalidArgument where one of these is handed over with a former average."""
        again = sorted(filter(self._holds_any, self._added_to.intersection(names)))
        if again:
            raise InvalidArgument(
                f"the gradient of {again[0]!r} still holds the average of an earlier backward, "
                "which momentum= or clip_norm= would count again: call zero_grad() between two "
                "backwards that are averaged; to accumulate, run all but the last one, forward "
                "and backward, within no_sync(), or add up the losses"
            )

    def _holds_any(self, name: str) -> bool:
        """Nothing where it was zeroed, and no backward has come to the parameter since."""
        parameter = self._parameters[name]()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and bool(gradient.any())


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for each in hooks:
        each.remove()


class _Look:
    """Parameters outlive the hook's state, and must not keep it."""

    def __init__(
        self,
        accumulated: weakref.ref[Accumulated],
        parameter: weakref.ref[torch.Tensor],
        name: str,
    ) -> None:
        self._accumulated, self._parameter, self._name = accumulated, parameter, name

    def __call__(self, _: torch.Tensor) -> None:
        accumulated, parameter = self._accumulated(), self._parameter()
        if accumulated is not None and parameter is not None:
            accumulated.look(self._name, parameter.grad)
