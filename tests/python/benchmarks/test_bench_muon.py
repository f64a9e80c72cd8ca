"""The study of Muon and Dion, on a tiny model."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch.optim._muon", reason="torch has Muon from 2.9 on")

from bench.training.trials import muon


def test_each_way_sends_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 16,384 elements of matrices a small share, and all others in int8 or as they are."""
    monkeypatch.setattr(muon, "_WIDTH", 64)
    monkeypatch.setattr(muon, "_LAYERS", 1)
    ways = ["muon", "muon+int8", "dion/4+int8", "rows/0.1+int8", "lowrank/8+int8"]
    monkeypatch.setattr(sys, "argv", ["muon.py", *ways, "--steps", "2"])
    assert muon.main() == 0
    found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [each["way"] for each in found] == ways
    assert all(3 < each["loss"] < 6 for each in found)
    dense, int8, *others = [each["whole"] for each in found]
    assert 0.95 < dense <= 1
    assert 3.3 < int8 < 4
    assert all(each > 6 for each in others)  # 9.7 but for headers and scales
