"""What slow replicas cost Sandblaster in real time: the measurement, its table and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.asynchronous import stragglers_report
from bench.asynchronous.stragglers_report import WAYS

SPANS = [[0, 0, 0.0, 1.0, True], [1, 0, 0.0, 1.5, True], [0, 0, 1.0, 2.0, False]]


def case(name: str, way: str, seconds: list[float], **fields: Any) -> dict[str, Any]:
    found = {"name": name, "way": way, "slow": 20, "stops": False, "batches": len(seconds)}
    return {**found, "portions": 64, "seconds": seconds, "bound": 10.0, "spans": SPANS, **fields}


def test_the_report_shows_ratios_and_who_computed_what(tmp_path: Path) -> None:
    slow = "one of four 20× slower"
    found = {
        "date": "2020-01-01",
        "machine": "a machine",
        "command": "-m bench",
        "portions": 64,
        "portion_seconds": 0.4,
        "cases": [
            case(slow, WAYS[0], [5.0, 5.5]),
            case(slow, WAYS[1], [19.0]),
            case(slow, WAYS[2], [150.0], portions=4),
            case("one of four stops", WAYS[0], [10.4], stops=True),
        ],
    }
    text = stragglers_report.document(found, "stem")
    assert "| one of four 20× slower | 64 | 1.05 | 1.90 | 15.00 | 33.3% |" in text
    assert "| one of four stops | 64 | 1.04 | never ends | never ends | 33.3% |" in text
    stragglers_report.draw(found, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.parametrize("stops", [False, True])
def test_a_batch_ends_without_a_slow_or_stopped_replica(stops: bool) -> None:
    from bench.asynchronous import stragglers

    given = stragglers.Case("one", WAYS[0], 1 if stops else 1000, stops, 1)
    found = stragglers.measure(given, portions=8, seconds=0.02)
    counted = sum(counts for *_, counts in found["spans"])
    assert counted == 8
    assert sum(found["seconds"]) < 0.02 * 1000 * 8  # which the slow one would take for all
