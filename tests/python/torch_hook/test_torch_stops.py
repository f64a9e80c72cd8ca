"""Stops that all ranks agree on, under the hook: in the same step, and training goes on alike."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire._base import stops
from gradwire.torch import Compression, gather_state_dict, register
from torch_training import SMALL_BUCKETS, backward, mlp, wrapped

STEPS, ASKED_AT = 5, 2


def _backward(ddp: Any, step: int, accumulate: bool) -> None:
    """A step's backward, after another without communication if gradients accumulate."""
    with ddp.no_sync() if accumulate else contextlib.nullcontext():
        if accumulate:
            backward(ddp, 100 + step)
    backward(ddp, step)


def _answers(codec: str, rank: int, where: str, accumulate: bool, asks: bool) -> tuple[Any, int]:
    """What should_stop() says in each step, and the frames sent in all."""
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    state = register(ddp, Compression(codec, warm_up=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    number = stops.SIGNALS[rank % 2]
    if asks:
        gradwire.catch_stops()
    doing = {"step": -1}

    def within_backward(gradient: torch.Tensor) -> None:
        if doing["step"] == ASKED_AT and where == "within":
            os.kill(os.getpid(), number)

    if dist.get_rank() == rank:
        ddp.module[2].weight.register_hook(within_backward)  # in a bucket between others
    before, found = state.communicator.traffic.frames_sent, []
    for step in range(STEPS):
        doing["step"] = step
        if asks:
            found.append(state.should_stop())  # of the steps so far
        if (step, where, dist.get_rank()) == (ASKED_AT, "before", rank):
            os.kill(os.getpid(), number)
        optimizer.zero_grad()
        _backward(ddp, step, accumulate)
        optimizer.step()
        if asks:
            found.append(state.should_stop())
    frames = state.communicator.traffic.frames_sent - before
    has_several = state.buckets > state.steps
    state.close()
    assert signal.getsignal(number) == signal.SIG_DFL
    return (found, has_several), frames


EXPECTED = [step >= ASKED_AT for step in range(STEPS) for _ in range(2)]
EXPECTED[2 * ASKED_AT] = False


@pytest.mark.parametrize(
    ("p", "rank", "codec", "where", "accumulate"),
    [
        (2, 0, "none", "before", False),
        (2, 1, "onebit", "within", True),
        (3, 2, "lowrank:rank=2", "before", True),
        (4, 1, "none", "within", False),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    p: int, rank: int, codec: str, where: str, accumulate: bool
) -> None:
    found = torch_ranks.run(p, _answers, codec, rank, where, accumulate, True)
    for (answers, has_several), _ in found:
        assert has_several
        assert answers == EXPECTED


def test_no_frame_is_sent_for_it() -> None:
    asked = torch_ranks.run(2, _answers, "int8", -1, "never", False, True)
    not_asked = torch_ranks.run(2, _answers, "int8", -1, "never", False, False)
    assert [frames for _, frames in asked] == [frames for _, frames in not_asked]


def _train(codec: str, checkpoint: str, killed: int | None) -> tuple[int, bytes]:
    """Trains until the end or a stop; the steps, and the bits of the weights."""
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    state = register(ddp, Compression(codec, warm_up=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    step = 0
    gradwire.catch_stops()
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        step = saved["step"]
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])
    while step < 7 and not state.should_stop():
        if step == 3 and dist.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
        step += 1
    hook = gather_state_dict(state)
    if dist.get_rank() == 0:
        saved = {"step": step, "model": ddp.module.state_dict(), "hook": hook}
        torch.save({**saved, "optimizer": optimizer.state_dict()}, checkpoint)
    state.close()
    weights = torch.cat([each.detach().flatten() for each in ddp.parameters()])
    return step, weights.numpy().tobytes()


@pytest.mark.parametrize("codec", ["none", "onebit"])
def test_a_stopped_training_goes_on_with_the_same_bits(tmp_path: Path, codec: str) -> None:
    whole = torch_ranks.run(2, _train, codec, str(tmp_path / "whole"), None)
    path = str(tmp_path / "stopped")
    stopped = torch_ranks.run(2, _train, codec, path, 1)
    resumed = torch_ranks.run(2, _train, codec, path, None)
    assert [step for step, _ in (*whole, *stopped, *resumed)] == [7, 7, 4, 4, 7, 7]
    assert resumed == whole
    assert stopped[0][1] != whole[0][1]
