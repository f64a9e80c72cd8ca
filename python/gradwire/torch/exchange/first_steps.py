"""FirstSteps: what the first steps of a training tell, by which "auto" chooses its codec again."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from gradwire.torch.exchange.automatic import Later
from gradwire.torch.exchange.defaults import Settings

_UNSETTLED = 3  # steps: DDP rebuilds its buckets, and memory is touched for the first time
_TIMED = 5


class _State(Protocol):
    """The part of a hook's state that is needed here."""

    def _change(self, chosen: Settings) -> None: ...


class FirstSteps:
    """Times steps, and chooses once when some have ended, alike on all ranks."""

    def __init__(self, later: Later, state: _State) -> None:
        """Does not keep the state alive, whose settings it changes."""
        self._later, self._state = later, weakref.ref(state)
        self._began: float | None = None
        self._found: list[float] = []
        self.codec, self.over = later.codec, False

    def begin_step(self, waited: float, most: Callable[[float], float]) -> None:
        """Notes that a step begins; every rank calls it, with nothing else under way.

        In the step before, this rank `waited` so many seconds. `most` tells the largest number that
        any rank gives.
        """
        if self.over:
            return
        now = time.perf_counter()
        if self._began is not None:
            self._found.append(self._later.computing(self.codec, now - self._began, waited))
        self._began = now
        if len(self._found) == _UNSETTLED + _TIMED:
            slowest = most(statistics.median(self._found[_UNSETTLED:]))
            self._take(self._later.settings(slowest, most), over=True)

    def go_on(self, codec: str, over: bool) -> None:
        """Takes the codec of a saved training, for good if that had chosen so."""
        self._take(self._later.of(codec), over)

    def _take(self, chosen: Settings, over: bool) -> None:
        self.codec, self.over = str(chosen.last), over
        if (state := self._state()) is not None:
            state._change(chosen)
