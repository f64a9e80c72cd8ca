"""Stops that all ranks agree on, under FSDP2: with and without replicas, after the same step."""

from __future__ import annotations

import os
import signal
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire._base import stops
from sharded_training import backward, registered
from torch.distributed.device_mesh import init_device_mesh
from torch_versions import has_fsdp_hooks

pytestmark = has_fsdp_hooks
STEPS, ASKED_AT = 5, 2
EXPECTED = [step >= ASKED_AT for step in range(STEPS)]


def _answers(shape: tuple[int, ...], codec: str, rank: int, where: str) -> tuple[list[bool], int]:
    """What should_stop() says after each step, and how many ranks gradients travel between."""
    names = ("replicate", "shard")[-len(shape) :]
    module, state = registered(init_device_mesh("cpu", shape, mesh_dim_names=names), codec)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    number = stops.SIGNALS[rank % 2]
    doing = {"step": -1}
    gradwire.catch_stops()

    def ask(at: str) -> None:
        if (dist.get_rank(), doing["step"], at) == (rank, ASKED_AT, where):
            os.kill(os.getpid(), number)

    def hear(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: ask("within"))  # the first layer is yet to be sent

    module[1].register_forward_hook(hear)
    found = [state.should_stop()]
    for doing["step"] in range(STEPS):
        ask("before")
        optimizer.zero_grad()
        backward(module, doing["step"])
        optimizer.step()
        found.append(state.should_stop())
    size = state.communicator.size
    state.close()
    assert signal.getsignal(number) == signal.SIG_DFL
    return found, size


@pytest.mark.parametrize(
    ("shape", "codec", "rank", "where"),
    [
        pytest.param((2,), "none", 0, "before", id="sharded-0"),
        pytest.param((2,), "onebit", 1, "within", id="sharded-1"),
        pytest.param((2, 1), "onebit", 0, "within", id="replicas-0"),
        pytest.param((2, 1), "none", 1, "before", id="replicas-1"),
        *(
            pytest.param((2, 2), *row, marks=pytest.mark.nightly, id=f"both-{row[1]}")
            for row in [
                ("none", 0, "before"),
                ("onebit", 1, "within"),
                ("int8", 2, "before"),
                ("none", 3, "within"),
            ]
        ),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    shape: tuple[int, ...], codec: str, rank: int, where: str
) -> None:
    ranks = 2 if len(shape) == 1 else shape[0] * shape[1]
    found = torch_ranks.run(ranks, _answers, shape, codec, rank, where)
    assert found == [([False, *EXPECTED], shape[0])] * ranks
