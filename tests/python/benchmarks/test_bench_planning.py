"""The check of predicted steps: its cases, its table and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.planning import step_check


def row(network: str, link: str, method: str, predicted: float) -> dict[str, object]:
    return {
        "network": network,
        "link": link,
        "method": method,
        "compute_ms": 10.0,
        "latency_us": 11.0,
        "measured_ms": 100.0,
        "predicted_ms": predicted,
    }


def test_there_are_ten_cases_of_two_networks() -> None:
    assert sum(map(len, step_check.CASES.values())) == 10
    assert {network for network, _ in step_check.CASES} == {"cnn", "mlp"}


def test_predictions_have_the_wires_time() -> None:
    """4.06 MB around a ring of 4 at 100 Mbit/s: 487 ms without headers."""
    found = step_check.predicted("cnn", 0.018, "100mbit", 11e-6, "none")
    assert 0.5 < found < 0.56
    assert step_check.predicted("cnn", 0.018, "100mbit", 11e-6, "int8") < 0.3 * found
    for network, link in step_check.CASES:
        for method in step_check.CASES[network, link]:
            assert step_check.predicted(network, 0.018, link, 11e-6, method) > 0.018


def test_figures_of_step_times_are_predicted() -> None:
    found = {
        "checks": {"100mbit": {"latency_us": 11.0}},
        "step_ms": {
            "none": {"none": 20.0},
            "100mbit": {"local step": 10.0, "gloo": 540.0, "none": 542.0, "int8": 153.0},
        },
    }
    rows = step_check.of_step_times(found)
    assert [each["method"] for each in rows] == ["none", "int8"]
    assert all(abs(step_check.error(each)) < 0.2 for each in rows)
    assert "2 of 2" in step_check.summary(rows)


def test_the_document_counts_close_cases(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row("cnn", "1gbit", "none", 119.0), row("mlp", "1gbit", "int8", 79.0)]
    found = {"date": "today", "machine": "here", "command": "-m it", "cases": rows}
    text = step_check.document(found, "it")
    assert "1 of 2 cases are predicted within 20%" in text
    assert "| mlp | 1gbit | int8 | 10.0 | 79.0 | 100.0 | -21% |" in text
    step_check.draw({"cases": rows}, tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 1000
