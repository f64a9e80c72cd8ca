"""Buffers in a session: those in one memory, and those that a module assigns anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import elastic
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.elastic.session_state import SessionState
from torch import nn

SAMPLES, BATCH = 48, 4

Values = dict[str, Any]


class Model(nn.Module):
    """A layer; a count, a mean of inputs and the mean before it, each assigned anew by forward."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(4, 2)
        start = torch.zeros(3)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("ema", start)
        self.register_buffer("before", start)  # the same tensor, until the first forward
        self.register_buffer("line", torch.arange(10.0) + 100 * rank)
        self.register_buffer("view", self.line[2:5])
        self.register_buffer("swapped", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.before = self.ema
        self.ema = 0.5 * self.ema + x.mean().detach()
        self.line += 1
        self.swapped.data = self.swapped + 1
        return self.layer(x)


def values_of(model: nn.Module) -> Values:
    return {name: each.detach().numpy().copy() for name, each in model.state_dict().items()}


def train(
    model: Model,
    session: elastic.Session,
    optimizer: torch.optim.Optimizer,
    act: Callable[[elastic.Session], None] = lambda _: None,
) -> None:
    with session as s:
        for batch in s:
            loss = model(batch[:, None].expand(-1, 4) / SAMPLES).square().mean()
            act(s)
            s.backward(loss)
            if s.commit():
                optimizer.step()


def made(model: Model, **options: Any) -> tuple[Model, elastic.Session, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sampler = elastic.Sampler(SAMPLES, BATCH)
    return model, elastic.session(model, optimizer, sampler, **options), optimizer


def trained(victim: int | None, verify: bool) -> tuple[Values, int]:
    comm = communicator_of(dist.group.WORLD, 30)
    given: list[torch.Tensor] = []

    def die(s: elastic.Session) -> None:
        if s.steps == 2 and s.changes == 0:
            if comm.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            given.append(model.seen)

    model, session, optimizer = made(Model(comm.rank), ranks=comm, wait=0, verify=verify)
    train(model, session, optimizer, die)
    session.communicator.close()
    return values_of(model), int(session.steps)


def alike(one: Values, other: Values) -> bool:
    return all(np.array_equal(each, other[name]) for name, each in one.items())


def test_all_ranks_have_those_of_rank_0() -> None:
    (one, steps), (other, _) = torch_ranks.run(2, trained, None, False)
    assert alike(one, other)
    assert one["seen"] == one["swapped"][0] == steps == SAMPLES // (2 * BATCH)
    assert one["ema"][0] != one["before"][0] != 0
    assert np.array_equal(one["line"], np.arange(10.0) + steps)
    assert np.array_equal(one["view"], one["line"][2:5])


@pytest.mark.parametrize("verify", [False, True])
def test_a_step_that_is_broken_off_leaves_no_trace(verify: bool) -> None:
    one, _, other = torch_ranks.run(3, trained, 1, verify, dying=(1,))
    assert alike(one[0], other[0])
    batches = 2 * 1 + 2 * 2  # of two steps on three ranks, and of two more on two
    assert one[0]["seen"] == one[0]["swapped"][0] == batches
    assert np.array_equal(one[0]["line"], np.arange(10.0) + batches)
    assert np.array_equal(one[0]["view"], one[0]["line"][2:5])


def test_a_joiner_gets_those_of_modules_that_have_assigned_them() -> None:
    """Its own are one tensor in two places, the others' are not any more."""
    old, new = Model(1), Model(2)
    for each in torch.rand(3, 4, 4):
        old(each)
    state = SessionState(old, torch.optim.SGD(old.parameters()), []).state_dict()
    SessionState(new, torch.optim.SGD(new.parameters()), []).load_state_dict(state)
    assert alike(values_of(old), values_of(new))
    assert new.view.data_ptr() == new.line[2:].data_ptr()
    assert old.ema is not new.ema


def grow(model: Model) -> None:
    model.ema = torch.zeros(4)


def become_double(model: Model) -> None:
    model.ema = model.ema.double()


def vanish(model: Model) -> None:
    model.ema = None


def come(model: Model) -> None:
    model.register_buffer("late", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (grow, r"'ema' was torch.float32 of shape \(3,\) on cpu .* is .* of shape \(4,\)"),
        (become_double, "'ema' was torch.float32 .* is torch.float64"),
        (vanish, "'ema' .* is gone"),
        (come, r"\['late'\] came after the session was made"),
    ],
)
def test_other_changes_of_buffers_are_refused(change: Callable[[Model], None], text: str) -> None:
    alone = gradwire.init(rank=0, ranks=1, store="unix://none")
    model, session, optimizer = made(Model(), ranks=alone, min_ranks=1)
    with pytest.raises(gradwire.InvalidArgument, match=text):
        train(model, session, optimizer, lambda _: change(model))
