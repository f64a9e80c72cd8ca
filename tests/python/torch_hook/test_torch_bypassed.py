"""An optimizer's step whose gradients cannot have come to the hook raises."""

from __future__ import annotations

from functools import partial

import gradwire
import pytest
import torch
import torch_ranks
from gradwire.torch import State, register
from gradwire.torch.ddp.hook import comm_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward, batch, flat, mlp


def refused(module: nn.Module, trained: nn.Module) -> str:
    """The error of the first step; nothing has moved then."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step()  # without gradients nothing is wrong
    before = flat(module)
    backward(trained, 0)
    with pytest.raises(gradwire.Error) as raised:
        optimizer.step()
    assert before.equal(flat(module))
    return str(raised.value)


@torch_ranks.on_ranks(2)
def test_steps_of_gradients_that_did_not_come_to_the_hook_are_refused() -> None:
    """The module is trained in place of the model; and a trainer drops the hook it was given."""
    inside = mlp()
    state = register(DistributedDataParallel(inside))
    messages = [refused(inside, inside)]
    dropped = mlp()
    plain = DistributedDataParallel(dropped)
    State(state.communicator, parameters=dropped.named_parameters())  # which nobody keeps
    kept = State(state.communicator, parameters=dropped.named_parameters())
    messages.append(refused(dropped, plain))
    plain.register_comm_hook(kept, comm_hook)
    optimizer = torch.optim.SGD(dropped.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        backward(plain, step)
        optimizer.step()
    assert kept.steps == 2
    for message in messages:
        assert "SGD steps '0.weight', and no gradient of the model came" in message
        assert "ddp_comm_hook=" in message


@torch_ranks.on_ranks(2)
def test_other_steps_are_not() -> None:
    """Local steps within no_sync, another model's optimizer, and a closed hook."""
    ddp, other = DistributedDataParallel(mlp()), mlp()
    state = register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        backward(ddp, 0)
    optimizer.step()
    closed = mlp()
    register(DistributedDataParallel(closed)).close()
    for module in (other, closed):
        backward(module, 0)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert state.steps == 0


@torch_ranks.on_ranks(2)
def test_steps_after_a_validation_that_left_the_wrapper_in_eval_are_not() -> None:
    """As trainers do: the wrapper stays in eval(), and the step runs its last backward itself."""
    ddp = DistributedDataParallel(mlp())
    state = register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.eval()
    with torch.no_grad():
        ddp(batch(0)[0])
    for step in range(2):
        ddp.module.train()
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, 2 * step)
        optimizer.step(partial(backward, ddp, 2 * step + 1))
    assert state.steps == 2


@torch_ranks.on_ranks(2)
def test_forwards_raise_the_error_where_the_wrapper_is_in_eval() -> None:
    ddp = DistributedDataParallel(mlp())
    state = register(ddp)
    backward(ddp, 0)
    ddp.eval()
    ddp.module.train()
    state.communicator.abort("enough")
    with pytest.raises(gradwire.Aborted):
        backward(ddp, 1)
    with pytest.raises(gradwire.Aborted) as raised:
        ddp(batch(2)[0])
    assert "enough" in str(raised.value)
