"""The study of what of a codec's cost is noise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.training.trials import adam_updates, codec_noise


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10_000, generator=generator) for _ in range(codec_noise.RANKS)]


def error(exchange: str) -> float:
    """The share of the averaged gradient's squared norm that its error has."""
    every = gradients()
    mean = sum(every[1:], every[0]) / len(every)
    found = codec_noise.averaging(exchange, 1, [9_000, 1_000])(every)
    return float((found - mean).norm() / mean.norm()) ** 2


def test_ways_to_average_err_by_what_they_say():
    assert error("none") == 0
    assert 0 < error("reversed") < 1e-12
    assert error("noise=0.01") == pytest.approx(0.01, rel=0.1)
    assert 1e-6 < error("int8") < 1e-3
    assert error("int8@1001") < 0.95 * error("int8@0")  # a tenth is dense
    in_blocks = error("int8:block=32@0")
    assert 0 < error("zero=0.003937") < 0.1 * in_blocks  # few and small
    assert 0 < error("keep=0.2") < 0.8 * in_blocks


def test_losses_are_kept_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = tmp_path / "runs.jsonl"
    monkeypatch.setattr(codec_noise, "train", lambda trial, *_: 2.0 + 0.1 * trial.seed)
    given = ["--exchanges", "none", "reversed", "--seeds", "1", "2", "--runs", str(runs)]
    monkeypatch.setattr(sys, "argv", ["codec_noise.py", *given])
    codec_noise.main()
    assert len(codec_noise.read(runs)) == 4
    assert "| reversed | 2 | 2.1500 ± 0.0707 | +0.00 ± 0.00 | 0.00 |" in capsys.readouterr().out


def test_it_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(codec_noise, "SETTINGS", {"lm": (0.004, 8)})
    given = ["--task", "lm", "--steps", "9", "--until", "2", "--seeds", "1", "--exchanges", "none"]
    runs = tmp_path / "runs.jsonl"
    monkeypatch.setattr(sys, "argv", ["codec_noise.py", *given, "--runs", str(runs)])
    codec_noise.main()
    (loss,) = codec_noise.read(runs).values()
    assert 2 < loss < 5


def test_codecs_move_updates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codec_noise, "SETTINGS", {"lm": (0.004, 8)})
    monkeypatch.setattr(adam_updates, "_STEPS", (1, 2))
    monkeypatch.setattr(sys, "argv", ["adam_updates.py", "bf16@0", "int8", "--task", "lm"])
    adam_updates.main()
    lines = capsys.readouterr().out.splitlines()
    heads = [f"step {step}, {way}: " for step in (1, 2) for way in ("bf16@0", "int8")]
    off = [float(a.removeprefix(b).partition(" %")[0]) for a, b in zip(lines, heads, strict=True)]
    assert 0 < off[0] < off[1] < 60
    assert 0 < off[2] < off[3] < 60
