"""Choices of algorithms by the cost model, of a barrier and of "butterfly", beside "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gradwire import _core
from gradwire._arrays import buffers
from gradwire._arrays.buffers import Buffers, Place
from gradwire._model import CostModel
from gradwire._schedules.schedule import OF_LARGE, OF_SMALL, Schedule

_ONE_ROUND = "gather(direct)"
_MOST_TO_ASK_FOR = 64  # ranks: the model answers in 12 ms for 64, and in 1.5 s for 1,024


class Choices:
    """The choices of one communicator; the same on all ranks, which have one cost model."""

    def __init__(self, hosts: Sequence[Sequence[int]], model: CostModel) -> None:
        self._hosts, self._model = [list(each) for each in hosts], model._core
        self._ranks = sum(map(len, hosts))
        self._butterflies: dict[int, str] = {}  # by the logarithm of bytes

    @cached_property
    def barrier_algorithm(self) -> str:
        """What ``auto`` takes for an all_reduce of nothing.

        Recursive doubling for more than 64 ranks, where the choice takes longer than it saves.
        """
        if self._ranks > _MOST_TO_ASK_FOR:
            return OF_SMALL
        none = _core.Codec("none")
        name, *_ = self._model.choose("all_reduce", self._ranks, 0, self._hosts, none)
        return name

    def barrier(self, nothing: Any, place: Place) -> tuple[str, str, Buffers]:
        """The collective that implements barrier(), its algorithm, and its buffers of nothing."""
        if self.barrier_algorithm == _ONE_ROUND:
            given = buffers.all_gather(nothing, [nothing] * place.size, place)
            return "all_gather", "direct", given._replace(result=None)
        given = buffers.all_reduce(nothing, None)
        return "all_reduce", self.barrier_algorithm, given._replace(result=None)

    def butterfly(self, nbytes: int) -> str:
        """The algorithm of an all_reduce without codec by "butterfly".

        Recursive doubling sends whole arrays in log2 p rounds, halving_doubling parts of them in
        twice as many (Thakur, Rabenseifner & Gropp 2005, sec. 4.5).
        """
        size = nbytes.bit_length()
        if size not in self._butterflies:
            self._butterflies[size] = min(
                (OF_SMALL, OF_LARGE), key=lambda name: self._seconds(name, 1 << size)
            )
        return self._butterflies[size]

    def _seconds(self, name: str, nbytes: int) -> float:
        made = Schedule.generate(name, self._ranks)
        return self._model.predict(made._core, float(nbytes), self._hosts, _core.Codec("none"))
