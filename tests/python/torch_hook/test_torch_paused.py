"""Backwards whose gradients are thrown away, within `state.paused()`."""

from __future__ import annotations

from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, State, register
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    ASKED,
    CODECS,
    LOSSY,
    SMALL_BUCKETS,
    Branches,
    backward,
    batch,
    flat,
    mlp,
    with_each,
    wrapped,
)

HOOKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "clipping": {"clip_norm": 0.5},
}


def kept(state: State) -> list[torch.Tensor]:
    """All that the hook keeps from one step to the next."""
    saved = state.state_dict()
    every = [each for its in saved["feedback"].values() for each in its.values()]
    return [torch.as_tensor(each).clone() for each in (*every, *saved["velocities"].values())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def gradients(ddp: DistributedDataParallel, step: int) -> torch.Tensor:
    ddp.zero_grad()
    backward(ddp, step)
    found = torch.cat([each.grad.flatten() for each in ddp.parameters()])
    ddp.zero_grad()
    return found


def pause(codec: str, hook: dict[str, Any]) -> tuple[bool, float, bool]:
    """The state after a paused backward, its distance from the average, and whether it goes on."""
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0), **hook)
    plain = DistributedDataParallel(mlp())
    found, furthest = True, 0.0
    for step in range(6):
        gradients(ddp, step)
        before = kept(state)
        with state.paused():
            average = gradients(ddp, 100 + step)
        furthest = max(furthest, float((average - gradients(plain, 100 + step)).abs().max()))
        found = found and same(before, kept(state))
    before = kept(state)
    gradients(ddp, 6)
    return found, furthest, same(before, kept(state))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_paused_backward_averages_and_keeps_nothing(hook: str) -> None:
    for found in torch_ranks.run(2, with_each, LOSSY, pause, HOOKS[hook]):
        for codec, (unmoved, distance, still) in found.items():
            assert unmoved, codec
            assert distance < (0.02 if codec in ("fp16", "bf16", "int8", "int4") else 1e-6), codec
            assert not still, codec


def train(codec: str, pauses: bool) -> torch.Tensor:
    """A model through which, in between, the gradient of another one goes."""
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    state = register(
        ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0), momentum=0.9
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        if pauses:
            x, _ = batch(50 + step)
            x.requires_grad_()
            with state.paused(), state.paused():
                ddp(x).sum().backward()
            assert x.grad is not None
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    assert state.steps == 6
    return flat(ddp)


def trains_alike(codec: str) -> bool:
    return train(codec, True).equal(train(codec, False))


def test_gradients_that_are_thrown_away_change_no_bit_of_training() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, trains_alike):
        assert all(found.values()), found


def pause_branches(codec: str) -> bool:
    """Pauses where DDP also looks for parameters that no rank used."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    found = True
    for step, asked in enumerate(ASKED):
        x, y = batch(step)
        mse_loss(ddp(x, asked[dist.get_rank()]), y).backward()
        before = kept(state)
        with state.paused():
            mse_loss(ddp(x, ASKED[1 - step][dist.get_rank()]), y).backward()
        found = found and same(before, kept(state))
        ddp.zero_grad()
    return found


def test_a_pause_holds_with_parameters_that_are_not_used() -> None:
    for found in torch_ranks.run(2, with_each, LOSSY, pause_branches):
        assert all(found.values()), found


@torch_ranks.on_ranks(2)
def test_a_pause_within_join_is_refused() -> None:
    ddp, _ = wrapped(mlp())
    state = register(ddp, "int8")
    with ddp.join(), pytest.raises(gradwire.InvalidArgument) as raised, state.paused():
        pass
    assert "run these backwards within no_sync()" in str(raised.value)


@torch_ranks.on_ranks(2)
def test_a_pause_that_is_broken_off_changes_nothing_and_ends() -> None:
    """An error of a backward ends the pause, too."""
    ddp, _ = wrapped(mlp())
    state = register(ddp, Compression("onebit", warm_up=0))
    gradients(ddp, 0)
    before = kept(state)
    handle = next(ddp.parameters()).register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), state.paused():
        backward(ddp, 1)
    handle.remove()
    ddp.zero_grad()
    unmoved = same(before, kept(state))
    again, _ = wrapped(ddp.module)
    state.close()
    resumed = register(again, Compression("onebit", feedback=state.feedback, warm_up=0))
    gradients(again, 2)
    assert unmoved
    assert not same(before, kept(resumed))
