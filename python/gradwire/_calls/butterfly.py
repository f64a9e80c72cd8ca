"""The algorithm "butterfly": recursive doubling of small arrays, halving_doubling of large ones.

The first sends whole arrays in log2 p rounds, the second parts of them in twice as many (Thakur,
Rabenseifner & Gropp 2005, sec. 4.5). The cost model says which takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire import _core
from gradwire._model import CostModel
from gradwire._schedules.schedule import OF_LARGE, OF_SMALL, Schedule


class Butterfly:
    """The choices of one communicator; the same on all ranks, which have one cost model."""

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._hosts = [list(each) for each in hosts]
        self._chosen: dict[int, str] = {}  # by the logarithm of bytes

    def of(self, nbytes: int, model: CostModel) -> str:
        """The algorithm of an all_reduce without codec."""
        size = nbytes.bit_length()
        if size not in self._chosen:
            self._chosen[size] = min(
                (OF_SMALL, OF_LARGE), key=lambda name: self._seconds(name, 1 << size, model)
            )
        return self._chosen[size]

    def _seconds(self, name: str, nbytes: int, model: CostModel) -> float:
        made = Schedule.generate(name, sum(map(len, self._hosts)))
        return model._core.predict(made._core, float(nbytes), self._hosts, _core.Codec("none"))
