"""Time that long runs lose to failures and checkpoints (Young 1974; Daly 2006)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire._errors import InvalidArgument

_HOPELESS = 500.0  # mean times between failures in which nothing may fail


@dataclass(frozen=True)
class Failures:
    """Failures of a run, in seconds: the mean time between those of one host, and what they cost.

    `checkpoint` is the time to write one, `restart` the time until work goes on after a failure.
    """

    between: float
    hosts: int
    checkpoint: float
    restart: float = 0.0

    def __post_init__(self) -> None:
        for name in ("between", "checkpoint"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name}={getattr(self, name)} is not a positive time")
        if self.hosts < 1 or self.restart < 0:
            raise InvalidArgument(f"hosts={self.hosts}, restart={self.restart}: out of range")

    @property
    def mean(self) -> float:
        """The mean seconds between failures of the run: any host's ends it."""
        return self.between / self.hosts

    @property
    def young(self) -> float:
        """The best interval between checkpoints by Young 1974: √(2 δ M)."""
        return math.sqrt(2 * self.checkpoint * self.mean)

    @property
    def daly(self) -> float:
        """The best interval by Daly 2006, eq. 37; the mean time where checkpoints take too long."""
        if self.checkpoint >= 2 * self.mean:
            return self.mean
        part = math.sqrt(self.checkpoint / (2 * self.mean))
        return self.young * (1 + part / 3 + part * part / 9) - self.checkpoint

    def lost(self, interval: float) -> float:
        """The share of the run's time that is no progress, with checkpoints every `interval`.

        Daly 2006, eq. 20: failures come at random, also while checkpoints are written and while
        the run starts again.
        """
        if not interval > 0:
            raise InvalidArgument(f"interval={interval} is not a positive time")
        exponent = (interval + self.checkpoint) / self.mean
        if exponent + self.restart / self.mean > _HOPELESS:
            return 1.0
        whole = self.mean * math.exp(self.restart / self.mean) * math.expm1(exponent) / interval
        return 1 - 1 / whole
