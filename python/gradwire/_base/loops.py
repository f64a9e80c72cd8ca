"""Loops that accept connections: an error ends one of their turns, and never the loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradwire._errors import describe

_PAUSE_SECONDS = 0.1  # after an error, whose reason may be over then
_pause = threading.Event()


def survive(turn: Callable[[], None], note: Callable[[str], None]) -> None:
    """Runs one turn of a loop; tells `note` of an error, and returns a little later.

    Whatever is wrong, such as a shortage of threads, descriptors or memory, the next turn may work.
    """
    try:
        turn()
    except Exception as error:
        note(f"{type(error).__name__}: {describe(error)}; it goes on")
        _pause.wait(_PAUSE_SECONDS)
