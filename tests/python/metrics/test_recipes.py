"""The recipes of docs/monitoring.md run as they stand there; what they log to is replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

import gradwire.torch
import torch
import torch_ranks
from pages import blocks_of
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[3]
RECIPES = [source for _, source in blocks_of((ROOT / "docs" / "monitoring.md").read_text())]
STEPS = 3


def log_with(recipe: str) -> dict[tuple[str, int], float]:
    """What the recipe logs of a training, by name and step."""
    logged: dict[tuple[str, int], float] = {}

    class SummaryWriter:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            logged[tag, global_step] = float(scalar_value)

    def log(data: dict[str, Any], step: int) -> None:
        logged.update({(name, step): float(each) for name, each in data.items()})

    stands_in: Any = SimpleNamespace
    sys.modules["torch.utils.tensorboard"] = stands_in(SummaryWriter=SummaryWriter)
    sys.modules["wandb"] = stands_in(init=lambda project: None, log=log)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    state = gradwire.torch.register(ddp, "fp16")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def train(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        (ddp(inputs) - labels).pow(2).mean().backward()
        optimizer.step()

    batches = [(torch.ones(3, 4), torch.zeros(3, 2))] * STEPS
    exec(recipe, {"gradwire": gradwire, "ddp": ddp, "train": train, "batches": batches})
    state.close()
    return logged


@pytest.mark.parametrize("number", range(2), ids=("tensorboard", "wandb"))
def test_a_recipe_logs_each_step(number: int) -> None:
    assert len(RECIPES) == 2
    lines = [each for each in RECIPES[number].splitlines() if each]
    assert len(lines) == 6  # an import, and five lines
    for logged in torch_ranks.run(2, log_with, RECIPES[number]):
        assert {step for _, step in logged} == {*range(STEPS)}
        assert logged["gradwire/steps", STEPS - 1] == 1
        assert logged["gradwire/sent_bytes", 1] > 0
