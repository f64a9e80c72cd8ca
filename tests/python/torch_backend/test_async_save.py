"""Distributed checkpoints that a thread saves while training goes on."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_ranks
from gradwire.torch import Compression, async_save, register
from torch.nn.parallel import DistributedDataParallel
from torch_pool import on_ranks
from torch_training import backward, mlp


def steps(ddp: DistributedDataParallel, which: range) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in which:
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()


def training() -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(mlp())
    return ddp, register(ddp, Compression("onebit", warm_up=0))


@on_ranks
def test_a_training_resumes_from_a_save_that_it_did_not_wait_for(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ddp, state = training()
    steps(ddp, range(3))
    for save in range(2):  # the second waits for the first
        future = async_save(
            {"model": ddp.module.state_dict(), "gradwire": state}, checkpoint_id=f"{folder}/{save}"
        )
        if save == 0:
            dist.all_reduce(torch.ones(1000))
    steps(ddp, range(3, 6))
    future.result()
    again, its = training()
    found = {"model": again.module.state_dict(), f"gradwire-{dist.get_rank()}": io.BytesIO()}
    dcp.load(found, checkpoint_id=f"{folder}/1")
    again.module.load_state_dict(found["model"])
    (file := found[f"gradwire-{dist.get_rank()}"]).seek(0)
    its.load_state_dict(torch.load(file, weights_only=True))
    steps(again, range(3, 6))
    for one, other in zip(ddp.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    state.close()
    its.close()


@torch_ranks.on_ranks(2, backend="gradwire")
def test_threads_that_share_a_group_are_told_what_to_do() -> None:
    """Two threads make different calls at once, each rank in another order."""
    messages, ready = [], threading.Event()
    turns = [threading.Event() for _ in range(2)]

    def call(turn: int) -> None:
        turns[turn].wait()
        with pytest.raises(gradwire.InvalidArgument) as raised:
            dist.all_reduce(torch.ones(3 + turn))
        messages.append(str(raised.value))

    def save() -> None:
        dist.all_reduce(torch.ones(1))
        ready.set()
        call(1)

    dist.all_reduce(torch.ones(1))
    threads = [threading.Thread(target=save, name="saver"), threading.Thread(target=call, args=[0])]
    for each in threads:
        each.start()
    ready.wait()
    first = dist.get_rank()
    turns[first].set()
    threads[1 - first].join()
    turns[1 - first].set()
    threads[first].join()
    for message in messages:
        assert "threads of rank" in message
        assert "saver" in message
        assert "gradwire.torch.async_save()" in message
