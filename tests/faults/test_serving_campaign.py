"""The campaign of the parameter server at CI's size, and that its judge would say so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.serving_cases import KINDS, PHASES, Case, make_case
from tests.faults.serving_judge import problems
from tests.faults.serving_processes import Outcome

CASES = 8
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_whoever_fails_the_others_go_on() -> None:
    """One seed, so that a change is judged by it; `make faults KIND=serving` draws new ones."""
    command = [
        sys.executable,
        "-m",
        "tests.faults.serving",
        "--count",
        str(CASES),
        "--seed",
        "20261123",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


def test_all_kinds_and_phases_are_drawn() -> None:
    cases = [make_case(1, number) for number in range(300)]
    assert {each.kind for each in cases} == set(KINDS)
    assert {(each.phase, each.faulty) for each in cases} == {
        (phase, faulty) for phase in PHASES for faulty in ("client", "server")
    }
    assert make_case(1, 7) == make_case(1, 7)


def case(kind: str, faulty: str) -> Case:
    made = next(c for n in range(999) if (c := make_case(1, n)).kind == kind and c.faulty == faulty)
    return dataclasses.replace(made, shard=1, phase="push", atomic=True)


def judged(case: Case, **changes: Any) -> list[str]:
    """Problems of a case in which both others end with this outcome."""
    fine: dict[str, Any] = {"steps": 9, "versions": [5, 6], "values": (-5.0, -5.0, -6.0, -6.0)}
    if case.faulty == "client":
        fine["gone"] = ["replica a (vm:10): the peer closed it or died"]
    outcome = Outcome(**(fine | changes))
    others = [SimpleNamespace(name=f"replica {n}", pid=p, outcome=outcome) for n, p in ("b1", "c2")]
    actor = SimpleNamespace(name="replica a", pid=10, outcome=outcome)
    return problems(case, actor, others, actor, 77)  # type: ignore[arg-type]


RIGHT = "TransportError: shard 1 (vm:77): the peer closed it or died"


def test_the_judge_is_content_with_what_is_right() -> None:
    assert judged(case("kill", "client")) == []
    assert judged(case("kill", "server"), error=RIGHT) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"error": "TransportError: gone"},
        {"longest": 40.0},
        {"gone": []},
        {"gone": ["replica b (vm:1): died"]},
        {"gone": ["replica a (vm:10): link to rank 1: died"]},
        {"values": (-5.0, -4.0, -6.0, -6.0)},
        {"values": (-5.0, -5.0, -7.0, -7.0)},
        {"lost": 1},
    ],
)
def test_the_judge_sees_harm_to_others(changes: dict[str, Any]) -> None:
    assert judged(case("kill", "client"), **changes)


@pytest.mark.parametrize(
    "error",
    [
        "",
        RIGHT.replace("77", "78"),
        RIGHT.replace("shard 1", "shard 0"),
        RIGHT.replace("TransportError", "InvalidArgument"),
        f"{RIGHT} rank 0",
    ],
)
def test_the_judge_sees_a_wrong_name(error: str) -> None:
    assert judged(case("kill", "server"), error=error)
