"""The benchmark of Downpour SGD: what it reports, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_images
from ranks import LIMIT

pytest.importorskip("torch")

from bench.asynchronous import downpour_report
from bench.asynchronous.downpour_report import WAYS

CONTROLS = [way.name for way in WAYS if way.name.startswith("control")]


def found(controls: tuple[float, ...] = (0.86, 0.66, 0.2)) -> dict[str, Any]:
    """Ways that reach the target half-way, after 7 s; the controls end as said."""
    final = dict(zip(CONTROLS, controls, strict=True))
    runs = []
    for way in WAYS:
        for seed in (0, 1):
            end = final.get(way.name, 0.87) + seed / 100
            run = {"way": way.name, "seed": seed, "curve": [[7.0, 500, 0.852], [14.0, 1000, end]]}
            if not way.synchronous:
                run |= {"staleness": 3.0 + seed, "rates": {"0": 90.0, "1": 20.0}}
            runs.append(run)
    head = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench", "data": "Images"}
    return {**head, "steps": 250, "gradient_seconds": 0.01, "slow": 5.0, "runs": runs}


def test_the_table_has_all_ways() -> None:
    rows = list(downpour_report.summary(found()))[2:]
    assert len(rows) == len(WAYS)
    assert rows[2] == ("| Downpour, Adagrad, warm start | 87.50 ± 0.71 | 7.0 | 3.5 | 20 to 90 |")


def test_the_report_says_which_goals_are_reached(tmp_path: Path) -> None:
    ends = [each.rsplit(": ", 1)[1] for each in downpour_report.goals(found())]
    assert (ends[0], ends[-1]) == ("+0.00, reached.", "+20.00, reached.")
    *_, last = downpour_report.goals(found((0.86, 0.85, 0.2)))
    assert last.endswith("+1.00, missed.")
    downpour_report.draw(found(), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_it_trains_in_every_way(tmp_path: Path) -> None:
    small_images.write(tmp_path)
    command = [sys.executable, "-m", "bench.asynchronous.downpour", "--data", str(tmp_path)]
    command += ["--seeds", "1", "--passes", "20", "--output", str(tmp_path / "out")]
    subprocess.run(command, timeout=LIMIT, check=True)
    said = json.loads((tmp_path / "out.json").read_text())
    assert {each["way"] for each in said["runs"]} == {way.name for way in WAYS}
