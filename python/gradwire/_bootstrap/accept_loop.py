"""What keeps a loop that accepts connections going: an error ends one of its turns, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradwire._bootstrap.handshake import PAUSE_SECONDS, refusals
from gradwire._errors import describe

_pause = threading.Event()


def survive(turn: Callable[[], None], what: str) -> None:
    """Runs one turn of a loop; an error is logged, and the next turn comes a little later.

    Whatever is wrong, such as a shortage of threads, descriptors or memory, may be over by then.
    `what` names the loop's owner in the log.
    """
    try:
        turn()
    except Exception as error:
        refusals.note(what, f"{type(error).__name__}: {describe(error)}; it goes on")
        _pause.wait(PAUSE_SECONDS)
