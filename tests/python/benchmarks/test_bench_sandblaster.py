"""The benchmark of Sandblaster: that it minimizes as L-BFGS in one process does, and its report."""

from __future__ import annotations

import pytest

from bench.asynchronous import sandblaster_report


def test_the_replicas_are_one_process(bare_environment: None) -> None:
    pytest.importorskip("torch")
    from bench.asynchronous import sandblaster

    problem = sandblaster.boundary_value(24)
    alone = dict(sandblaster.one_process(problem, 8))
    curve = list(sandblaster.shared(problem, 8))
    assert curve[-1][0] >= 8
    for done, loss in curve:
        if done in alone:
            assert loss == pytest.approx(alone[done], rel=1e-9)


def test_the_report_shows_losses_and_ratios() -> None:
    curves = {"SGD": [[1, 0.5], [2, 0.4]], "L-BFGS": [[2, 0.25]]}
    found = {
        "date": "2020-01-01",
        "machine": "a machine",
        "command": "-m bench",
        "problems": [{"name": "fit", "samples": 1000, "curves": curves}],
        "stragglers": [
            {"case": "stops", "portions": 32, "backups": 1.04, "none": None, "equal": None}
        ],
    }
    text = sandblaster_report.document(found, "stem")
    assert "| SGD | 0.5 | 0.5 | 0.5 | 0.4 |" in text
    assert "| L-BFGS | – | – | – | 0.25 |" in text
    assert "| stops | 32 | 1.04 | never ends | never ends |" in text
