"""Deadline: a point in time that all layers of an operation share; none restarts the clock."""

from __future__ import annotations

import math
import time

from gradwire._errors import InvalidArgument

_LONGEST = 2e6  # seconds, 23 days: poll() takes milliseconds in an int


class Deadline:
    """The time `seconds` from now, by the monotonic clock, at most in 23 days."""

    def __init__(self, seconds: float) -> None:
        if math.isnan(seconds):
            raise InvalidArgument(f"timeout={seconds!r} is not a number of seconds")
        self.seconds = min(seconds, _LONGEST)
        self.at = time.monotonic() + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def left(self) -> float:
        """Seconds left, never zero: a timeout for a call."""
        return max(self.remaining, 1e-3)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(seconds, self.remaining))
