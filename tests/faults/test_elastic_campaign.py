"""The campaign of elastic jobs at CI's size, and that its judge would say so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradwire._bootstrap.survivor_links import SurvivorLinks

from tests.faults.elastic import Outcome, die_in_resize, problems
from tests.faults.elastic_cases import KINDS, TRANSPORTS, make_case

CASES = 12
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_whoever_leaves_or_joins_the_others_stay_alike() -> None:
    """One seed, so that a change is judged by it; `make faults KIND=elastic` draws new ones."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.elastic",
        "--count",
        str(CASES),
        "--seed",
        "20261125",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


def test_all_kinds_and_transports_are_drawn() -> None:
    cases = [make_case(1, number) for number in range(200)]
    assert {event.kind for each in cases for event in each.events} == set(KINDS)
    assert {each.transports for each in cases} == set(TRANSPORTS)
    assert make_case(1, 7) == make_case(1, 7)


def test_a_process_may_be_told_to_die_after_each_of_many_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = []
    monkeypatch.setattr(SurvivorLinks, "send", lambda _, word: sent.append(word))
    for _ in range(sys.getrecursionlimit()):
        die_in_resize(1)
    SurvivorLinks.send(None, "first")  # type: ignore[arg-type, call-arg]
    assert sent == ["first"]


@dataclasses.dataclass
class Ended:
    """Stands for a process."""

    index: int = 0
    outcome: Any = None
    doomed: bool = False
    left_out: bool = False
    stranded: bool = False
    status: int | None = 0


FINE = Outcome(2, 3, 9, {(3, 8): "a", (3, 9): "b"})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Ended(1, FINE), ""),
        (Ended(1, FINE._replace(steps=8)), "ended in different places"),
        (Ended(1, FINE._replace(digests={(3, 9): "c"})), "differed first at (epoch, step) (3, 9)"),
        (Ended(1, Outcome(error="Timeout: x")), "process 1 failed: Timeout: x"),
        (Ended(1, None), "process 1 failed"),
        (Ended(1, None, doomed=True), "1 survivors ended in a communicator of 2"),
        (Ended(1, FINE, doomed=True), "was to die and said that it had ended"),
        (Ended(1, FINE, left_out=True), "not told that it was left out"),
    ],
)
def test_the_judge_sees_what_is_wrong(other: Ended, words: str) -> None:
    case = dataclasses.replace(make_case(1, 1), least=1)
    found = problems(case, [Ended(0, FINE), other])  # type: ignore[list-item]
    assert bool(found) == bool(words)
    assert not words or any(words in each for each in found), found


MINORITY = Outcome(error="RendezvousError: 1 of 4 ranks is no majority; pass min_ranks=1")
ALONE = Outcome(1, 3, 9, {(3, 9): "b"})


@pytest.mark.parametrize(
    ("ended", "least", "words"),
    [
        ([Ended(0, MINORITY), Ended(1, MINORITY)], None, ""),
        ([Ended(0, MINORITY), Ended(1, Outcome(error="E: nobody"), stranded=True)], None, ""),
        ([Ended(0, MINORITY), Ended(1, ALONE, left_out=True)], None, ""),
        ([Ended(0, MINORITY), Ended(1, MINORITY)], 1, "process 0 failed"),
        ([Ended(0, MINORITY), Ended(1, ALONE)], None, "1 ended as a minority, and 1 have gone on"),
        ([Ended(0, MINORITY), Ended(1, ALONE, stranded=True)], None, "has joined where a minority"),
    ],
)
def test_the_judge_knows_minorities(ended: list[Ended], least: int | None, words: str) -> None:
    found = problems(dataclasses.replace(make_case(1, 1), least=least), ended)  # type: ignore[arg-type]
    assert bool(found) == bool(words), found
    assert not words or any(words in each for each in found), found
