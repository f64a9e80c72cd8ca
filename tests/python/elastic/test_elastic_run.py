"""`gradwire run --min`: a rank that fails is started anew, and joins the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT, nightly

PROGRAM = """
import os, time
import numpy as np
import gradwire

comm = gradwire.init(elastic=True)
first, steps = comm.joined == 0, np.zeros(1)
while True:
    try:
        comm.broadcast(steps)
        while steps[0] < STEPS or comm.size < SIZE:
            comm.all_reduce(np.ones(1000, np.float32))
            steps += 1
            time.sleep(0.002)  # stands for work: those that start need the processor, too
            if first and os.environ["RANK"] in DIE and steps[0] == 5:
                os.kill(os.getpid(), 9)
            if comm.should_resize():
                break
        else:
            break
    except gradwire.Error:
        pass
    comm = comm.resize(WAIT)
os.write(1, f"rank {comm.rank} of {comm.size}, {int(steps[0])} steps\\n".encode())
comm.close()
"""


def run(
    folder: Path,
    *options: str,
    steps: int = 20,
    size: int = 1,
    die: tuple[str, ...] = ("1",),
    wait: str = "",
) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    text = PROGRAM.replace("STEPS", str(steps)).replace("SIZE", str(size))
    path.write_text(text.replace("DIE", repr(die)).replace("WAIT", wait))
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "run", *options, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.fixture(autouse=True)
def _no_launcher(bare_environment: None) -> None:
    """No variable of a launcher."""


@pytest.mark.parametrize("die", [("0", "2"), *nightly(("0",), ("1",))])
def test_a_rank_that_failed_is_started_anew_and_joins(die: tuple[str, ...], tmp_path: Path) -> None:
    ended = run(tmp_path, "--min", "1", "--max", "3", "--restarts", "4", size=3, die=die)
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    assert [line.split(",")[0] for line in lines] == [f"rank {n} of 3" for n in range(3)]
    assert len({line.split(",")[1] for line in lines}) == 1
    assert f"rank {die[0]} of 3" in ended.stderr
    assert "was killed by SIGKILL; starting it anew (1 of 4)" in ended.stderr


def test_without_restarts_the_others_go_on(tmp_path: Path) -> None:
    ended = run(tmp_path, "-n", "3", "--min", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(" of 2, ") == 2
    assert "going on with the other 2" in ended.stderr


def test_too_few_ranks_end(tmp_path: Path) -> None:
    ended = run(tmp_path, "-n", "2", "--min", "2", wait="min_ranks=2, wait=60")
    assert ended.returncode == 128 + 9, ended.stderr
    assert "rank 1 of 2 (process " in ended.stderr
    assert "was killed by SIGKILL; ending the other 1" in ended.stderr


def test_ranks_that_all_fail_end_the_run(tmp_path: Path) -> None:
    """Also one that was started anew before the last of them failed: nobody can let it in."""
    ended = run(tmp_path, "-n", "2", "--min", "1", "--restarts", "10", die=("0", "1"))
    assert ended.returncode == 128 + 9, ended.stderr
    assert "starting it anew (1 of 10)" in ended.stderr
    assert "was killed by SIGKILL; ending the other 1" in ended.stderr


def test_a_program_that_cannot_join_is_told(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import gradwire\ngradwire.init()\n")
    ended = subprocess.run(
        [sys.executable, str(path)],
        env={"RANK": "1", "WORLD_SIZE": "2", "GRADWIRE_JOIN": "1", "GRADWIRE_STORE": "unix://x"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode == 1
    assert "call init(elastic=True), or gradwire.join()" in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--min", "2"], "how many ranks?"),
        (["--max", "2"], "--max RANKS goes with --min RANKS"),
        (["--min", "3", "-n", "2"], "not 1 <= --min 3 <= -n 2"),
        (["--min", "1", "-n", "4", "--max", "3"], "<= --max 3"),
        (["--min", "1", "-n", "2", "--keep-going"], "--keep-going is for ranks that never meet"),
        (["-n", "2", "--restarts", "1"], "--restarts TIMES goes with --min RANKS or --keep-going"),
    ],
)
def test_options_that_contradict_each_other(options: list[str], words: str, tmp_path: Path) -> None:
    ended = run(tmp_path, *options)
    assert ended.returncode == 2
    assert words in ended.stderr
