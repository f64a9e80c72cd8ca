"""The load under which all tests can be run: it is there while a command runs, and no longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT

LOAD = Path(__file__).parents[2] / "load.py"
BESIDE = """
import os, sys, time
me, hogs = os.getpid(), []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
    except OSError:
        continue
    if int(parent) == os.getppid() and int(pid) != me:
        hogs.append(pid)
print(*hogs, flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_runs_beside_hogs_that_end_with_it(code: int) -> None:
    words = ["--times", "2", "--loops", "2", "--gib", "0.01", "--"]
    ended = subprocess.run(
        [sys.executable, LOAD, *words, sys.executable, "-c", BESIDE, str(code)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == (code != 0), ended.stderr
    first, verdict, second, _ = ended.stdout.splitlines()
    assert first == second
    assert verdict.startswith(f"run 1 {'FAILED' if code else 'passed'} in 0.")
    assert len(first.split()) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in first.split())
