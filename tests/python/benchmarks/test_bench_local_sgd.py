"""Reports of bench.local_sgd, and what its ranks write down."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from bench.local_sgd import coming_and_going_report, streaming_report
from bench.local_sgd.ranks import Plan, Team
from bench.local_sgd.streaming_report import Setting

STAMP = {"date": "2026-11-27", "machine": "a machine", "command": "-m bench.local_sgd"}


def test_a_fragment_needs_the_rate_of_its_bytes() -> None:
    assert Setting(4, 5, "none").bits(4 * 4000) == 8 * 4000
    assert Setting(4, 5, "int8").bits(4 * 4000) < 8 * 1100
    assert Setting(4, 5, "none").travels(100) == 5
    assert Setting(4, 0, "none").travels(100) == 25


def test_the_report_of_streaming_divides_turn_by_turn() -> None:
    row = {
        **Setting(2, 5, "int8")._asdict(),
        **{"rate": 2e6, "dense_rate": 5e8, "with": [0.011, 0.03], "without": [0.01, 0.02]},
    }
    assert streaming_report.ratios(row) == pytest.approx([1.1, 1.5])
    text = streaming_report.document({**STAMP, "parameters": 9, "every": 100, "rows": [row]})
    assert "| 2, 5, int8 | 2.0 | 1/250 |" in text
    assert "| 1.300 | 1.10 to 1.50 |" in text


def _run(seed: int, disturbed: bool, seconds: float, loss: float) -> dict[str, Any]:
    return {
        **{"seed": seed, "disturbed": disturbed, "seconds": seconds, "loss": loss, "gap": 0.02},
        **{"kills": 2 * disturbed, "stops": [0.03, 0.05] * disturbed, "accuracy": 0.8},
        **{"rounds": 40, "pushes": 160, "mean_staleness": 0.1},
    }


def test_the_report_of_ranks_that_come_and_go() -> None:
    runs = [
        *(_run(1, False, 10, 0.50), _run(1, True, 11, 0.51)),
        *(_run(2, False, 10, 0.54), _run(2, True, 12, 0.54)),
    ]
    numbers = {"ranks": 4, "steps": 1500, "between": 6, "step_seconds": 0.02, "grace": 0.04}
    found = {**STAMP, **numbers, "every": 25, "runs": runs}
    own = coming_and_going_report
    assert own.goodputs(found) == pytest.approx([10 / 11, 10 / 12])
    assert own.delays(found) == pytest.approx([0.5, 1.5, 0.5, 1.5])
    text = own.document(found)
    assert "| disturbed | 11.5 ± 0.7 | 4, 4 |" in text
    assert "at least 88% | 87.1% | no |" in text
    assert "at most 2 | 1.50 | yes |" in text
    assert "| +0.0050 | yes |" in text


def test_a_rank_that_is_killed_while_it_writes_has_its_whole_steps(tmp_path: Path) -> None:
    team = Team(Plan(), "unix://nowhere", tmp_path)
    team._lives[3] = 1
    (tmp_path / "3.0").write_bytes(struct.pack("2d", 1.5, 2.5) + b"xyz")
    (tmp_path / "3.1").write_bytes(struct.pack("d", 4.0))
    assert team.times(3) == [1.5, 2.5, 4.0]
    assert team.times(0) == []
    assert team.steps() == 3
