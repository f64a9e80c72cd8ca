"""One point in time that a whole rendezvous shares, so that no layer restarts the clock."""

from __future__ import annotations

import time


class Deadline:
    """`seconds` from now, by the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self.at

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(seconds, self.remaining))
