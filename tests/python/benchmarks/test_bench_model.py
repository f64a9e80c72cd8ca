"""The report that bench/collectives/model_check.py makes of ranks' measurements."""

from __future__ import annotations

from typing import Any

import pytest

from bench.collectives.model_check import behind, chosen, error, measured, summary


def case(algorithm: str, *runs: tuple[float, list[float]], picked: str = "ring") -> dict[str, Any]:
    found = [{"predicted": p, "measured": m, "chosen": picked} for p, m in runs]
    return {"link": "shm", "ranks": 2, "bytes": 4, "algorithm": algorithm, "runs": found}


def test_other_work_only_adds_to_what_calls_take() -> None:
    assert measured(case("ring", (1.0, [1.0, 1.0, 9.0, 9.0, 9.0]))) == 1.0


def test_a_prediction_is_judged_by_the_measurements_of_its_own_repetition() -> None:
    halves = case("ring", (1.0, [1.0]), (2.0, [2.0]), (2.2, [2.0]), (5.0, [1.0]), (1.0, [1.0]))
    assert error(halves) == pytest.approx(0.0)


def test_auto_is_compared_with_the_best_round_by_round() -> None:
    auto = case("auto", (1.0, [1.0, 2.2, 1.0, 4.4]))
    ring = case("ring", (1.0, [1.0, 2.0, 1.0, 4.0]))
    slow = case("star", (1.0, [3.0, 1.0, 3.0, 1.0]))
    more, best = behind(auto, [auto, ring, slow])
    assert (round(more, 6), best["algorithm"]) == (0.1, "ring")


def test_the_summary_counts_cases() -> None:
    cases = [
        case("auto", (1.0, [1.0, 1.0])),
        case("ring", (1.19, [1.0, 1.0])),
        case("star", (1.21, [1.0, 1.0])),
    ]
    line = summary(cases)[0]
    assert "in 50% of 2 cases" in line
    assert "of the best in 100% of 1 " in line


def test_all_that_auto_chose_is_named() -> None:
    auto = case("auto", (1.0, [1.0]), (1.0, [1.0]))
    auto["runs"] += [{**auto["runs"][0], "chosen": "direct"}]
    assert chosen(auto) == "ring or direct"
