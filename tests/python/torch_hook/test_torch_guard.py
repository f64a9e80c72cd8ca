"""A backward that leaves the hook out raises; one that rightly does without it does not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradwire
import pytest
import torch
import torch_ranks
from gradwire.torch import State, register
from gradwire.torch.ddp.model_hooks import _without_gradient
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import SMALL_BUCKETS, Branches, backward, batch, mlp

SETTINGS: dict[str, dict[str, Any]] = {
    "default": SMALL_BUCKETS,
    "bucket views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {**SMALL_BUCKETS, "static_graph": True},
    "unused": {**SMALL_BUCKETS, "find_unused_parameters": True},
}


def hooked(module: nn.Module | None = None, **setting: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module or mlp(), **setting)
    register(ddp)
    return ddp


@contextlib.contextmanager
def broken_reducer(ddp: DistributedDataParallel) -> Any:
    """Forward forgets to tell DDP's reducer that a backward comes, so it ignores that."""
    ddp._post_forward = lambda output: output
    yield
    del ddp._post_forward


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("set_to_none", [True, False])
@torch_ranks.on_ranks(2)
def test_a_backward_that_the_reducer_ignores_raises(setting: str, set_to_none: bool) -> None:
    ddp = hooked(**SETTINGS[setting])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad(set_to_none)
        if step < 3:
            backward(ddp, step)
            optimizer.step()
    with broken_reducer(ddp), pytest.raises(gradwire.Error) as raised:
        backward(ddp, 3)
    message = str(raised.value)
    assert "did not give its gradients to gradwire's hook" in message
    assert "compile the DDP model" in message


