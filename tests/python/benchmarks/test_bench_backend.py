"""The benchmarks of the backend: goals and tables of given figures, and a run of all parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_ranks

from bench import tables
from bench.torch_backend import beside_gloo, beside_gloo_report, hybrid, hybrid_report, networks
from bench.torch_backend.beside_gloo_report import (
    COMMUNICATOR,
    FUNCTIONAL,
    GLOO,
    GRADWIRE,
    NO_LINK,
    NUMPY,
)
from bench.torch_backend.hybrid_report import ALL_DDP, HYBRID_DDP, LOCAL, WAYS

HEAD = {"date": "2020-01-01", "machine": "a machine", "command": "-m bench.torch_backend.x"}


def compared(ours: float = 12.0, large: float = 0.0103) -> dict[str, Any]:
    """gloo's all_reduce costs 10 µs; the communicator takes 10 ms for 64 MiB."""
    its = {GRADWIRE: [large, large], GLOO: [0.05, 0.07], COMMUNICATOR: [0.01, 0.01]}
    step = {"ms": 5.0, "middle_half_ms": [4.0, 6.0], "steps": 8, "sent": 2e6}
    costs = {GRADWIRE: ours, GLOO: 10.0, COMMUNICATOR: 2.5, NUMPY: 0.5}
    return HEAD | {
        "cost": {"all_reduce": costs, FUNCTIONAL: {GRADWIRE: 40.0, GLOO: 20.0}},
        "collectives": {"2": {"all_reduce": {str(1 << 26): its}}},
        "steps": {NO_LINK: {"2": {"FSDP2, gradwire": step, "FSDP2, gloo": step}}},
    }


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_goals_are_ratios_of_one_run():
    found = [row[1:] for row in rows("\n".join(beside_gloo_report.goals(compared())))]
    assert found[1:] == [
        ["1.5×", "1.20×", "yes"],
        ["3 µs", "2.50 µs", "yes"],
        ["1.05×", "1.03×", "yes"],
    ]
    missed = [row[-1] for row in rows("\n".join(beside_gloo_report.goals(compared(16, 0.02))))]
    assert missed[1:] == ["no", "yes", "no"]


