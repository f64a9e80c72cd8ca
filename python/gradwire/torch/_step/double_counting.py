"""Checks that refuse momentum or gradients that would count twice when the hook has momentum."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from gradwire._errors import InvalidArgument

_log = logging.getLogger("gradwire")


def require_no_momentum(
    optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]
) -> None:
    """Raises InvalidArgument for an optimizer with momentum of its own for one of these."""
    for group in optimizer.param_groups:
        own = group.get("momentum") or 0
        if own > 0 and has_any(group, parameters):
            raise InvalidArgument(
                f"{type(optimizer).__name__} has momentum={own} and gradwire's hook momentum= too, "
                "which would count it twice: build the optimizer with momentum=0, or leave "
                "momentum= out of register(); OneCycleLR needs cycle_momentum=False"
            )


def warn_of_betas(optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]) -> bool:
    """Logs when an optimizer like Adam smooths gradients again; returns whether it does."""
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if betas and betas[0] and has_any(group, parameters):
            _log.warning(
                "%s has momentum of its own (betas=%s) and gradwire's hook momentum= too, so "
                "gradients are smoothed twice: leave momentum= out of register(), or set the first "
                "beta to 0",
                type(optimizer).__name__,
                tuple(betas),
            )
            return True
    return False


def has_any(group: Mapping[str, Any], parameters: Mapping[torch.Tensor, str]) -> bool:
    """Whether a parameter group of an optimizer has any of these."""
    return any(each in parameters for each in group["params"])


class AccumulationCheck:
    """Finds gradients that were added to an average which the hook delivered before.

    DDP would submit their sum, in which momentum would count the earlier gradients again.
    """

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._delivered: set[str] = set()  # parameters whose .grad may hold an average
        self._added_to: set[str] = set()  # of these, where a gradient was added
        self._parameters = {name: weakref.ref(parameter) for parameter, name in names.items()}
        check = weakref.ref(self)
        hooks = [
            parameter.register_hook(_GradientHook(check, self._parameters[name], name))
            for parameter, name in names.items()
            if parameter.requires_grad
        ]
        self.remove_hooks = weakref.finalize(self, _remove, hooks)
        self.remove_hooks.atexit = False

    def note_gradient(self, name: str, before: torch.Tensor | None) -> None:
        """Notes that a gradient is about to be added to `before`, which the parameter has."""
        if name not in self._delivered:
            return
        if before is not None and bool(before.any()):
            self._added_to.add(name)
        else:  # zeroed since
            self._delivered.discard(name)
            self._added_to.discard(name)

    def deliver(self, names: Iterable[str]) -> None:
        """Notes that the .grad of these parameters now hold averages."""
        self._delivered.update(names)

    def require_none(self, names: Iterable[str]) -> None:
        """Raises InvalidArgument when one of these was added to an earlier average."""
        again = sorted(filter(self._is_nonzero, self._added_to.intersection(names)))
        if again:
            raise InvalidArgument(
                f"the gradient of {again[0]!r} still holds the average of an earlier backward, "
                "which momentum= or clip_norm= would count again: call zero_grad() between two "
                "backwards that are averaged; to accumulate, run all but the last one, forward "
                "and backward, within no_sync(), or add up the losses"
            )

    def _is_nonzero(self, name: str) -> bool:
        """Whether the parameter has a nonzero gradient, which zero_grad() would have cleared."""
        parameter = self._parameters[name]()
        gradient = None if parameter is None else parameter.grad
        return gradient is not None and bool(gradient.any())


def _remove(hooks: Iterable[RemovableHandle]) -> None:
    for each in hooks:
        each.remove()


class _GradientHook:
    """A hook on a parameter, which outlives the hook's state and must not keep it alive."""

    def __init__(
        self,
        check: weakref.ref[AccumulationCheck],
        parameter: weakref.ref[torch.Tensor],
        name: str,
    ) -> None:
        self._check, self._parameter, self._name = check, parameter, name

    def __call__(self, _: torch.Tensor) -> None:
        check, parameter = self._check(), self._parameter()
        if check is not None and parameter is not None:
            check.note_gradient(self._name, parameter.grad)