@torch_ranks.on_ranks(2)
def test_a_second_backward_through_one_forward_raises() -> None:
    ddp = hooked()
    x, y = batch(0)
    loss = mse_loss(ddp(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(gradwire.Error) as raised:
        loss.backward()
    assert "run backward once" in str(raised.value)


@dataclass
class Heads:
    left: torch.Tensor
    others: dict[str, list[torch.Tensor]]


class TwoHeads(nn.Module):
    """Two heads without a common trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> Heads:
        return Heads(self.left(x), {"right": [self.right(x)]})


Then = Callable[[DistributedDataParallel, State], None]


def forget_a_head(then: Then) -> str:
    """Half of the gradients come, and the others never do."""
    ddp = DistributedDataParallel(TwoHeads())
    state = register(ddp)
    x, y = batch(0)
    mse_loss(ddp(x).left, y).backward()
    return refusal(then, ddp, state)


def forget_a_branch(then: Then) -> str:
    """The reducer ignores a backward in which a parameter has no gradient."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = register(ddp)
    for step in range(2):
        x, y = batch(step)
        with broken_reducer(ddp) if step else contextlib.nullcontext():
            mse_loss(ddp(x, [0, 1]), y).backward()
    return refusal(then, ddp, state)


def refusal(
    then: Callable[[DistributedDataParallel, State], Any],
    ddp: DistributedDataParallel,
    state: State,
) -> str:
    with pytest.raises(gradwire.Error) as raised:
        then(ddp, state)
    state.close()
    return str(raised.value)


def go_on(ddp: DistributedDataParallel, _: State) -> None:
    asked = [[0, 1]] if isinstance(ddp.module, Branches) else []
    ddp(batch(1)[0], *asked)


def go_on_as_trainers_do(ddp: DistributedDataParallel, state: State) -> None:
    """After a validation the wrapper is still in eval()."""
    ddp.eval()
    ddp.module.train()
    go_on(ddp, state)


def save(_: DistributedDataParallel, state: State) -> None:
    state.state_dict()


def end(_: DistributedDataParallel, state: State) -> None:
    state.close()


@torch_ranks.on_ranks(2)
def test_gradients_that_never_come_raise_in_what_follows() -> None:
    messages = [
        forget(then)
        for forget, then in itertools.product(
            (forget_a_head, forget_a_branch), (go_on, go_on_as_trainers_do, save, end)
        )
        if forget is forget_a_branch or then in (save, end)  # torch is first there
    ]
    assert all("find_unused_parameters" in each for each in messages)
    assert all("right.weight" in each for each in messages[:2])
    assert all("branches.2.weight" in each for each in messages[2:])


def test_an_error_names_five_parameters_and_counts_the_rest() -> None:
    names = list("abcdefg")
    assert _without_gradient(names[:5]).endswith("a, b, c, d, e")
    assert _without_gradient(names).endswith("a, b, c, d, e and 2 more")


@torch_ranks.on_ranks(2)
def test_torch_names_unused_parameters_first() -> None:
    ddp = DistributedDataParallel(TwoHeads())
    state = register(ddp)
    x, y = batch(0)
    mse_loss(ddp(x).left, y).backward()
    with pytest.raises(RuntimeError, match="finished reduction") as raised:
        ddp(batch(1)[0])
    with pytest.raises(gradwire.Error):
        state.close()
    message = str(raised.value)
    assert "Expected to have finished reduction in the prior iteration" in message
    assert "Parameter indices which did not receive grad" in message


class WithScale(nn.Module):
    """A module whose forward returns a parameter, too, as open_clip's does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.scale = nn.Linear(20, 10), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.scale


@torch_ranks.on_ranks(2)
def test_forwards_that_return_a_parameter_leave_nothing_on_it() -> None:
    ddp = DistributedDataParallel(WithScale())
    state = register(ddp)
    for step in range(10):
        with ddp.no_sync() if step % 2 else contextlib.nullcontext():
            x, y = batch(step)
            found, scale = ddp(x)
            mse_loss(found * scale, y).backward()
    assert len(ddp.module.scale._backward_hooks or {}) == 0
    assert state.steps == 5


@torch_ranks.on_ranks(2)
def test_a_backward_left_out_raises_where_forward_returns_a_parameter() -> None:
    ddp = hooked(WithScale())
    for step in range(4):
        x, y = batch(step)
        with broken_reducer(ddp) if step == 3 else contextlib.nullcontext():
            found, scale = ddp(x)
        with pytest.raises(gradwire.Error) if step == 3 else contextlib.nullcontext() as raised:
            mse_loss(found * scale, y).backward()
    assert "did not give its gradients to gradwire's hook" in str(raised.value)


@pytest.mark.parametrize("setting", SETTINGS)
@torch_ranks.on_ranks(2)
def test_backwards_that_need_no_hook_are_left_alone(setting: str) -> None:
    """Runs backwards that look unusual, and are not wrong."""
    ddp = DistributedDataParallel(mlp(), **SETTINGS[setting])
    state = register(ddp)
    if not SETTINGS[setting].get("static_graph"):  # which cannot do without
        with ddp.no_sync():
            backward(ddp, 0)
    for step in range(2):
        backward(ddp, 2 * step)
        x, y = batch(2 * step + 1)
        x.requires_grad_()
        torch.autograd.grad(mse_loss(ddp(x), y), x)  # of an input alone
        mse_loss(ddp(x), y)  # no backward
    with torch.no_grad():
        ddp(x)
    ddp.eval()
    ddp(x)
    assert state.steps == 2


@torch_ranks.on_ranks(2)
def test_gradients_may_come_in_several_backwards() -> None:
    ddp = DistributedDataParallel(TwoHeads())
    state = register(ddp)
    for step in range(3):
        x, y = batch(step)
        heads = ddp(x)
        mse_loss(heads.left, y).backward()
        mse_loss(heads.others["right"][0], y).backward()
    assert state.steps == 3


def gradients(hook: bool, compiled: str) -> tuple[torch.Tensor, State | None]:
    module = mlp()
    if compiled == "inner module":
        module = torch.compile(module, backend="aot_eager")
    ddp = DistributedDataParallel(module)
    state = register(ddp) if hook else None
    model = torch.compile(ddp, backend="aot_eager") if compiled == "DDP model" else ddp
    for step in range(3):
        ddp.zero_grad()
        backward(model, step)
    return torch.cat([each.grad.flatten() for each in ddp.parameters()]), state


@pytest.mark.long
@torch_ranks.on_ranks(2)
def test_compiled_models_are_averaged() -> None:
    plain, _ = gradients(False, "nothing")
    found = []
    for compiled in ("inner module", "DDP model"):
        averaged, state = gradients(True, compiled)
        assert state is not None
        found.append((torch.allclose(averaged, plain, rtol=1e-5, atol=1e-7), state.steps))
    assert found == [(True, 3)] * 2
