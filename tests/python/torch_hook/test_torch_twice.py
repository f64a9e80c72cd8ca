"""Momentum in the hook beside that of an optimizer, and gradients that it would count twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, State, register
from torch.nn.parallel import DistributedDataParallel
from torch_training import CODECS, SMALL_BUCKETS, backward, flat, mlp, with_each, wrapped
from trainer_options import grouped

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda of: torch.optim.RMSprop(of, lr=0.1, momentum=0.5),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@torch_ranks.on_ranks(2)
def test_an_optimizer_with_momentum_of_its_own_is_refused(name: str, given: bool) -> None:
    ddp = DistributedDataParallel(mlp())
    optimizer = OPTIMIZERS[name](ddp.parameters())
    before = flat(ddp)

    def train() -> None:
        register(ddp, momentum=0.9, optimizer=optimizer if given else None)
        backward(ddp, 0)
        optimizer.step()

    with pytest.raises(gradwire.InvalidArgument) as raised:
        train()
    assert before.equal(flat(ddp))
    message = str(raised.value)
    assert f"{name} has momentum=0." in message
    assert "momentum=0, or leave momentum= out" in message


@torch_ranks.on_ranks(1)
def test_momentum_that_a_scheduler_sets_is_refused() -> None:
    """Momentum that OneCycleLR sets by itself."""
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    register(ddp, momentum=0.9, optimizer=optimizer)
    backward(ddp, 0)
    optimizer.step()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(gradwire.InvalidArgument) as raised:
        optimizer.step()
    assert "cycle_momentum=False" in str(raised.value)


def step_adam(betas: tuple[float, float]) -> list[str]:
    warnings = torch_ranks.logged()
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(ddp.parameters(), betas=betas)
    register(ddp, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    return warnings


def test_an_optimizer_with_betas_is_warned_of_once() -> None:
    first, second = torch_ranks.run(2, step_adam, (0.9, 0.999))
    assert len(first) == 1
    assert "AdamW has momentum of its own (betas=(0.9, 0.999))" in first[0]
    assert second == []


def test_adam_without_a_first_moment_is_not_warned_of() -> None:
    assert torch_ranks.run(1, step_adam, (0.0, 0.999)) == [[]]


@torch_ranks.on_ranks(1)
def test_momentum_of_others_is_let_alone() -> None:
    """Another model's optimizer, that of a closed hook, and a hook without momentum."""
    warnings = torch_ranks.logged()
    for momentum, closed in ((None, False), (0.9, True), (0.0, False)):
        ddp = DistributedDataParallel(mlp())
        state = register(ddp, momentum=momentum)
        backward(ddp, 0)
        if closed:
            state.close()
        torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9).step()
        torch.optim.AdamW(ddp.parameters()).step()
    ddp = DistributedDataParallel(mlp())
    state = register(ddp, momentum=0.9)
    other = mlp()
    torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).step()
    torch.optim.AdamW(other.parameters()).step()
    assert warnings == []
    assert state.steps == 0


@torch_ranks.on_ranks(1)
def test_a_closed_hook_leaves_nothing_at_the_parameters() -> None:
    model = mlp()
    left = []
    for _ in range(3):
        state = register(DistributedDataParallel(model), momentum=0.9)
        held = [len(each._backward_hooks or ()) for each in model.parameters()]
        state.close()
        left.append(max(held))
    left.append(max(len(each._backward_hooks or ()) for each in model.parameters()))
    assert left == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("momentum", [0.9, None, 0.9], "None on rank 1"),
        ("momentum", [0.9, 0.9, 0.5], "0.5 on rank 2"),
        ("clip_norm", [1.0, 2.0, 2.0], "1.0 on rank 0; 2.0 on rank 1, 2"),
        ("min_elements", [1, 2, 3], "3 on rank 2"),
        ("feedback", [True, False, True], "True on rank 0, 2; False on rank 1"),
        ("scaler", [torch.amp.GradScaler("cpu"), None, None], "True on rank 0; False on rank 1, 2"),
    ],
)
@torch_ranks.on_ranks(3)
def test_settings_that_differ_between_ranks_are_refused_on_all(
    name: str, values: list[Any], said: str
) -> None:
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(ddp, **grouped(**{name: values[dist.get_rank()]}))
    register(ddp)  # which can be tried again
    backward(ddp, 0)
    message = str(raised.value)
    assert f"a different {name}=" in message
    assert said in message


