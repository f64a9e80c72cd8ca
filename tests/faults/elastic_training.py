"""`python -m tests.faults.elastic_training`: processes die, stop and join while others train.

A case is one event at a random moment in a training of two to five processes that goes on from case
to case: a process is killed, two are killed at once, one is stopped for longer than the timeout,
one joins, a joiner is killed while it joins, or one is killed as another joins. After each, the
others must go on, and the new ones must have joined. Every process reports a digest of its
parameters, buffers, optimizer and scheduler after each step: all that report a step must have the
same bits, also those that die then.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter

from elastic_team import Member, Plan, Team

from tests.faults.options import campaign_parser

LEAST, MOST = 2, 5
EVENTS = ("kill", "kill two", "stop", "join", "kill joiner", "kill and join")
_WEIGHTS = (5, 2, 1, 5, 3, 3)
_CASES_A_JOB = 50
_SECONDS = 120.0  # for the others to go on
_SILENCE = 10.0  # seconds after which a rank is lost; on a busy machine one may pause for 3


def _play(team: Team, event: str, chance: random.Random) -> list[Member]:
    """Lets an event happen; returns the processes that must be gone after it."""
    alive = team.alive
    victims = chance.sample(alive, min(len(alive) - 1, 2 if event == "kill two" else 1))
    gone: list[Member] = []
    if "join" in event:
        joiner = team.start(joins=True)
    if event == "kill joiner":
        team.look(chance.uniform(0, 0.15))
        victims = [joiner]
    if event == "stop":
        team.stop(victims[0])
        return victims
    if event != "join":
        for each in victims:
            team.look(chance.choice((0.0, chance.uniform(0, 0.02))))
            team.kill(each)
        gone += victims
    return gone


def _case(team: Team, event: str, chance: random.Random) -> list[str]:
    """One event, and what went wrong then."""
    team.look(chance.uniform(0, 0.03))
    gone = _play(team, event, chance)

    def is_over() -> bool:
        others = [each for each in team.alive if each not in gone]
        return all(each.steps >= goal and each.size == len(others) for each in others) and (
            event == "stop" or all(each.dead for each in gone)
        )

    goal = team.steps + 2
    if not team.wait(is_over, _SECONDS):
        return team.problems or [f"the others do not go on after {_SECONDS:g} s: {team}"]
    if event == "stop":
        team.resume(gone[0])
        if not team.wait(lambda: gone[0].dead, _SECONDS):
            return team.problems or [f"the stopped process does not end: {team}"]
    wrong = [each for each in team.members if each.dead and each.ended and each not in gone]
    problems = [f"process {each.number} ended: {each.ended}" for each in wrong]
    team.forget_dead()
    return problems + team.problems


def _event(team: Team, chance: random.Random) -> str:
    count = len(team.alive)
    while True:
        event = chance.choices(EVENTS, _WEIGHTS)[0]
        after = count + (event == "join") - (event in ("kill", "stop")) - 2 * (event == "kill two")
        if LEAST <= after <= MOST:
            return event


def _job(seed: int, first: int, last: int, counts: Counter[str], gpu: bool) -> list[str]:
    """Cases of one job; ends at the first that goes wrong."""
    chance = random.Random(f"{seed} {first}")
    codec = chance.choice(("none", "fp16", "onebit"))
    way = chance.choice(("constant", "proportional"))
    plan = Plan(
        codec=codec,
        global_batch=way,
        timeout=_SILENCE,
        transport=chance.choice(("shm", "tcp")),
        gpu=gpu,
    )
    with Team(3, plan) as team:
        if not team.wait(lambda: team.steps >= 3):
            return [f"cases from {first}, {plan}: no beginning: {team}"]
        for case in range(first, last):
            event = _event(team, chance)
            problems = _case(team, event, chance)
            counts[event] += 1
            if problems:
                return [f"case {case} of the job from {first}, {event}, {plan}: {problems}"]
        counts["steps compared"] += len(team.digests)
    return []


def main() -> int:
    """Runs the command; returns 0 when nothing went wrong."""
    parser = campaign_parser("tests.faults.elastic_training", __doc__, count=100)
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first case")
    parser.add_argument("--gpu", action="store_true", help="with models on simulated GPUs")
    options = parser.parse_args()
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    print(f"seed {options.seed}: {options.count} cases", flush=True)
    began, counts, problems = time.monotonic(), Counter[str](), list[str]()
    for first in range(options.first, options.first + options.count, _CASES_A_JOB):
        last = min(first + _CASES_A_JOB, options.first + options.count)
        found = _job(options.seed, first, last, counts, options.gpu)
        print(*found, sep="\n", end="\n" * bool(found), flush=True)
        problems += found
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    cases = sum(counts[each] for each in EVENTS)
    print(f"{cases} cases in {time.monotonic() - began:.0f} s, {len(problems)} with problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
