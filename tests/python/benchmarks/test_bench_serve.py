"""The benchmark of the parameter server beside others: what it reports, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ranks import LIMIT

from bench.serve import peers_report
from bench.serve.peer_sides import GLOO, GRADWIRE_SHM, GRADWIRE_TCP, SOCKETS, WALL

ROOT = Path(__file__).parents[3]


def found(copies: float) -> dict[str, Any]:
    """Two sizes; all other ways take twice as long as gradwire, and the copies as long as said."""
    cases = []
    for elements, once in ((1024, 1e-4), (25_000_000, 0.05)):
        for operation in ("both", "pull"):
            seconds = {
                GRADWIRE_SHM: [once, once * 1.5],
                GRADWIRE_TCP: [once, once],
                SOCKETS: [once * 2, once * 2],
                GLOO: [once * 2, once * 3],
                WALL: [once * copies, once * 1.5 * copies],
            }
            cases.append({"operation": operation, "elements": elements, "seconds": seconds})
    crowd = {"bytes_a_client": 2e6, "descriptors_a_client": 4.0}
    return {
        "date": "2020-01-01",
        "machine": "a machine",
        "command": "-m bench",
        "cases": cases,
        "crowds": [
            {"clients": 4, "rates": [10.0], **crowd},
            {"clients": 64, "rates": [7.0], **crowd},
        ],
        "beside": {"alone": [1e-4], "own push": [2e-4], "another's push": [3e-4]},
        "rejoin": {"connect": [0.02], "pull": [0.1]},
    }


def test_the_report_says_which_goals_are_reached() -> None:
    text = peers_report.document(found(copies=0.9), "stem")
    assert "| 25,000,000 | pull and push | 62.5 (50) | 50 (50) | 100 (100) | 125 (100) |" in text
    assert "rpc" not in text
    rows = peers_report.goal_table(found(copies=0.9))
    assert "| shm beside the copies alone | at least 0.85 | 0.90 | yes |" in rows
    assert "| a pull of 4 kB, shm, over gloo's | at most 0.5 | 0.50 | yes |" in rows
    assert any(row.endswith("| at least 0.8 | 0.70 | no |") for row in rows)
    assert "| MB that a client costs a shard | at most 2.5 | 2.00 | yes |" in rows
    slow = "a small request beside another's push over one alone"
    assert f"| {slow} | at most 2 | 3.00 | no |" in rows
    (missed,) = [each for each in peers_report.outcomes(found(copies=0.8)) if "copies" in each.text]
    assert not missed.reached


def test_ways_take_turns(tmp_path: Path) -> None:
    options = ["--sizes", "1024", "--rounds", "1", "--seconds", "0.01"]
    teams = ["--teams", GRADWIRE_SHM, SOCKETS, WALL]
    command = [sys.executable, "-m", "bench.serve.peers", *options, *teams]
    ended = subprocess.run(
        [*command, "--output", str(tmp_path / "serve")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    written = json.loads((tmp_path / "serve.json").read_text())
    assert [list(case["seconds"]) for case in written["cases"]] == [teams[1:]] * 2
    assert (tmp_path / "serve.md").read_text().startswith("# The parameter server beside other")
