"""The links of ranks that are about to train, measured by a few calls.

All ranks make the same calls, since the longest time of any rank decides over the next one. A cost
model is then changed so that it predicts these times: the latency and rate of its links, and what
codecs cost a processor where that tells.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gradwire import _core
from gradwire._base.group import Group
from gradwire._model import CostModel
from gradwire._schedules.schedule import Schedule

Clock = Callable[[], float]

_SMALL = 4  # bytes
_SIZES = tuple(8 << (10 + 3 * i) for i in range(5))  # 8 KiB to 32 MiB
# A call is long enough to tell the rate when it takes so many seconds, and as many small ones.
_ENOUGH, _SMALL_ONES = 4e-3, 3
_LONGER = 1.5  # of a small call's time: not yet, and the next size is left out
_CALLS, _SHORT = 3, 20e-3  # of a size; fewer where one takes longer
_CODECS = ("fp16", "int8")
_DIRECT = "direct"  # two rounds, in which each NIC carries what it does in a ring
_HALVINGS = 16
_BETA, _LATENCY = (1e-12, 1e-4), (1e-9, 10.0)  # between which they are sought
_COSTS = (0.125, 8.0)  # of a codec, over the built-in ones
_TELLS = 0.05  # of a call's time, that a codec's double cost must add


class Ranks(Group, Protocol):
    """The part of a communicator that is needed here."""

    @property
    def cost_model(self) -> CostModel:
        """The cost model behind ``algorithm="auto"``."""


def link_of(ranks: Ranks) -> str:
    """The links of a cost model that decide: those between hosts, where there are several."""
    return "between" if len(ranks.hosts) > 1 else "within"


def measured(ranks: Ranks, clock: Clock = time.perf_counter) -> CostModel:
    """The ranks' cost model with the links as they are now; every rank calls it, alone.

    It takes about 30 ms, over a long way about 25 round trips. The result is the same on all
    ranks.
    """
    timer = _Timer(ranks, clock)
    small = timer.seconds(_SMALL)
    nbytes, seconds = _large_call(timer, small)
    fit = _Fit(ranks)
    link = link_of(ranks)
    fit.solve(f"{link}.latency", _LATENCY, small, _SMALL)
    fit.solve(f"{link}.beta", _BETA, seconds, nbytes)
    for codec in _CODECS:
        if fit.tells(codec, nbytes):
            fit.scale(codec, timer.seconds(nbytes, codec), nbytes)
    return CostModel(fit.parameters)


def _large_call(timer: _Timer, small: float) -> tuple[int, float]:
    """The bytes and seconds of a call that bytes make long, beside a `small` one."""
    size = 0
    while True:
        seconds = timer.seconds(_SIZES[size])
        if seconds >= max(_ENOUGH, _SMALL_ONES * small) or size == len(_SIZES) - 1:
            return _SIZES[size], seconds
        size = min(size + (1 if seconds >= _LONGER * small else 2), len(_SIZES) - 1)


class _Timer:
    """Times all_reduces on all ranks."""

    def __init__(self, ranks: Ranks, clock: Clock) -> None:
        self._ranks, self._clock = ranks, clock
        self._last = 0.0  # seconds of the call before, the same on all ranks

    def seconds(self, nbytes: int, codec: str = "none") -> float:
        """The seconds of a call on the slowest rank: the median of some."""
        x = np.ones(nbytes // 4, np.float32)
        calls = _CALLS if self._last < _SHORT else _CALLS - 1
        found = sorted(self._once(x, codec) for _ in range(calls))
        slowest = np.array([found[(calls - 1) // 2]])
        self._ranks.all_reduce(slowest, op="max")
        self._last = float(slowest[0])
        return self._last

    def _once(self, x: np.ndarray[Any, Any], codec: str) -> float:
        begin = self._clock()
        self._ranks.all_reduce(x, op="avg", algorithm=_DIRECT, codec=codec, feedback=False)
        return self._clock() - begin


class _Fit:
    """Parameters of a cost model, which become those that predict what was measured."""

    def __init__(self, ranks: Ranks) -> None:
        self.parameters = ranks.cost_model.parameters
        self._schedule = Schedule.generate(_DIRECT, ranks.size, collective="all_reduce")._core
        self._hosts = [list(each) for each in ranks.hosts]

    def solve(self, name: str, between: tuple[float, float], seconds: float, nbytes: int) -> None:
        """Sets a parameter so that a call without codec is predicted to take as long as it did."""
        value = solve(lambda its: self._predict({name: its}, nbytes), seconds, between)
        self.parameters[name] = value

    def tells(self, codec: str, nbytes: int) -> bool:
        """Whether the time of a call depends on the costs of a codec."""
        once, twice = (self._predict(self._costs(codec, by), nbytes, codec) for by in (1.0, 2.0))
        return twice >= (1 + _TELLS) * once

    def scale(self, codec: str, seconds: float, nbytes: int) -> None:
        """Multiplies the costs of a codec so that a call is predicted to take as long as it did."""

        def predict(factor: float) -> float:
            return self._predict(self._costs(codec, factor), nbytes, codec)

        self.parameters |= self._costs(codec, solve(predict, seconds, _COSTS))

    def _costs(self, codec: str, factor: float) -> dict[str, float]:
        names = (f"{codec}.encode", f"{codec}.decode")
        return {name: factor * self.parameters[name] for name in names}

    def _predict(self, changed: dict[str, float], nbytes: int, codec: str = "none") -> float:
        core = CostModel(self.parameters | changed)._core
        return core.predict(self._schedule, nbytes, self._hosts, _core.Codec(codec))


def solve(predict: Callable[[float], float], wanted: float, between: tuple[float, float]) -> float:
    """The value for which a rising function is as wanted, found by halving; else the nearest."""
    low, high = between
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predict(middle) < wanted else (low, middle)
    return math.sqrt(low * high)
