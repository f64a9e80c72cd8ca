"""Sessions whose models are on a simulated GPU: the CPU's bits, also when ranks die and join."""

from __future__ import annotations

import simulated_gpu
from elastic_team import Plan, Team

pytestmark = simulated_gpu.needed
STEPS = 4


def digests(plan: Plan) -> dict[int, str]:
    with Team(2, plan) as team:
        assert team.wait(lambda: not team.alive), team
        assert [each.steps for each in team.members] == [STEPS] * 2, team
        assert not team.problems
        return team.digests


def test_states_are_those_of_the_cpu() -> None:
    on_gpu, on_cpu = (digests(Plan(steps=STEPS, codec="onebit", gpu=on)) for on in (True, False))
    assert on_gpu == on_cpu


def test_ranks_die_and_join() -> None:
    with Team(3, Plan(gpu=True)) as team:
        assert team.wait(lambda: team.steps >= 2), team
        joiner = team.start(joins=True)
        assert team.wait(lambda: joiner.steps > 0), team
        team.kill(team.members[0])
        goal = team.steps + 2
        assert team.wait(lambda: all(each.steps > goal for each in team.alive)), team
        assert all(each.size == 3 for each in team.alive)
        assert not team.problems
