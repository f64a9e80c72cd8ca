"""The end of `gradwire run` by SIGKILL: nothing that it started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import LIMIT, eventually

SCRIPT = """
import os, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
grandchild = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE)
number = int(grandchild.stdout.readline())
with open(sys.argv[1], "a", buffering=1) as file:
    file.write(f"{os.getpid()} {helper.pid} {grandchild.pid} {number}\\n")
if "end" in sys.argv:
    sys.exit(0)
helper.wait()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def launch(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    notes = tmp_path / "notes"
    notes.touch()
    argv = [sys.executable, "-m", "gradwire", "run", "-n", "2", str(script), str(notes), *arguments]
    return subprocess.Popen(argv, start_new_session=True)


def started(tmp_path: Path) -> list[int]:
    """The processes of both ranks, once all have begun."""
    notes = tmp_path / "notes"
    eventually(lambda: notes.read_text().count("\n") == 2)
    return [int(each) for each in notes.read_text().split()]


@pytest.mark.parametrize("whole_group", [False, True])
def test_what_ranks_have_started_ends_with_a_launcher_that_is_killed(
    tmp_path: Path, bare_environment: None, whole_group: bool
) -> None:
    with launch(tmp_path) as launcher:
        found = started(tmp_path)
        assert all(map(is_alive, found))
        if whole_group:
            os.killpg(launcher.pid, signal.SIGKILL)
        else:
            launcher.kill()
    eventually(lambda: not any(map(is_alive, found)))


def test_what_a_rank_leaves_that_has_succeeded_goes_on(
    tmp_path: Path, bare_environment: None
) -> None:
    with launch(tmp_path, "end") as launcher:
        found = started(tmp_path)
        assert launcher.wait(LIMIT) == 0
    helpers = [pid for i, pid in enumerate(found) if i % 4]
    try:
        assert all(map(is_alive, helpers))
    finally:
        for each in helpers:
            os.kill(each, signal.SIGKILL)
