"""The benchmark of overlap: its goals, and the network that it is about."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_ranks

from bench.network import links
from bench.training import images, methods, overlap
from bench.training.step_report import NO_LINK

BYTES, LARGE = 40_000_000, 64 << 20


def measured(local: float, gloo: float, gradwire: float, alone: float) -> dict[str, Any]:
    """Milliseconds. DDP itself takes 4 of them."""
    sent = {"local step": 0, "empty hook": 0, "gloo": BYTES, "none": BYTES}
    times = zip(sent, (local, local + 4, gloo, gradwire), strict=True)
    calls = {str(BYTES): alone, str(LARGE): 570.0}
    return {
        "steps": {name: {"ms": ms, "sent": sent[name]} for name, ms in times},
        "calls": {f"gradwire {name}": calls for name in overlap.ALGORITHMS} | {"gloo": calls},
    }


def goals(here: dict[str, Any], shaped: dict[str, Any]) -> list[list[str]]:
    found = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench.training.overlap"}
    found |= {"ranks": 2, "batch": 64, "bytes": BYTES, "links": {NO_LINK: here, "1gbit": shaped}}
    rows = [line.strip("| ").split(" | ") for line in overlap.document(found).splitlines()]
    return [row for row in rows if row[-1] in ("yes", "no", "–")]


def test_on_one_host_a_step_is_the_local_one_and_an_all_reduce():
    here = goals(measured(50, 80, 60, 10), measured(50, 400, 400, 340))
    assert here[:3] == [
        ["shm", "step ≤ local step + 1.15 × all_reduce alone", "1.00×", "yes"],
        ["shm", "the same of DDP with an empty hook", "0.40×", "–"],
        ["shm", "step ≤ 0.75 × gloo DDP's", "0.75×", "yes"],
    ]
    slower = goals(measured(50, 80, 62, 10), measured(50, 400, 400, 340))
    assert [row[-2:] for row in slower[:3]] == [["1.20×", "no"], ["0.40×", "–"], ["0.78×", "no"]]


def test_on_a_link_the_longer_of_step_and_travel_counts():
    travel = links.wire_bytes(BYTES) * 8e3 / 1e9
    what = "step ≤ 1.15 × max(local step, bytes / rate)"
    slow_link = goals(measured(1, 2, 1, 1), measured(50, 400, 1.1 * travel, 340))
    assert slow_link[3] == ["1gbit", what, "1.10×", "yes"]
    slow_step = goals(measured(1, 2, 1, 1), measured(500, 900, 600, 340))
    assert slow_step[3] == ["1gbit", what, "1.20×", "no"]


def test_large_sums_are_to_travel_at_the_rate():
    found = goals(measured(1, 2, 1, 1), measured(50, 400, 400, 340))
    share = links.wire_bytes(LARGE) * 8e3 / 1e9 / 570
    assert [row[1] for row in found[4:]] == [
        f"67,108,864 B by {name} at ≥ 95% of the rate"
        for name in ("ring", "direct", "halving_doubling")
    ]
    assert {row[2] for row in found[4:]} == {f"{share:.1%}"}
    assert {row[3] for row in found[4:]} == {"yes"}


def test_each_link_has_the_step_with_an_empty_hook():
    found = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench.training.overlap"}
    links_of = {NO_LINK: measured(50, 80, 60, 10), "1gbit": measured(51, 400, 400, 340)}
    found |= {"ranks": 2, "batch": 64, "bytes": BYTES, "links": links_of}
    rows = [row for row in overlap.document(found).splitlines() if "DDP, empty hook" in row]
    assert rows == ["| DDP, empty hook: a step | 54.0 |", "| DDP, empty hook: a step | 55.0 |"]


@torch_ranks.on_ranks(2)
def test_an_empty_hook_averages_nothing() -> None:
    averaging = methods.without_averaging(torch.nn.Linear(1, 1))
    averaging.ddp(torch.ones(1) * (dist.get_rank() + 1)).backward()
    (weight,) = (each for name, each in averaging.ddp.named_parameters() if "weight" in name)
    assert weight.grad is not None
    assert (weight.grad.item(), averaging.sent()) == [(1.0, 0), (2.0, 0)][dist.get_rank()]


def test_the_network_has_10_million_parameters():
    model = images.mlp(28)
    assert sum(each.numel() for each in model.parameters()) == 10_260_490
    assert model(images.random_images(3).train_images).shape == (3, 10)


def test_without_root_it_says_what_needs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(links, "missing", lambda: "needs root")
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--output", str(tmp_path / "found")])
    assert overlap.main() == 1
    assert "needs root; --here needs none of it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
