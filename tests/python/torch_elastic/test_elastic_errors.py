"""Errors of the program's own, and steps that never succeed, in sessions."""

from __future__ import annotations

import time
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import elastic
from gradwire.torch._ranks.group import communicator_of
from torch import nn
from trainer_options import grouped


def made(comm: gradwire.Communicator, **options: Any) -> tuple[nn.Module, elastic.Session]:
    torch.manual_seed(5)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sampler = elastic.Sampler(64, 4)
    wish = {"min_elements": 1, "wait": 0.0, **options}
    return model, elastic.session(model, optimizer, sampler, ranks=comm, **grouped(**wish))


def trained(model: nn.Module, session: elastic.Session) -> elastic.Session:
    with session as s:
        for batch in s:
            s.backward(model(torch.ones(len(batch), 64)).square().mean())
            s.commit()
    return s


class Whole(gradwire.codec.Codec):
    """Sends all bytes, and cannot decode after some calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def encode(self, x: Any) -> bytes:
        return bytes(np.asarray(x, np.float32))

    def decode(self, payload: memoryview, count: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ValueError("cannot decode")
        return np.frombuffer(payload, np.float32)


def failing_in_flight(limit: float) -> tuple[bool, bool] | int:
    comm = communicator_of(dist.group.WORLD, limit)
    model, session = made(comm, codec="onebit", warm_up=0, min_ranks=1)
    if comm.rank == 1:
        return late(model, session)
    with pytest.raises(ValueError, match="metric failed"):
        fail_before_commit(model, session)
    hooks = any(each._post_accumulate_grad_hooks for each in model.parameters())
    return hooks, comm.closed


def fail_before_commit(model: nn.Module, session: elastic.Session) -> None:
    with session as s:
        s.backward(model(torch.ones(len(next(iter(s))), 64)).square().mean())
        raise ValueError("metric failed")


def late(model: nn.Module, session: elastic.Session) -> int:
    with session as s:
        for i, batch in enumerate(s):
            if i == 0:
                time.sleep(0.5)
            s.backward(model(torch.ones(len(batch), 64)).square().mean())
            s.commit()
    return s.communicator.size


def test_an_own_error_between_backward_and_commit_is_raised() -> None:
    assert torch_ranks.run(2, failing_in_flight, 20.0) == [(False, True), 1]


def training_with_own_codec(calls: int) -> int | str:
    comm = communicator_of(dist.group.WORLD, 20)
    model, session = made(comm, codec=Whole(calls), feedback=False, min_ranks=2)
    try:
        return trained(model, session).steps
    except gradwire.Error as error:
        return f"{session.steps} {session.changes} {error}"


def test_an_own_codec_trains() -> None:
    assert repr(Whole(1)) == "<codec Whole>"  # without an address
    assert torch_ranks.run(2, training_with_own_codec, 1 << 20) == [8, 8]


def test_a_step_that_always_fails_ends_the_training_on_all_ranks() -> None:
    for told in torch_ranks.run(2, training_with_own_codec, 6):
        steps, changes, *_ = str(told).split()
        assert 0 < int(steps) < 8
        assert int(changes) == 4
        assert "no rank is lost, 4 times" in str(told)
        assert "cannot decode" in str(told)
