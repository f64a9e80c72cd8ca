"""Steps of training in a recorded block: recording begins and ends while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradwire
import gradwire.torch
import torch
import torch_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from traces import of, read


def train_with_block(path: Path) -> list[int]:
    """Trains before, in and after a block; returns the optimizer hooks there were each time."""
    model = torch.nn.Linear(4, 2)
    ddp = DistributedDataParallel(model)
    state = gradwire.torch.register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hooks: list[int] = []

    def step() -> None:
        optimizer.zero_grad()
        for last in (False, True):  # the gradients of two backwards
            if last:
                ddp(torch.ones(3, 4)).sum().backward()
            else:
                with ddp.no_sync():
                    ddp(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        hooks.append(len(torch_optimizer._global_optimizer_post_hooks))

    step()
    with gradwire.trace(path):
        step()
        step()
    step()
    state.close()
    return hooks


def test_only_steps_of_the_block_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    hooks: list[Any] = torch_ranks.run(2, train_with_block, path)
    assert hooks == [[0, 1, 1, 0]] * 2
    loaded = read(path)
    for rank in (0, 1):
        names = [each["name"] for each in of(loaded, "program", rank)]
        assert [each for each in names if each.startswith("step")] == ["step 0", "step 1"]
        assert names.count("forward") == 4
        assert names.count("optimizer") == 2
        buckets = [each for each in of(loaded, "call", rank) if "bucket 0" in each["name"]]
        assert len(buckets) == 2
        assert set(buckets[0]["args"]["parameters"]) == {"weight", "bias"}
