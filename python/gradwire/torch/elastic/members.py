"""Members: what ranks report when members have changed, and what they decide from it.

A step is committed in two phases. A rank is *prepared* once all its gradients are averages, and
then waits in a barrier; who leaves the barrier commits. When a rank fails meanwhile, some may have
left it and others not. The survivors then report to each other, and decide by the same rule:

- If one has committed the step, all had been prepared, since it left the barrier: all commit.
- Otherwise, if all are prepared, all commit: their averages have the same bits.
- Otherwise none does, and none has.

So the answer is the same on all survivors, and no parameters need to travel between them. (Three
phases, Skeen 1981, with the survivors' reports in place of the third.) A rank that decides and then
fails, or whose decision others miss, changes nothing: they repeat the reports, and the rule gives
the same answer, since whoever committed reports one step more, and whoever did not is no longer
prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradwire._errors import Error


class MemberReport(NamedTuple):
    """A rank's word on itself to the others."""

    has_state: bool  # a joiner has none yet
    steps: int = 0  # that it has committed
    prepared: bool = False  # for the step after these


class Decision(NamedTuple):
    """The next move of all ranks."""

    steps: int  # that are committed
    commits: frozenset[int]  # ranks that commit the step for which they are prepared
    holders: tuple[int, ...]  # ranks with the state after these steps
    receivers: tuple[int, ...]  # ranks that must get it from them


def decide(reports: Sequence[MemberReport]) -> Decision:
    """The decision from the reports of all ranks, in their order.

    Raises Error when no rank has the state.
    """
    having = {rank: each for rank, each in enumerate(reports) if each.has_state}
    if not having:
        raise Error(
            "no rank is left that has the training's state, only ranks that have joined: start "
            "again from a checkpoint, and let ranks join when others can give them the state"
        )
    first, last = (f(each.steps for each in having.values()) for f in (min, max))
    if first < last:
        commits = {r for r, each in having.items() if each.steps == last - 1 and each.prepared}
    else:
        commits = set(having) if all(each.prepared for each in having.values()) else set()
        last += bool(commits)
    holders = [r for r, each in having.items() if each.steps == last or r in commits]
    receivers = [r for r in range(len(reports)) if r not in holders]
    return Decision(last, frozenset(commits), tuple(holders), tuple(receivers))
