"""Momentum in the hook: correction and factor masking (Lin et al. 2018)."""

from __future__ import annotations

from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, register
from torch.nn.functional import mse_loss
from torch_training import (
    ASKED,
    CODECS,
    SMALL_BUCKETS,
    Branches,
    backward,
    batch,
    flat,
    mlp,
    same_everywhere,
    with_each,
    wrapped,
)
from trainer_options import grouped

SPARSE = [codec for codec in CODECS if codec.startswith(("threshold", "topk"))]


def train(hook: dict[str, Any], sgd: dict[str, Any], wraps_anew: bool = False) -> torch.Tensor:
    """Makes DDP anew in the middle if asked, where residuals and what belongs to them go on."""
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    state = register(ddp, **grouped(min_elements=0, warm_up=0, **hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, **sgd)
    for step in range(6):
        if wraps_anew and step == 3:
            ddp, _ = wrapped(ddp.module, **SMALL_BUCKETS)
            register(
                ddp, **grouped(min_elements=0, warm_up=0, **{**hook, "feedback": state.feedback})
            )
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    return flat(ddp)


@pytest.mark.parametrize("nesterov", [False, True])
@torch_ranks.on_ranks(2)
def test_dense_momentum_in_the_hook_is_that_of_the_optimizer(nesterov: bool) -> None:
    expected = train({}, {"momentum": 0.9, "nesterov": nesterov})
    moved = [
        train({"momentum": 0.9, "nesterov": nesterov, "feedback": on}, {}, wraps_anew=on)
        for on in (False, True)
    ]
    assert max([float((each - expected).abs().max()) for each in moved]) < 1e-6


def use_branches(hook: dict[str, Any], sgd: dict[str, Any]) -> torch.Tensor:
    """A parameter that no rank used keeps its velocity."""
    ddp, _ = wrapped(Branches(), find_unused_parameters=True)
    register(ddp, **grouped(min_elements=0, warm_up=0, **hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, **sgd)
    for step, asked in enumerate(ASKED):
        x, y = batch(step)
        optimizer.zero_grad()
        mse_loss(ddp(x, asked[dist.get_rank()]), y).backward()
        optimizer.step()
    return flat(ddp)


@torch_ranks.on_ranks(2)
def test_momentum_of_parameters_that_no_rank_uses_is_that_of_the_optimizer() -> None:
    found = []
    for nesterov in (False, True):
        expected = use_branches({}, {"momentum": 0.9, "nesterov": nesterov})
        for feedback in (False, True):
            moved = use_branches({"momentum": 0.9, "nesterov": nesterov, "feedback": feedback}, {})
            found.append(float((moved - expected).abs().max()))
    assert max(found) < 1e-6


class Velocities:
    """Computed beside the hook, from the gradients that go into it."""

    def __init__(self, module: torch.nn.Module, factor: float) -> None:
        self.factor = factor
        self.now: dict[str, torch.Tensor] = {}
        self.next: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            self.now[name] = torch.zeros_like(parameter)
            parameter.register_hook(self.move(name))

    def move(self, name: str) -> Any:
        def move(gradient: torch.Tensor) -> None:
            self.next[name] = gradient + self.factor * self.now[name]

        return move

    def settle(self, feedback: gradwire.ErrorFeedback, mask: bool) -> None:
        for name, velocity in self.next.items():
            waits = torch.from_numpy(feedback.residual(name)).view_as(velocity) != 0
            self.now[name] = velocity * waits if mask else velocity


def follow(codec: str, masking: bool) -> tuple[float, bool, float]:
    """The distance of the hook's velocities from those; whether everything sent is conserved."""
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    expected = Velocities(ddp.module, 0.9)
    compression = Compression(codec, min_elements=0, feedback=True, warm_up=0)
    state = register(ddp, compression, momentum=0.9, factor_masking=masking)
    assert state.feedback is not None
    sent = {name: torch.zeros_like(p).double() for name, p in ddp.module.named_parameters()}
    for step in range(5):
        ddp.zero_grad()
        backward(ddp, step)
        expected.settle(state.feedback, masking and codec in SPARSE)
        for name, parameter in ddp.module.named_parameters():
            sent[name] += expected.next[name].double()
            sent[name] -= parameter.grad.double()  # the average; in all, what is held back
    found = state.state_dict()["velocities"]
    distance = max(float((found[name] - v).abs().max()) for name, v in expected.now.items())
    lost = 0.0
    for name, total in sent.items():
        total -= torch.from_numpy(state.feedback.residual(name)).view_as(total).double()
        dist.all_reduce(total)
        lost = max(lost, float(total.abs().max()))
    return distance, same_everywhere(each.grad for each in ddp.parameters()), lost


@pytest.mark.parametrize("masking", [False, True])
def test_velocities_of_elements_just_sent_are_forgotten(masking: bool) -> None:
    for found in torch_ranks.run(2, with_each, CODECS, follow, masking):
        for codec, (distance, same, lost) in found.items():
            assert distance < 1e-6, codec
            assert same, codec
            assert lost < 1e-5, codec


def overflow(codec: str) -> bool:
    ddp, _ = wrapped(mlp())
    state = register(ddp, Compression(codec, feedback=True, warm_up=0), momentum=0.9)
    backward(ddp, 0)
    before = state.state_dict()["velocities"]
    ddp.zero_grad()
    with torch.no_grad():
        list(ddp.parameters())[-1][0] = float("inf")
    backward(ddp, 1)
    after = state.state_dict()["velocities"]
    return all(before[name].equal(after[name]) for name in before)


def test_an_overflow_moves_no_velocity() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, overflow):
        assert all(found.values()), found


def resume(codec: str) -> bool:
    ddp, _ = wrapped(mlp())
    state = register(ddp, Compression(codec, feedback=True, warm_up=0), momentum=0.9)
    for step in range(3):
        ddp.zero_grad()
        backward(ddp, step)
    again, _ = wrapped(mlp())
    resumed = register(again, Compression(codec, feedback=True, warm_up=0), momentum=0.9)
    resumed.load_state_dict(state.state_dict())
    for each in (ddp, again):
        each.zero_grad()
        backward(each, 3)
    pairs = zip(ddp.parameters(), again.parameters(), strict=True)
    return all(one.grad.equal(other.grad) for one, other in pairs)


def test_velocities_are_saved() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, resume):
        assert all(found.values()), found


def with_scaler(codec: str) -> bool:
    """Powers of two change no bit, if all that is kept follows them."""
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)):
        ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
        register(ddp, Compression(codec, warm_up=0), momentum=0.9, scaler=scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = mse_loss(ddp(x), y)
            (scaler.scale(loss) if scaler else loss).backward()
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
        ends.append(flat(ddp))
    return ends[0].equal(ends[1])


def test_velocities_follow_the_loss_scale() -> None:
    exact = [codec for codec in CODECS if codec.partition(":")[0] not in ("fp16", "lowrank")]
    for found in torch_ranks.run(2, with_each, exact, with_scaler):
        assert all(found.values()), found
