"""The benchmark of joiners that say nothing: that it runs, and what it says of its figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT, nightly

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


@pytest.mark.parametrize("joiner", ["silent", *nightly("asked")])
def test_a_joiner_comes_in_every_other_period(joiner: str, bare_environment: None) -> None:
    ended = run("--seconds", "1", "--pairs", "1", "--joiner", joiner, limit=LIMIT)
    found = re.search(r"(\d+) without a joiner, (\d+) with one, which came (\d+)", ended.stdout)
    assert found, ended.stdout + ended.stderr
    assert all(int(each) > 0 for each in found.groups())


@pytest.mark.parametrize(("with_joiner", "status"), [(96.0, 0), (94.0, 1)])
def test_the_status_says_whether_steps_are_lost(with_joiner: float, status: int) -> None:
    rates = [110.0, with_joiner + 10, 90.0, with_joiner - 10]
    assert silent_joiners._print_loss(rates, 1) == status


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--joiner=asked", "--seconds=400", "--pairs=1"]])
def test_steps_lose_a_twentieth_at_most(options: list[str], bare_environment: None) -> None:
    ended = run(*options, limit=1800)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
