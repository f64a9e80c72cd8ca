"""Round and Stopwatch: how many inner steps a rank makes between outer steps, and how fast."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Clock = Callable[[], float]  # seconds


class Round:
    """A rank's place in a round: after which inner step the next fragment is exchanged.

    In a round of `steps` inner steps fragment j of k goes after step (j + 1) · steps / k, rounded
    up. All ranks exchange the same fragments in the same order, whatever their numbers of steps.
    """

    def __init__(self, every: int, fragments: int, delay: int) -> None:
        """`every` and `delay` are inner steps of the fastest rank."""
        self.every, self._fragments, self._delay = every, fragments, delay
        self.steps = every  # of this rank in this round
        self.next_steps = every
        self.done = 0  # of them
        self.exchanges = 0  # of fragments, begun since the training began

    @property
    def fragment(self) -> int:
        """The number of the fragment that is exchanged next."""
        return self.exchanges % self._fragments

    @property
    def is_due(self) -> bool:
        """Whether it is time for that exchange."""
        return self.done >= self._step_of(self.fragment + 1)

    @property
    def delay(self) -> int:
        """The inner steps of this rank from the start of an exchange until its result counts."""
        return -(-self._delay * self.steps // self.every)

    def end_exchange(self) -> None:
        """Goes on to the next fragment, and after the last one to the next round."""
        self.exchanges += 1
        if self.fragment == 0:
            self.done, self.steps = 0, self.next_steps

    def go_to(self, exchanges: int) -> None:
        """Goes to where so many fragments were exchanged, and the next one is not due yet."""
        self.exchanges = exchanges
        self.done = self._step_of(self.fragment)

    def _step_of(self, fragment: int) -> int:
        return -(-fragment * self.steps // self._fragments)


class Stopwatch:
    """Times inner steps: from the end of one `DiLoCo.step` to the begin of the next."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began = clock, clock()
        self._laps: list[float] = []
        self._known = 0.0

    def start(self) -> None:
        """Begins an inner step."""
        self._began = self._clock()

    def stop(self) -> None:
        """Ends an inner step."""
        self._laps.append(self._clock() - self._began)

    def median(self) -> float:
        """Seconds of an inner step since the last call; those of before if there was none.

        An evaluation or a checkpoint between two steps does not change a median.
        """
        if self._laps:
            self._known = statistics.median(self._laps)
        self._laps = []
        return self._known


def clock_for(device: torch.device) -> Clock:
    """The wall clock, read when the device has done all that it was told."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def paced_steps(every: int, seconds: Sequence[float]) -> list[int]:
    """Inner steps of each rank in a round, so that all arrive together; `every` for the fastest.

    `seconds` are those of a step of each rank, 0 where it is not known. (Liu et al. 2024,
    "Asynchronous Local-SGD Training for Language Modeling", sec. 5, DyLU)
    """
    known = [each for each in seconds if each > 0]
    if not known:
        return [every] * len(seconds)
    fastest = min(known)
    return [max(1, round(every * fastest / each)) if each > 0 else every for each in seconds]
