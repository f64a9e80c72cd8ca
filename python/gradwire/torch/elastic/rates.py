"""Rates: learning rates that follow the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # schedulers' own, too
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")


class Rates:
    """Scales learning rates linearly with the number of ranks (Goyal et al. 2017, sec. 2.1).

    Ranks may scale in one change or in several that follow each other at the same step: the rates
    are computed from those before the first of them, so all ranks get the same bits.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, carried: Iterable[Any]) -> None:
        """Takes the optimizer, and what is carried with it, of which schedulers are scaled too."""
        self._optimizer = optimizer
        self._schedulers = list(_schedulers(carried))
        self.size = 0  # ranks for which the rates are; 0: not known yet
        self._before: tuple[int, list[Any]] | None = None  # ranks and rates before scaling

    def step(self) -> None:
        """Takes note that a step was made with the rates as they are."""
        self._before = None

    def undo(self) -> None:
        """Puts back the rates from before this step's changes."""
        if self._before is not None:
            self.size, values = self._before
            for (holder, name), value in zip(self._places(), values, strict=True):
                holder[name] = value
            self._before = None

    def follow(self, size: int) -> None:
        """Scales the rates to another number of ranks."""
        if self.size and size != self.size:
            values = [holder[name] for holder, name in self._places()]
            self._before = self.size, values
            for (holder, name), value in zip(self._places(), values, strict=True):
                holder[name] = value * size / self.size
        self.size = size

    def _places(self) -> Iterator[tuple[Any, Any]]:
        for group in self._optimizer.param_groups:
            yield from ((group, name) for name in _OF_GROUPS if name in group)
        lists = [getattr(each, name, []) for each in self._schedulers for name in _OF_SCHEDULERS]
        for rates in {id(each): each for each in lists}.values():  # schedulers share some
            yield from ((rates, i) for i in range(len(rates)))
        yield from ((vars(each), "eta_min") for each in self._schedulers if "eta_min" in vars(each))


def _schedulers(carried: Iterable[Any]) -> Iterator[Any]:
    """The schedulers, and those within them."""
    for each in carried:
        if hasattr(each, "_last_lr"):
            yield each
            yield from _schedulers(getattr(each, "_schedulers", ()))
