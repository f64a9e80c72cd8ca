"""The benchmark of DiLoCo: how its seconds are composed, what it reports, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_images
from ranks import LIMIT

from bench.asynchronous import diloco_ranks, diloco_report
from bench.asynchronous.diloco_report import NO_LINK, WAYS

EXCHANGES = {
    NO_LINK: {"ring": 0.0, "none": 0.0, "int8": 0.0},
    "100mbit,100us": {"ring": 0.1, "none": 0.1, "int8": 0.03},
}


def found() -> dict[str, Any]:
    """Ways that end ever better, and reach the target half-way, after 10 s and 1,000 exchanges."""
    runs = [
        {
            "way": way.name,
            "seed": seed,
            "bytes": 2000,
            "curve": [[10.0, 1000, 0.86 - seed / 100], [20.0, 2000, 0.88 + place / 1000]],
        }
        for place, way in enumerate(WAYS)
        for seed in (0, 1)
    ]
    head = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench", "data": "Images"}
    numbers = {"gradient_seconds": 0.01, "slow": 5.0, "parameters": 9, "steps": 2000}
    return {**head, **numbers, "runs": runs, "exchange_seconds": EXCHANGES}


def rows() -> dict[str, list[str]]:
    cells = [row.strip("| ").split(" | ") for row in diloco_report.summary(found())]
    return {each[0]: each[1:] for each in cells[2:]}


def test_seconds_are_gradients_and_exchanges():
    assert rows()["DiLoCo every 10"][1:] == ["2.0", "10.0", "110.0", "50.0"]
    assert rows()["DiLoCo every 10, int8"][3] == "40.0"
    assert rows()["DiLoCo every 10, paced"][2:] == ["–", "–", "10.0"]


def test_synchronous_sgd_has_its_best_rates():
    best = [name for name in rows() if name.startswith("synchronous")]
    assert best == ["synchronous SGD, rate 0.4", "synchronous SGD, momentum 0.9, rate 0.1"]


def test_a_target_that_a_seed_misses_is_not_reached():
    missed = found()
    for each in missed["runs"]:
        each["curve"] = [[10.0, 1000, 0.84 + each["seed"] / 100]]
    assert "not reached" in list(diloco_report.summary(missed))[2]


def test_the_report_says_whether_the_goal_is_reached(tmp_path: Path):
    text = diloco_report.document(found(), "stem")
    assert "found +0.40 points, reached" in text
    worse = found()
    for each in worse["runs"]:
        if each["way"] == "DiLoCo every 10":
            each["curve"][-1][2] -= 0.01
    assert "found -0.60 points, missed" in diloco_report.document(worse, "stem")
    diloco_report.draw(found(), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_the_network_has_203_530_parameters():
    assert sum(each.numel() for each in diloco_ranks.network(1).parameters()) == 203_530


@pytest.mark.nightly
def test_it_trains_in_every_way(tmp_path: Path):
    small_images.write(tmp_path)
    command = [
        sys.executable,
        "-m",
        "bench.asynchronous.diloco",
        "--data",
        str(tmp_path),
        "--quick",
    ]
    subprocess.run([*command, "--output", str(tmp_path / "out")], timeout=LIMIT, check=True)
    said = json.loads((tmp_path / "out.json").read_text())
    assert {each["way"] for each in said["runs"]} == {way.name for way in WAYS}
    by_way = {each["way"]: each for each in said["runs"]}
    assert by_way["DiLoCo every 10"]["bytes"] < by_way["synchronous SGD, rate 0.1"]["bytes"] / 5
