"""The benchmark of joiners that say nothing: that it runs, and what it says of its figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

from bench.network import silent_joiners

ROOT = Path(__file__).parents[3]


def run(*arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.network.silent_joiners", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def test_jobs_take_turns_with_each_joiner(bare_environment: None) -> None:
    ended = run("--seconds", "1", "--turns", "1", limit=LIMIT)  # too short for its bound
    rows = [line.split(" | ")[0] for line in ended.stdout.splitlines()]
    assert rows[-3:] == ["| none", "| silent", "| asked"], ended.stdout + ended.stderr


@pytest.mark.parametrize(("silent", "status"), [(96.0, 0), (94.0, 1)])
def test_the_status_says_whether_steps_are_lost(silent: float, status: int) -> None:
    rates = {"none": 100.0, "silent": silent}
    found = {kind: [{"rate": rate, "visits": 1.0}] for kind, rate in rates.items()}
    assert silent_joiners._print_table(found) == status


@pytest.mark.nightly
def test_steps_lose_a_twentieth_at_most(bare_environment: None) -> None:
    ended = run(limit=1800)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
