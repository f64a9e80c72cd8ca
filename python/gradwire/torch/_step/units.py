"""What gradients are multiplied by. Residuals are in their units and must change with it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback


class Scaler(Protocol):
    """A torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """By which losses are multiplied."""


@dataclass(frozen=True)
class Units:
    """What the number 1 in a gradient counts: by what a loss is multiplied, and then a step."""

    loss_scale: float = 0.0  # 0 where it is not followed
    rates: tuple[float, ...] = ()  # by parameter group; empty where they are not followed
    ranks: int = 0  # over which it is averaged; 0 where that is not known

    def loss_factor(self, now: Units) -> float:
        """By which to multiply what was kept in these units: a half of the scale counts twice."""
        followed = self.loss_scale and now.loss_scale
        return now.loss_scale / self.loss_scale if followed else 1.0

    def rate_factor(self, now: Units) -> float:
        """The same for learning rates: what waited at twice the rate must still move as far.

        Rates of 0 are passed over. Raises InvalidArgument where groups differ in it. (Zheng et al.
        2019, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback",
        Algorithm 1)
        """
        if not all(now.rates) or len(self.rates) != len(now.rates):
            return 1.0
        factors = [before / after for before, after in zip(self.rates, now.rates, strict=True)]
        if not all(math.isclose(each, factors[0], rel_tol=1e-6) for each in factors):
            raise InvalidArgument(
                f"the learning rates changed from {list(self.rates)} to {list(now.rates)}: "
                "residuals follow one factor for all parameter groups only; leave out optimizer=, "
                "and use state.scale_residuals()"
            )
        return factors[0] if factors else 1.0

    def share_factor(self, now: Units) -> float:
        """The same for numbers of ranks: of what waited, an average over half as many has twice."""
        return now.ranks / self.ranks if self.ranks and now.ranks else 1.0

    def over(self, others: Units) -> Units:
        """These, and the others where these say nothing."""
        rates = self.rates if self.rates and all(self.rates) else others.rates
        return Units(self.loss_scale or others.loss_scale, rates, self.ranks or others.ranks)


class Scales:
    """Reads the units off what a training script sets them with."""

    def __init__(self, scaler: Scaler | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._scaler, self._optimizer = scaler, optimizer

    @property
    def followed(self) -> bool:
        """Whether there is any."""
        return self._scaler is not None or self._optimizer is not None

    def now(self) -> Units:
        """Raises InvalidArgument for a scale that cannot be followed."""
        return Units(self._loss_scale(), self._rates())

    def _loss_scale(self) -> float:
        if self._scaler is None:
            return 0.0
        now = float(self._scaler.get_scale())
        if not (now > 0 and math.isfinite(now)):
            raise InvalidArgument(f"the GradScaler's scale is {now}: residuals cannot follow it")
        return now

    def _rates(self) -> tuple[float, ...]:
        if self._optimizer is None:
            return ()
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)


class _Owner(Protocol):
    """The State whose residuals they are."""

    _names: dict[torch.Tensor, str]

    @property
    def closed(self) -> bool: ...

    @property
    def error(self) -> Exception | None: ...


@dataclass
class Kept:
    """What is kept beside the residuals, from one step to the next.

    A DDP model is made anew when ranks leave, and when parameters are frozen or thawed; the
    `ErrorFeedback` of the first one's hook is then given to the next one's, and this with it.
    """

    units: Units = field(default_factory=Units)  # of residuals and velocities
    velocities: dict[str, torch.Tensor] = field(default_factory=dict)  # by parameter
    state: weakref.ref[_Owner] | None = None  # whose they are now

    def require_free(self, names: Mapping[torch.Tensor, str]) -> None:
        """Raises InvalidArgument while another model's hook has them; `names` are this one's."""
        other = None if self.state is None else self.state()
        if other is None or other.closed or other.error is not None:
            return
        if other._names.keys().isdisjoint(names):
            raise InvalidArgument(
                "feedback= is in use by another model's hook: give each model an ErrorFeedback of "
                "its own; one model goes on with another's when that one's State is closed"
            )


_kept: WeakKeyDictionary[ErrorFeedback, Kept] = WeakKeyDictionary()


def kept_with(feedback: ErrorFeedback | None) -> Kept:
    """The same for the same feedback, for as long as that lives."""
    return Kept() if feedback is None else _kept.setdefault(feedback, Kept())
