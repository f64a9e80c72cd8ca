"""Checks of DiLoCo's arguments on each rank alone, and of parameters that it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gradwire._base.arguments import number, whole, wrong
from gradwire._errors import InvalidArgument


def rounds_of(every: Any, fragments: Any, delay: Any, mix: Any, rows: int) -> tuple[int, int, int]:
    """The first three as integers; raises InvalidArgument for rounds that cannot be."""
    every, fragments = whole(every, "every", least=1), whole(fragments, "fragments", least=1)
    delay = whole(delay, "delay", least=0)
    if every < fragments:
        raise InvalidArgument(
            f"every={every} is less than fragments={fragments}: each fragment is exchanged once in "
            "every= inner steps; give a larger every= or fewer fragments"
        )
    if fragments > rows:
        raise InvalidArgument(
            f"fragments={fragments}: the parameters have {rows} rows, and a fragment at least one"
        )
    if delay > every // fragments:
        raise InvalidArgument(
            f"delay={delay} is more than the {every // fragments} inner steps from one fragment to "
            "the next: one fragment travels at a time"
        )
    if not 0 <= number(mix, "mix") < 1:
        raise InvalidArgument(f"mix={mix} is not from 0 to below 1")
    return every, fragments, delay


def require_outer_optimizer(lr: Any, momentum: Any) -> None:
    """Raises InvalidArgument for rates that cannot be."""
    if not 0 < number(lr, "lr") < math.inf:
        raise InvalidArgument(f"lr={lr} is not a positive number: local SGD has lr=1")
    if not 0 <= number(momentum, "momentum") < 1:
        raise InvalidArgument(f"momentum={momentum} is not from 0 to below 1")


def trained_parameters(model: Any, inner_optimizer: Any) -> dict[str, nn.Parameter]:
    """The model's parameters that one or several optimizers train, by name.

    Raises InvalidArgument if there are none, if an optimizer trains others, and for no optimizer.
    """
    several = isinstance(inner_optimizer, list | tuple)
    optimizers = inner_optimizer if several else [inner_optimizer]
    for each in optimizers:
        if isinstance(each, type) or not hasattr(each, "param_groups"):
            wanted = "the optimizer that makes the inner steps, or a list of them"
            raise wrong(each, "inner_optimizer", wanted)
    if not isinstance(model, nn.Module):
        raise wrong(model, "model", "a torch.nn.Module")
    named = dict(model.named_parameters())
    owned = {each for its in optimizers for group in its.param_groups for each in group["params"]}
    strangers = [each for each in owned - set(named.values()) if each.requires_grad]
    if strangers:
        shapes = ", ".join(str(tuple(each.shape)) for each in strangers[:3])
        raise InvalidArgument(
            f"the inner optimizer trains {len(strangers)} parameters that are not the model's, of "
            f"shapes {shapes}: they would differ between ranks; give a module that has all of them"
        )
    found = {name: each for name, each in named.items() if each.requires_grad and each in owned}
    if not found:
        raise InvalidArgument("the inner optimizer trains none of the model's parameters")
    return found


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """Which of a rank's tensors have NaN or Inf, as a text; empty if none has."""
    named = [repr(name) for name, each in tensors.items() if not torch.isfinite(each).all()]
    more = ", ..." if len(named) > 3 else ""
    return f"{', '.join(named[:3])}{more} had NaN or Inf after the inner steps" if named else ""


class Untrained:
    """Parameters that do not travel because nothing changes them: frozen, or of no optimizer."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self._model, self._trained = model, trained
        self._versions: dict[str, int] = {}
        self.note()

    def note(self) -> None:
        """Takes note of them as they are."""
        self._versions = {name: each._version for name, each in self._parameters()}

    def problem(self) -> str:
        """The reason why ranks may differ in them by now; empty if they do not."""
        for name, each in self._parameters():
            if self._versions.get(name) != each._version:
                return (
                    f"the parameter {name!r} was changed, which was frozen or of no inner "
                    "optimizer when DiLoCo was made, and is not averaged: make a new DiLoCo after "
                    "thawing parameters, and give it all optimizers, inner_optimizer=[a, b]"
                )
        return ""

    def _parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        known = set(self._trained.values())
        return [pair for pair in self._model.named_parameters() if pair[1] not in known]
