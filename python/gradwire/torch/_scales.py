"""What gradients are multiplied by. Residuals are in their units and must change with it."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from gradwire._errors import InvalidArgument


class Scaler(Protocol):
    """A torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """By which losses are multiplied."""


class LossScale:
    """The scaler's: a residual of half the scale counts twice."""

    def __init__(self, scaler: Scaler | None) -> None:
        self._scaler = scaler
        self.last: float | None = None

    def factor(self) -> float:
        """By which residuals must be multiplied before this step."""
        if self._scaler is None:
            return 1
        now = float(self._scaler.get_scale())
        if not (now > 0 and math.isfinite(now)):
            raise InvalidArgument(f"the GradScaler's scale is {now}: residuals cannot follow it")
        last, self.last = self.last, now
        return 1 if last is None else now / last


class LearningRate:
    """The optimizer's: what was held back at twice the rate must still move weights as far.

    (Zheng et al. 2019, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-
    Feedback", Algorithm 1)
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self.last: list[float] = []  # by parameter group

    def factor(self) -> float:
        """By which residuals must be multiplied before this step; rates of 0 are passed over."""
        if self._optimizer is None:
            return 1
        now = [float(group["lr"]) for group in self._optimizer.param_groups]
        if not all(now):
            return 1
        last, self.last = self.last, now
        if len(last) != len(now):
            return 1
        factors = [before / after for before, after in zip(last, now, strict=True)]
        if not all(math.isclose(each, factors[0], rel_tol=1e-6) for each in factors):
            raise InvalidArgument(
                f"the learning rates changed from {last} to {now}: residuals follow one factor for "
                "all parameter groups only; leave out optimizer=, and use state.scale_residuals()"
            )
        return factors[0]
