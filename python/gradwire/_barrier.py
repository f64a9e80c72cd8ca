"""Of which collective, of nothing, a barrier is made."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire import _core
from gradwire._schedules import Schedule

# Ranks of which each may tell every other one.
_MOST_AT_ONCE = 16


def is_one_round(model: _core.CostModel, hosts: Sequence[Sequence[int]]) -> bool:
    """Whether an all_gather, in one round, is quicker than recursive doubling; on all ranks alike.

    Each rank has more messages in it, but where ranks share cores, a change of ranks for each
    round takes longer.
    """
    ranks = sum(map(len, hosts))
    if not 1 < ranks <= _MOST_AT_ONCE:
        return False
    gather = Schedule.generate("direct", ranks, collective="all_gather")
    doubling = Schedule.generate("recursive_doubling", ranks)
    groups = [list(each) for each in hosts]
    at_once, in_turns = (model.predict(each._core, 0, groups) for each in (gather, doubling))
    return at_once <= in_turns