@pytest.mark.parametrize("how", ["default", "bucket views", "no_sync between"])
@pytest.mark.parametrize("hook", [{"momentum": 0.9}, {"clip_norm": 1.0}])
@torch_ranks.on_ranks(2)
def test_gradients_added_to_an_average_are_refused(hook: dict[str, Any], how: str) -> None:
    """Two backwards that are both averaged, for one step of the optimizer."""
    ddp, _ = wrapped(mlp(), gradient_as_bucket_view=how == "bucket views")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    register(ddp, **grouped(**hook))
    for step in range(2):
        backward(ddp, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    backward(ddp, 2)
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)  # so that they are other gradients
    if how == "no_sync between":
        with ddp.no_sync():
            backward(ddp, 3)
    with pytest.raises(gradwire.InvalidArgument) as raised:
        backward(ddp, 4)
    message = str(raised.value)
    assert "still holds the average of an earlier backward" in message
    assert "no_sync" in message


SETTINGS: dict[str, dict[str, Any]] = {
    "default": SMALL_BUCKETS,
    "bucket views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {**SMALL_BUCKETS, "static_graph": True},
    "unused": {**SMALL_BUCKETS, "find_unused_parameters": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("set_to_none", [True, False])
@torch_ranks.on_ranks(2)
def test_gradients_that_were_zeroed_are_not_refused(setting: str, set_to_none: bool) -> None:
    """Steps without a step of the optimizer, with two, with none of the gradients used."""
    ddp, _ = wrapped(mlp(), **SETTINGS[setting])
    state = register(ddp, momentum=0.9, clip_norm=1.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        accumulates = step % 2 and not SETTINGS[setting].get("static_graph")
        with ddp.no_sync() if accumulates else contextlib.nullcontext():
            backward(ddp, 2 * step, scaler)
        if accumulates:
            backward(ddp, 2 * step + 1, scaler)
        if step == 3:  # as a GradScaler finds it
            next(ddp.parameters()).grad[0] = float("inf")
        if step != 4:  # gradients that are thrown away
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none)
    assert [state.steps] == [6]


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if both else self.always(x)


@torch_ranks.on_ranks(2)
def test_gradients_that_were_zeroed_and_then_not_used_are_not_refused() -> None:
    """Gradients that are looked at after a step, of a parameter that the next step does not use."""
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = register(ddp, clip_norm=1.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for both in (True, dist.get_rank() == 0, True):
        ddp(torch.ones(2, 3), both).sum().backward()
        optimizer.step()
        torch.autograd.grad(model(torch.ones(2, 3), True).sum(), list(model.parameters()))
        optimizer.zero_grad()
    assert [state.steps] == [3]


@torch_ranks.on_ranks(2)
def test_gradients_may_be_zeroed_between_forward_and_backward() -> None:
    ddp, _ = wrapped(mlp())
    state = register(ddp, momentum=0.9)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        output = ddp(torch.full((4, 20), float(step + 1)))
        optimizer.zero_grad()
        output.sum().backward()
        optimizer.step()
    assert state.steps == 3


def accumulate_without_momentum(codec: str) -> float:
    """Both averages are in the gradient once, and the rest is kept."""
    ddp, books = wrapped(mlp(), **SMALL_BUCKETS)
    state: State = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    for step in range(6):
        backward(ddp, step)
        if step % 2:
            books.deliver()
    return books.missing(state.feedback)


def test_without_momentum_averages_may_be_accumulated() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, accumulate_without_momentum):
        assert max(found.values()) < 16.0, found