def test_the_document_beside_gloo_has_what_was_measured(tmp_path: Path):
    found = rows(beside_gloo_report.document(compared(), "found"))
    assert ["all_reduce", "12.0", "10.0", "1.20"] in found
    assert ["all_reduce, 64 MiB", "10.3", "60.0", "5.8×", "10.0", "1.03×"] in found
    assert ["FSDP2, gloo", "2", "shared memory", "8", "5.0 (4.0 to 6.0)", "2.00"] in found
    beside_gloo_report.draw(compared(), tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def of_hybrid() -> dict[str, Any]:
    steps = {
        way: {"ms": 10.0 + i, "middle_half_ms": [9.0, 99.0], "steps": 8, "sent": 8e6 / (i + 1)}
        for i, way in enumerate((LOCAL, *WAYS))
    }
    volumes = {"weights": 2e6, "data_weights": 1e5, "activations": 2e4, "split": []}
    its = {"steps": steps, **volumes, "formula_ddp": 4e6, "formula_hybrid": 1e6}
    by_ranks = {"2": {"VGG": its}}
    return HEAD | {"links": {NO_LINK: by_ranks, "1gbit,100us": by_ranks}, "batch": 4, "steps": 8}


def test_the_document_of_the_hybrid_has_formulas_beside_what_was_sent(tmp_path: Path):
    found = rows(hybrid_report.document(of_hybrid(), "found"))
    assert [f"VGG, {ALL_DDP}", "2.000", "–", "4.00", "4.00", "1.0×"] in found
    assert [f"VGG, {HYBRID_DDP}", "0.100", "0.020", "1.00", "2.00", "2.0×"] in found
    assert [f"VGG, {LOCAL}", *["10.0 (9.0 to 99.0)"] * 2] in found
    hybrid_report.draw(of_hybrid(), tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_documents_get_short_tables(tmp_path: Path):
    (tmp_path / "hybrid-2020-01-01.json").write_text(json.dumps(of_hybrid()))
    (tmp_path / "backend-2020-01-01.json").write_text(json.dumps(compared()))
    (tmp_path / "shaped-backend-2020-01-01.json").write_text(json.dumps(compared()))
    assert rows("\n".join(tables.hybrid(tmp_path)))[1:3] == [
        [f"VGG, {ALL_DDP}", "4.00", "4.00", "11", "11"],
        ["VGG, all FSDP2", "4.00", "2.67", "12", "12"],
    ]
    assert rows("\n".join(tables.backend(tmp_path)))[1:] == [["all_reduce, 64 MiB", "10.3 (5.8×)"]]
    assert len(rows("\n".join(tables.backend_goals(tmp_path)))) == 4
    assert len(rows("\n".join(tables.backend_steps(tmp_path)))) == 3
    shaped, plain = (
        table(tmp_path)[1:] for table in (tables.shaped_backend_steps, tables.backend_steps)
    )
    assert shaped == plain


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_most_weights_are_in_linear_layers(name: str):
    network = networks.NETWORKS[name]()
    linear = [each for each in network.modules() if isinstance(each, torch.nn.Linear)]
    inside = sum(each.weight.numel() for each in linear)
    assert inside > 0.9 * sum(each.numel() for each in network.parameters())
    images, labels = networks.batch(2, 0, 0)
    assert network(images).shape == (2, networks.CLASSES)
    assert labels.max() < networks.CLASSES


@torch_ranks.on_ranks(2)
def test_volumes_are_those_of_the_plan() -> None:
    from bench.torch_backend import hybrid_ranks

    network = networks.vgg_like()
    plan = {"2.0": "model", "2.2": "model"}
    found = hybrid_ranks.volumes(network, plan, 5)
    size = torch.distributed.get_world_size()
    assert found["activations"] == size * 5 * (256 + 2048)
    assert found["weights"] - found["data_weights"] == 257 * 2048 + 2049 * 2048


@pytest.mark.nightly
def test_all_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stem = str(tmp_path / "found")
    few = ["--ranks", "2", "--steps", "2", "--block", "1", "--output", stem]
    monkeypatch.setattr(sys, "argv", ["x", *few, "--links", "none", "--rounds", "2", "--most", "4"])
    assert beside_gloo.main() == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cost"]["all_reduce"][COMMUNICATOR] > 0
    assert set(found["collectives"]["2"]["all_reduce"]["4"]) == {COMMUNICATOR, GRADWIRE, GLOO}
    ways = found["steps"]["none"]["2"]
    # gloo's reduce_scatter sums everything everywhere.
    assert 0 < ways["FSDP2, gradwire"]["sent"] < ways["FSDP2, gloo"]["sent"]
    assert (
        ways["FSDP2, gradwire int8, bf16 gathered"]["sent"] < 0.6 * ways["FSDP2, gradwire"]["sent"]
    )
    split = ways["split, gradwire"]["sent"]
    assert split == pytest.approx(ways["split, gloo"]["sent"], rel=0.05)
    assert ways["split, gradwire bf16"]["sent"] == pytest.approx(split / 2, rel=0.05)
    assert ways["split, gradwire int8"]["sent"] == pytest.approx(split / 4, rel=0.05)
    monkeypatch.setattr(sys, "argv", ["x", *few, "--links", "1gbit,100us", "--networks", "VGG"])
    assert hybrid.main() == 0
    its = json.loads((tmp_path / "found.json").read_text())["links"]["1gbit,100us"]["2"]["VGG"]
    for way, formula in ((ALL_DDP, "formula_ddp"), (HYBRID_DDP, "formula_hybrid")):
        assert its["steps"][way]["sent"] == pytest.approx(its[formula], rel=0.02)
