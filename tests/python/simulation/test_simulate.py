"""`gradwire simulate`: tables, pictures, slow ranks, and bad input."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from gradwire import Schedule
from gradwire._tools import cli
from gradwire.lab.simulation.runs import simulate
from gradwire.lab.simulation.topology import flat

LARGE = "8 per host, 400gbit, 5us; 32 hosts a rack, oversubscription 2, 1us; 512 racks a hall"


def test_a_hundred_thousand_ranks_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.process_time()
    line = ["simulate", "--algorithm", "all", "--ranks", "100000", "--bytes", "1G"]
    assert cli.main([*line, "--topology", LARGE, "--json"]) == 0
    assert time.process_time() - begun < 10
    found = json.loads(capsys.readouterr().out)
    assert {each["found_by"] for each in found["runs"]} == {"closed form"}
    assert {"ring", "hierarchical(direct,ring)"} <= {each["algorithm"] for each in found["runs"]}


def test_few_ranks_are_simulated_by_events(capsys: pytest.CaptureFixture[str]) -> None:
    line = "simulate --algorithm ring binary_tree --ranks 4 16 --bytes 1M 16M"
    assert cli.main(line.split()) == 0
    text = capsys.readouterr().out
    assert text.count("events") == 8
    assert "the fastest:" in text


def test_a_schedule_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(Schedule.generate("star", 3).dump())
    assert cli.main(["simulate", "--algorithm", str(path), "--ranks", "3"]) == 0
    assert "star" in capsys.readouterr().out
    assert cli.main(["simulate", "--algorithm", str(path), "--ranks", "4"]) == 2
    for wrong in ("1 -> 0 copy 0", "2 -> 0 reduce 0"):
        path.write_text(Schedule.generate("star", 3).dump().replace("1 -> 0 reduce 0", wrong))
        assert cli.main(["simulate", "--algorithm", str(path), "--ranks", "3"]) == 2
    path.write_text(Schedule.generate("ring", 3, collective="all_gather").dump())
    assert cli.main(["simulate", "--algorithm", str(path), "--ranks", "3"]) == 2
    assert "all_gather" in capsys.readouterr().err


def test_a_slow_rank_slows_every_round() -> None:
    (one,) = simulate(["ring"], [16], [1e8], flat("1gbit"))
    (slow,) = simulate(["ring"], [16], [1e8], flat("1gbit"), slow=3.0)
    assert slow.seconds == pytest.approx(3 * one.seconds, rel=0.02)
    (bound,) = simulate(["ring"], [20_000], [1e8], flat("1gbit"), slow=3.0)
    (many,) = simulate(["ring"], [20_000], [1e8], flat("1gbit"))
    assert many.seconds < bound.seconds < 3 * many.seconds


def test_more_ranks_do_not_make_a_tree_faster() -> None:
    runs = simulate(["binary_tree"], [16, 32, 64, 128], [51 << 20], flat("10gbit,20us"))
    seconds = [each.seconds for each in runs]
    assert max(seconds) == pytest.approx(min(seconds), rel=0.06)


def test_steps_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    line = "simulate --ranks 4096 --bytes 100M --compute 200ms --spread 0.05 --json"
    failing = " --failures 4y --checkpoint 60s --restart 5m"
    assert cli.main((line + failing).split()) == 0
    found = json.loads(capsys.readouterr().out)
    (step,), (failures,) = found["steps"], found["failures"]
    assert 0.22 < step["slowest"] < 0.26
    assert failures["hosts"] == 4096
    assert 0 < failures["lost"] < 0.2
    interval = " --interval 6h"
    assert cli.main((line.removesuffix(" --json") + failing + interval).split()) == 0
    text = capsys.readouterr().out
    assert "Daly" in text
    assert "one every 6 h loses" in text


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = ["simulate", "--algorithm", "ring", "direct", "--ranks", "2", "64", "--bytes", "1M"]
    for sizes in ([], ["64M"]):  # seconds over ranks; which is the fastest
        path = tmp_path / f"{len(sizes)}.png"
        assert cli.main([*line, *sizes, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--ranks 0", "ranks=0"),
        ("--ranks 20000000", "10,000,000"),
        ("--ranks 4 --bytes much", "a size"),
        ("--ranks 4 --bytes=-1M", "positive"),
        ("--ranks 4 --algorithm nope", "nope"),
        ("--ranks 4 --codec nope", "nope"),
        ("--ranks 4 --codec int8 --algorithm recursive_doubling", "recursive_doubling"),
        ("--ranks 4 --slow 0.5", "slow=0.5"),
        ("--ranks 4 --spread 0.1", "--compute"),
        ("--ranks 4 --compute=-1s", "positive"),
        ("--ranks 4 --compute 200", "a time"),
        ("--ranks 4 --failures 4y", "--checkpoint"),
        ("--ranks 4 --interval 1h", "--checkpoint"),
        ("--ranks 4 --failures=-4y --checkpoint 1s", "positive"),
        ("--ranks 4 --topology hosts", "no level"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert says in captured.err
