"""A progress bar that appears when a command takes more than two seconds."""

from __future__ import annotations

import sys
import time

from gradwire.lab.commands.tune import progress_bar

_PATIENCE = 2.0  # seconds


class LateBar:
    """Draws progress on stderr from two seconds on, and only on a terminal."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._shown = False

    def __call__(self, done: float, what: str) -> None:
        """Takes the share that is done; 1 ends the bar's line."""
        late = time.monotonic() - self._begun > _PATIENCE and sys.stderr.isatty()
        if self._shown or (late and done < 1):
            self._shown = done < 1
            progress_bar(done, what)
