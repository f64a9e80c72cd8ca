"""What ranks decide after a failure: the same on all, whoever has missed what."""

from __future__ import annotations

import random

import gradwire
import pytest
from gradwire.torch.elastic.members import MemberReport, decide


def test_all_commit_once_one_has() -> None:
    found = decide([MemberReport(True, 7), MemberReport(True, 6, prepared=True)])
    assert (found.steps, found.commits, found.receivers) == (7, {1}, ())


def test_all_commit_if_all_are_prepared() -> None:
    found = decide([MemberReport(True, 6, prepared=True)] * 3)
    assert (found.steps, found.commits) == (7, {0, 1, 2})


def test_none_commits_if_one_is_not_prepared() -> None:
    found = decide([MemberReport(True, 6, prepared=True), MemberReport(True, 6)])
    assert (found.steps, found.commits, found.holders) == (6, frozenset(), (0, 1))


def test_joiners_and_those_behind_receive() -> None:
    found = decide([MemberReport(True, 3), MemberReport(True, 6), MemberReport(False)])
    assert (found.steps, found.holders, found.receivers) == (6, (1,), (0, 2))


def test_without_the_state_nobody_goes_on() -> None:
    with pytest.raises(gradwire.Error, match="checkpoint"):
        decide([MemberReport(False), MemberReport(False)])


@pytest.mark.parametrize("seed", range(200))
def test_no_failure_makes_ranks_disagree(seed: int) -> None:
    """A step of ranks that die at any moment, in the step and while they decide, several times."""
    chance = random.Random(seed)
    ranks = chance.randint(2, 6)
    alive = list(range(ranks))
    prepared = {rank: chance.random() < 0.8 for rank in alive}
    steps = dict.fromkeys(alive, 0)
    if all(prepared.values()):  # only then does the barrier let anybody through
        for rank in alive:
            if chance.random() < 0.5:
                steps[rank], prepared[rank] = 1, False
    while True:
        alive = [rank for rank in alive if chance.random() < 0.8] or alive[:1]
        found = decide([MemberReport(True, steps[rank], prepared[rank]) for rank in alive])
        assert not found.receivers  # no state has to travel
        heard = [i for i in range(len(alive)) if chance.random() < 0.7]
        for i in heard:
            rank = alive[i]
            steps[rank] += i in found.commits
            prepared[rank] = False
        if len(heard) == len(alive):
            break
    assert {steps[rank] for rank in alive} == {found.steps}
