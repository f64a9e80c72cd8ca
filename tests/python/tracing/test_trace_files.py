"""Parts and merged files: `gradwire trace`, and files that are cut off or something else."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire._tools.cli import main
from gradwire._trace import chrome, parts
from gradwire._trace.clocks import Clock
from traces import of, read


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parts of two ranks."""
    folder = tmp_path_factory.mktemp("made") / "parts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_TRACE", str(folder))
        gradwire.spawn(lambda comm: comm.all_reduce(np.ones(99, np.float32)), 2)
    assert len(list(folder.iterdir())) == 2
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "parts"))


def test_parts_are_merged_and_summed_up(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "out.json"
    assert main(["trace", "merge", str(folder), str(path)]) == 0
    assert "2 ranks" in capsys.readouterr().out
    assert len(of(read(path), "call")) == 2
    assert main(["trace", "summary", str(path)]) == 0
    assert "1 calls" in capsys.readouterr().out
    assert main(["trace", "summary", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    shares = found["shares"]
    total = sum(shares[name] for name in ("compute", "transfer", "codec", "waiting"))
    assert total == pytest.approx(1)
    assert found["advice"]


def test_a_part_survives_packing(folder: Path) -> None:
    for part in parts.read(folder):
        again = parts.unpack(parts.pack(part), "here")
        assert again.tracks[0].place == part.tracks[0].place
        assert (again.tracks[0].events == part.tracks[0].events).all()
        assert again.tracks[0].labels == part.tracks[0].labels


@pytest.mark.parametrize("label", ["all_reduce", "all_reduce\nfloat32", "all_reduce\n\n\n"])
def test_a_label_without_all_its_lines_names_a_call(label: str) -> None:
    name, args = chrome._described(label)
    assert (name, args["collective"], args["codec"]) == ("all_reduce", "all_reduce", "")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("left", [0.0, 0.001, 0.3, 0.999])
def test_a_part_that_was_cut_off_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], left: float
) -> None:
    cut = sorted(folder.iterdir())[1]
    data = cut.read_bytes()
    cut.write_bytes(data[: int(len(data) * left)])
    text = refused(["trace", "merge", str(folder), str(tmp_path / "out.json")], capsys)
    assert str(cut) in text
    assert "cut off" in text or "is no part" in text
    assert not (tmp_path / "out.json").exists()


def test_every_damaged_part_is_refused(folder: Path) -> None:
    data = sorted(folder.iterdir())[0].read_bytes()
    random = np.random.default_rng(1)
    header = len(parts._MAGIC) + 8
    for _ in range(200):
        damaged = bytearray(data)
        damaged[int(random.integers(0, header + 200))] ^= int(random.integers(1, 256))
        with contextlib.suppress(gradwire.InvalidArgument):  # and no other error
            parts.unpack(bytes(damaged), "here")


@pytest.mark.parametrize("peer", [-1, 2, 99])
def test_a_part_with_ranks_that_there_are_not_is_refused(folder: Path, peer: int) -> None:
    part = parts.read(folder)[0]
    part.tracks[0].events = part.tracks[0].events.copy()
    sent = np.flatnonzero(part.tracks[0].events["kind"] == parts.SEND)
    part.tracks[0].events["peer"][sent[0]] = peer
    with pytest.raises(gradwire.InvalidArgument, match=r"here is damaged: .*ranks that there are"):
        parts.unpack(parts.pack(part), "here")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"{}", b"[1, 2]", b'{"traceEvents": []}'])
def test_foreign_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    foreign = tmp_path / "foreign.json"
    foreign.write_bytes(content)
    assert "foreign.json" in refused(["trace", "summary", str(foreign)], capsys)
    part = tmp_path / "parts" / f"foreign{parts.SUFFIX}"
    part.parent.mkdir()
    part.write_bytes(content or b"x")
    text = refused(["trace", "merge", str(part.parent), str(tmp_path / "out.json")], capsys)
    assert "is no part of a trace" in text


def test_a_merged_file_that_was_cut_off_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert main(["trace", "merge", str(folder), str(path)]) == 0
    capsys.readouterr()
    path.write_text(path.read_text()[:-200])
    assert "cut off" in refused(["trace", "summary", str(path)], capsys)


def test_folders_without_parts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out.json")
    assert "is no folder" in refused(["trace", "merge", str(tmp_path / "none"), out], capsys)
    assert "has no parts" in refused(["trace", "merge", str(tmp_path), out], capsys)


def test_parts_of_two_jobs_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = parts.read(folder)[0]
    for each in first.tracks:
        each.place = each.place._replace(job="another")
    first.process += 1
    parts.write(first, folder)
    text = refused(["trace", "merge", str(folder), str(tmp_path / "out.json")], capsys)
    assert "2 jobs" in text
    assert "'another'" in text


def test_what_lies_within_another_event_stays_there_where_the_clock_runs_at_another_rate() -> None:
    """Begins were by the first process's clock, and durations by this one's."""
    clock = Clock(np.array([0, 10**9]), np.array([0, 5 * 10**7]))
    events = np.zeros(2, parts.EVENT)
    events["begin"], events["duration"] = [10**8, 10**8 + 10**6], [10**7, 9 * 10**6]
    found = [
        (at, at + of["duration"] / 1e3)
        for of, at in chrome.Writer(None, clock, 0)._rows(events)  # type: ignore[arg-type]
    ]
    (outer, outer_end), (inner, inner_end) = found
    assert outer < inner
    assert inner_end == pytest.approx(outer_end, abs=0.01)
    assert outer_end - outer == pytest.approx(1.05e4)
