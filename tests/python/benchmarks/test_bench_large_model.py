"""The training of a large language model, here a small one, and its report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.training import large_model


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTH": 16, "LAYERS": 1, "CONTEXT": 8, "_UNSEEN": 64}.items():
        monkeypatch.setattr(large_model, name, value)


def make(monkeypatch: pytest.MonkeyPatch, where: Path, *arguments: str) -> Path:
    runs = where / "runs.jsonl"
    given = ["--steps", "10", "--rate", "0.01", "--runs", str(runs), "--output", str(where / "out")]
    monkeypatch.setattr(sys, "argv", ["large_model.py", *given, *arguments])
    assert large_model.main() == 0
    return runs


@pytest.mark.usefixtures("small")
def test_ranks_train_alike_and_a_codec_sends_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    runs = make(monkeypatch, tmp_path, "--exchanges", "none", "int8", "OneBitAdam")
    steps = large_model.read(runs)
    ends = {each.exchange: each for each in steps if each.step == 10}
    assert len(steps) == 30
    assert all(each.identical and (each.unseen or 9) < steps[0].loss for each in ends.values())
    assert 3.5 < ends["none"].bytes / ends["int8"].bytes < 4
    text = (tmp_path / "out.md").read_text()
    assert f"{large_model.parameters():,} parameters" in text
    assert "| `int8` |" in text
    assert "| `OneBitAdam` |" in text


@pytest.mark.usefixtures("small")
def test_what_is_finished_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    runs = make(monkeypatch, tmp_path, "--exchanges", "none")
    lines = runs.read_text().splitlines()
    runs.write_text("\n".join(lines[:-1]) + "\n")  # a program that was stopped
    make(monkeypatch, tmp_path, "--exchanges", "none")
    assert [each.step for each in large_model.read(runs)] == [*range(1, 10), *range(1, 11)]
    assert len(large_model.finished(runs, large_model.read(runs)[0].settings)["none"]) == 10
    make(monkeypatch, tmp_path, "--exchanges", "none")
    assert len(large_model.read(runs)) == 19
