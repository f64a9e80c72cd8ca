"""The barrier: the fastest collective without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire import _core
from gradwire._arrays import buffers
from gradwire._arrays.buffers import Buffers, Place
from gradwire._schedules.schedule import Schedule

# The most ranks that may each send to every other one.
_MOST_AT_ONCE = 16


def is_one_round(model: _core.CostModel, hosts: Sequence[Sequence[int]]) -> bool:
    """Whether a one-round all_gather beats recursive doubling; the answer is the same on all ranks.

    Each rank sends more messages in it, but when ranks share cores, switching between ranks in
    each round takes longer.
    """
    ranks = sum(map(len, hosts))
    if not 1 < ranks <= _MOST_AT_ONCE:
        return False
    gather = Schedule.generate("direct", ranks, collective="all_gather")
    doubling = Schedule.generate("recursive_doubling", ranks)
    groups = [list(each) for each in hosts]
    at_once, in_turns = (model.predict(each._core, 0, groups) for each in (gather, doubling))
    return at_once <= in_turns


def call_of(nothing: Any, place: Place, *, one_round: bool) -> tuple[str, str, Buffers]:
    """The collective that implements barrier(), its algorithm, and its buffers without elements."""
    if one_round:
        given = buffers.all_gather(nothing, [nothing] * place.size, place)
        return "all_gather", "direct", given._replace(result=None)
    given = buffers.all_reduce(nothing, None)
    return "all_reduce", "recursive_doubling", given._replace(result=None)
