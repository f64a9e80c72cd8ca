"""Two trees in pairs: which commit is the other one, what the interval says, and a small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gradwire
import pytest
from gradwire import _core

from bench.collectives import compare
from bench.collectives.compare import Compared

CASE = {"collective": "all_reduce", "nbytes": 64, "algorithm": "auto", "codec": "none"}


def test_the_interval_leaves_out_what_chance_allows():
    values = [float(each) for each in range(1, 16)]
    assert compare.interval(values) == (4, 12)  # P(fewer than 4 of 15 heads) = 1.8 %, both ways
    assert compare.interval(values[:6]) == (1, 6)
    with pytest.raises(ValueError, match="5 values make no interval"):
        compare.interval(values[:5])


def test_slower_is_who_is_slower_with_confidence():
    def compared(*ratios: float) -> Compared:
        return Compared(CASE, 2, "shm", 1.0, ratios)

    assert compared(0.8, 0.85, 0.9, 0.8, 0.7, 0.9).is_below(0.95)
    assert not compared(0.8, 0.85, 0.9, 0.8, 0.7, 0.96).is_below(0.95)
    assert not compared(0.8, 0.85, 0.9, 0.8, 0.7, 0.9).is_below(0.0)
    assert compared(2, 2, 1, 3, 2, 2).line().split() == [
        *("all_reduce", "64", "B,", "p=2", "shm", "1.0", "µs", "2.000", "[1.000,", "3.000]")
    ]


def git(root: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(root), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, text: str) -> str:
    (root / "csrc").mkdir(exist_ok=True)
    (root / "csrc" / "a.cc").write_text(text)
    git(root, "add", "csrc")
    git(root, "commit", "-qm", text)
    return git(root, "rev-parse", "HEAD")


def test_the_base_is_where_the_tree_left_main_or_the_commit_before(tmp_path: Path):
    git(tmp_path, "init", "-q", "-b", "main")
    first, second = commit(tmp_path, "first"), commit(tmp_path, "second")
    assert compare.base_of(tmp_path, None) == first
    (tmp_path / "csrc" / "a.cc").write_text("changed")
    assert compare.base_of(tmp_path, None) == second
    git(tmp_path, "checkout", "-qb", "topic")
    commit(tmp_path, "third")
    assert compare.base_of(tmp_path, None) == second
    assert compare.base_of(tmp_path, "topic~2") == first


def test_a_side_uses_its_own_files(tmp_path: Path):
    python = tmp_path / "python"
    python.mkdir()
    (python / "__init__.py").write_text("raise SystemExit('the right ones')")
    (python / "_core.cpython-1.so").write_text("another's")
    core = tmp_path / "_core.so"
    core.write_text("its own")
    package = compare.assemble(python, core, tmp_path / "package")
    found = sorted(each.name for each in (package / "gradwire").iterdir())
    assert found == ["__init__.py", "_core.so"]
    side = compare.Side(package, 2, "shm")
    with pytest.raises(RuntimeError, match="the ranks ended"):
        side.ask(**CASE)
    side.close()


def test_trees_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    python = Path(gradwire.__file__).parent
    package = compare.assemble(python, Path(_core.__file__), tmp_path / "package")
    monkeypatch.setattr(compare, "base_of", lambda root, ref: "0123456789abcdef")
    monkeypatch.setattr(compare, "build_commit", lambda base: package)
    monkeypatch.setattr(compare, "build", lambda source, place: package)
    command = ["compare.py", "--ranks", "2", "--transports", "shm", "--rounds", "6"]
    command += ["--collectives", "all_reduce", "all_gather", "--sizes", "4", "4096"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(tmp_path / "found.json")])
    assert compare.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["case"]["nbytes"] for each in found["cases"]] == [4, 4096] * 2
    for each in found["cases"]:
        low, high = each["interval"]
        assert 0 < low <= each["median"] <= high
        assert len(each["ratios"]) == 6
    monkeypatch.setattr(sys, "argv", [*command, "--fail-below", "1e6"])
    assert compare.main() == 1
    assert "slower than 1e+06 times the base: all_reduce 4 B" in capsys.readouterr().out
