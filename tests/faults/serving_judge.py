"""What must be of a case of the parameter server, whoever fails when."""

from __future__ import annotations

import re

from tests.faults.serving_cases import SHARDS, Case
from tests.faults.serving_processes import Outcome, Process

_LONGEST_STEP = 30.0  # seconds, on any machine; half of what a lost answer would take
_PAIR = re.compile(r"\brank \d")  # a rank of a pair, which means nothing to a reader


def problems(
    case: Case, actor: Process, others: list[Process], late: Process, server_pid: int
) -> list[str]:
    """Sentences on what went wrong."""
    found: list[str] = []
    ends = case.faulty == "server" and case.kind in ("kill", "crash", "stop")
    lives = [*others, *([late] if case.kind == "late" else [])]
    if case.faulty == "server" or case.kind in ("none", "stop", "late"):
        lives.append(actor)
    for each in lives:
        if each.outcome is None:
            found.append(f"{each.name}: it has no outcome")
        elif ends:
            found += _ended_rightly(case, each, each.outcome, server_pid)
        else:
            found += _went_on(case, each, each.outcome, each is actor)
    if not ends:
        for each in others[:1]:
            if each.outcome is not None and not each.outcome.error:
                found += _values(case, each.outcome) + _names(case, each.outcome, actor)
    return found


def _ended_rightly(case: Case, who: Process, outcome: Outcome, server_pid: int) -> list[str]:
    """Whether the shard is named, with its process, and no other."""
    found = []
    joins = who.name == "replica a" and case.phase == "joining"
    kinds = ("Timeout", "RendezvousError", "TransportError")
    kinds = kinds[:1] if case.kind == "stop" and not joins else kinds
    kinds = kinds[2:] if case.kind != "stop" and not joins else kinds
    if not outcome.error.startswith(kinds):
        found.append(f"{who.name}: {outcome.error or 'no error'}, which is none of {kinds}")
    named = re.findall(r"shard (\d) \(\S+:(\d+)\)", outcome.error)
    if (str(case.shard), str(server_pid)) not in named:
        found.append(f"{who.name}: shard {case.shard} ({server_pid}) is not in {outcome.error!r}")
    if any(shard != str(case.shard) for shard, _ in named):
        found.append(f"{who.name}: another shard is named in {outcome.error!r}")
    if _PAIR.search(outcome.error):
        found.append(f"{who.name}: a rank is named in {outcome.error!r}")
    return found


def _went_on(case: Case, who: Process, outcome: Outcome, is_actor: bool) -> list[str]:
    found = []
    if outcome.error:
        found.append(f"{who.name}: {outcome.error}")
    stopped = case.kind == "stop" and is_actor
    if outcome.longest > _LONGEST_STEP and not stopped:
        found.append(f"{who.name}: a step took {outcome.longest:.1f} s")
    if outcome.lost > (1 if case.kind == "restart" else 0):
        found.append(f"{who.name}: {outcome.lost} pushes were lost")
    return found


def _values(case: Case, outcome: Outcome) -> list[str]:
    """Whether each push was applied once: ones, with rate 1, so the values count them."""
    assert outcome.values is not None
    found = []
    pairs = zip(range(SHARDS), (outcome.values[:2], outcome.values[2:]), strict=True)
    for shard, (least, most) in pairs:
        version = outcome.versions[shard]
        # Other clients may push between the frames of this pull, and what a client that died has
        # applied in part counts.
        pushing = 0 if case.atomic else 4
        if not (-version - pushing <= least <= most <= -version + pushing):
            found.append(f"shard {shard} of version {version} has values {least} to {most}")
        if case.atomic and least != most:
            found.append(f"shard {shard} shows {least} to {most}, though pushes are atomic")
    return found


def _names(case: Case, outcome: Outcome, actor: Process) -> list[str]:
    """Whether a client that died is named, and no other."""
    found = [f"a rank is named in {each!r}" for each in outcome.gone if _PAIR.search(each)]
    died = case.faulty == "client" and case.kind in ("kill", "crash")
    mine = [each for each in outcome.gone if re.match(rf"replica a \(\S+:{actor.pid}\): ", each)]
    if died and case.phase != "joining" and not mine:
        found.append(f"replica a ({actor.pid}) is not in {outcome.gone}")
    # One that reconnects may come before its former self's goodbye.
    again = [each for each in outcome.gone if each.endswith(": it has joined anew")]
    told = mine if died else again if case.kind == "restart" else []
    if told != outcome.gone:
        found.append(f"clients are told to be gone that are not: {outcome.gone}")
    return found
