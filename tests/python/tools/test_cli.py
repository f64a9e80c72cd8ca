"""The command line, as a user's shell sees it: output, one clear line for an error, exit codes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from gradwire import Schedule
from gradwire._tools import cli
from ranks import LIMIT


def gradwire(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT)


def test_schedules_pass_through_a_pipe():
    shown = gradwire("schedule", "show", "ring", "-n", "3")
    assert Schedule.parse(shown.stdout) == Schedule.generate("ring", 3)
    verified = gradwire("schedule", "verify", "-", text=shown.stdout)
    assert verified.returncode == 0
    assert "correct       yes" in verified.stdout


def test_verify_of_a_wrong_schedule_exits_with_1(tmp_path: Path):
    wrong = Schedule.generate("ring", 3).dump().replace("0 -> 1 reduce 2", "0 -> 1 reduce 1")
    path = tmp_path / "wrong.txt"
    path.write_text(wrong)
    verified = gradwire("schedule", "verify", str(path))
    assert verified.returncode == 1
    assert "correct       NO" in verified.stdout
    assert "rank" in verified.stdout


def test_a_drawing_goes_to_its_file(tmp_path: Path):
    path = tmp_path / "ring.svg"
    arguments = ["schedule", "draw", "hierarchical(direct,ring)", "-n", "6", "--per-host", "2"]
    assert cli.main([*arguments, "-o", str(path)]) == 0
    assert ET.parse(path).getroot().tag.endswith("svg")


def test_a_drawing_on_a_terminal_asks_for_a_file():
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "gradwire", "schedule", "draw", "ring", "-n", "4"]
    drawn = subprocess.run(
        command, stdout=its_end, stderr=subprocess.PIPE, text=True, timeout=LIMIT
    )
    os.close(its_end)
    os.close(terminal)
    assert drawn.returncode == 2
    assert "-o schedule.svg" in drawn.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("schedule show nope -n 4", "no algorithm 'nope'"),
        ("schedule show ring", "-n 8"),
        ("schedule show ring -n 0", "ranks=0"),
        ("schedule show ring -n 4 --collective all_recduce", "'all_recduce'"),
        ("schedule show ring -n 4 --per-host 0", "at least one"),
        ("bench --algorithm nope", "no algorithm 'nope'"),
        ("bench --codec nope", "'nope'"),
        ("bench --transport warp", "'warp'"),
        ("bench --dtype quad", "quad"),
        ("bench --dtype bool --op avg", "bool"),
        ("bench --factor 1", "--factor"),
        ("bench -b 8 -e 4", "no size"),
        ("bench --collective broadcast --codec fp16", "--codec"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


@pytest.mark.parametrize("arguments", ["", "nope", "schedule", "bench -b much", "doctor --xml"])
def test_what_argparse_refuses_has_code_2(arguments: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_broken_file_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "broken.txt"
    path.write_text("gradwire schedule 1\nall_reduce x ranks=2 chunks=1 root=0\nround 1\n")
    assert cli.main(["schedule", "show", str(path)]) == 1
    assert "line 3" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    shown = f"{sys.executable} -m gradwire schedule show direct -n 64 | head -1"
    ended = subprocess.run(shown, shell=True, capture_output=True, text=True, timeout=LIMIT)
    assert ended.stdout == "gradwire schedule 1\n"
    assert ended.stderr == ""


def test_run_starts_ranks(tmp_path: Path):
    script = tmp_path / "place.py"
    script.write_text(  # one write a line: the ranks share the terminal
        "import os, sys\n"
        "sys.stdout.write(os.environ['RANK'] + ' ' + os.environ['WORLD_SIZE'] + '\\n')\n"
    )
    ended = gradwire("run", "-n", "2", str(script))
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 2", "1 2"]


@pytest.mark.parametrize("shards", ["x", "3-1", "-2", "0-99999999999"])
def test_shards_that_are_none_are_wrong_usage(shards: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", f"--only={shards}"])
    assert "neither a shard" in capsys.readouterr().err
