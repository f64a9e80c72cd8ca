"""The barrier: the fastest collective without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire import _core
from gradwire._arrays import buffers
from gradwire._arrays.buffers import Buffers, Place

_ONE_ROUND = "gather(direct)"
_MOST_TO_ASK_FOR = 64  # ranks: the model answers in 12 ms for 64, and in 1.5 s for 1,024


def algorithm_of(model: _core.CostModel, hosts: Sequence[Sequence[int]]) -> str:
    """The algorithm that ``auto`` chooses for an all_reduce of nothing: the same on all ranks.

    Recursive doubling for more than 64 ranks, where the choice takes longer than it saves.
    """
    groups = [list(each) for each in hosts]
    ranks = sum(map(len, groups))
    if ranks > _MOST_TO_ASK_FOR:
        return "recursive_doubling"
    name, *_ = model.choose("all_reduce", ranks, 0, groups, _core.Codec("none"))
    return name


def call_of(nothing: Any, place: Place, algorithm: str) -> tuple[str, str, Buffers]:
    """The collective that implements barrier(), its algorithm, and its buffers without elements."""
    if algorithm == _ONE_ROUND:
        given = buffers.all_gather(nothing, [nothing] * place.size, place)
        return "all_gather", "direct", given._replace(result=None)
    given = buffers.all_reduce(nothing, None)
    return "all_reduce", algorithm, given._replace(result=None)
