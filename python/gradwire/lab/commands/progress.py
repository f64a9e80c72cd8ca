"""The progress bar of commands: at once, or when one takes more than two seconds."""

from __future__ import annotations

import sys
import time

_PATIENCE = 2.0  # seconds


def progress_bar(done: float, what: str) -> None:
    """Draws a progress bar on stderr, in place; `done` is from 0 to 1."""
    full = round(32 * done)
    text = f"\r[{'#' * full}{'.' * (32 - full)}] {100 * done:3.0f} %  {what}"
    print(f"{text:<79}", end="\n" if done >= 1 else "", file=sys.stderr, flush=True)


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
