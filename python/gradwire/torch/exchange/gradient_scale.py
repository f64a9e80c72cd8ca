"""GradientScale: the factors that gradients contain, whose changes residuals must follow."""

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


class RatesDifferError(InvalidArgument):
    """Raised when parameter groups change their learning rates by different factors."""


class Scaler(Protocol):
    """A torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """The factor that losses are multiplied by."""


@dataclass(frozen=True)
class GradientScale:
    """Loss scale, learning rates and number of ranks: they decide what a residual stands for."""

    loss_scale: float = 0.0  # 0 when not followed
    rates: tuple[float, ...] = ()  # by parameter group; empty when not followed
    ranks: int = 0  # of the average; 0 when unknown

    def loss_factor(self, to: GradientScale) -> float:
        """The factor that takes a residual from this loss scale to another."""
        followed = self.loss_scale and to.loss_scale
        return to.loss_scale / self.loss_scale if followed else 1.0

    def rate_factor(self, to: GradientScale) -> float:
        """The factor for learning rates: a residual from twice the rate must still move as far.

        Rates of 0 are ignored. Raises RatesDifferError when groups differ in the factor. (Zheng et
        al. 2019, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback",
        Algorithm 1)
        """
        if not all(to.rates) or len(self.rates) != len(to.rates):
            return 1.0
        factors = [before / after for before, after in zip(self.rates, to.rates, strict=True)]
        if not all(math.isclose(each, factors[0], rel_tol=1e-6) for each in factors):
            raise RatesDifferError(
                f"the learning rates changed from {list(self.rates)} to {list(to.rates)}: "
                "residuals follow one factor for all parameter groups only; leave out optimizer=, "
                "and use state.scale_residuals()"
            )
        return factors[0] if factors else 1.0

    def share_factor(self, to: GradientScale) -> float:
        """The factor for numbers of ranks: an average over half as many weighs a residual twice."""
        return to.ranks / self.ranks if self.ranks and to.ranks else 1.0

    def or_else(self, other: GradientScale) -> GradientScale:
        """A scale with the other's values where this one follows none."""
        rates = self.rates if self.rates and all(self.rates) else other.rates
        return GradientScale(self.loss_scale or other.loss_scale, rates, self.ranks or other.ranks)


_UNKNOWN = GradientScale()


class ScaleTracker:
    """Reads loss scale and learning rates from the training script's scaler and optimizer."""

    def __init__(self, scaler: Scaler | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self.followed = scaler is not None or optimizer is not None

    def read(self, *, on_host: bool = False) -> GradientScale:
        """The scale at this moment; raises InvalidArgument for one that cannot be followed.

        Where the loss scale is on a GPU (`on_gpu`), it is only read if it must be there `on_host`,
        since that waits for the GPU.
        """
        if not self.followed:
            return _UNKNOWN
        if not on_host and self.on_gpu() is not None:
            return GradientScale(rates=self._rates())
        return GradientScale(self._loss_scale(), self._rates())

    def on_gpu(self) -> torch.Tensor | None:
        """The loss scale in a GPU's memory; None where it is on the host, or there is none yet."""
        read = getattr(self._scaler, "_get_scale_async", None)
        is_enabled = getattr(self._scaler, "is_enabled", lambda: True)
        scale = None if read is None or not is_enabled() else read()
        return scale if isinstance(scale, torch.Tensor) and scale.is_cuda else None

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


class _HookState(Protocol):
    """The State that uses the residuals."""

    _names: dict[torch.Tensor, str]

    @property
    def closed(self) -> bool: ...

    @property
    def error(self) -> Exception | None: ...


@dataclass
class PersistentState:
    """Scale and velocities that belong to an ErrorFeedback, from one step to the next.

    A DDP model is made anew when ranks leave, and when parameters are frozen or thawed; the
    `ErrorFeedback` of the first one's hook is then given to the next one's, and this with it.
    """

    scale: GradientScale = field(default_factory=GradientScale)  # of the residuals and velocities
    velocities: dict[str, torch.Tensor] = field(default_factory=dict)  # by parameter
    on_gpu: torch.Tensor | None = None  # the loss scale, where only a GPU knows it
    decay: float = 1.0  # what of a residual stays when a step has kept it
    state: weakref.ref[_HookState] | None = None  # the State that uses them now

    def require_free(self, names: Mapping[torch.Tensor, str]) -> None:
        """Raises InvalidArgument while another model's hook uses them; `names` are this model's."""
        other = None if self.state is None else self.state()
        if other is None or other.closed or other.error is not None:
            return
        if other._names.keys().isdisjoint(names):
            raise InvalidArgument(
                "feedback= is in use by another model's hook: give each model an ErrorFeedback of "
                "its own; one model goes on with another's when that one's State is closed"
            )


_persistent: WeakKeyDictionary[ErrorFeedback, PersistentState] = WeakKeyDictionary()


def persistent_state_of(feedback: ErrorFeedback | None) -> PersistentState:
    """The persistent state of a feedback, always the same object; a new one for None."""
    if feedback is None:
        return PersistentState()
    return _persistent.setdefault(feedback, PersistentState())
