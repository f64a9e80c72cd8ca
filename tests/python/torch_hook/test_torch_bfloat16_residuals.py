"""The hook with residuals in bfloat16: replicas, saved states, other numbers of ranks."""

from __future__ import annotations

import io
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, State, gather_state_dict, register, scatter_state_dict
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward, mlp, same_everywhere

SPARSE = "topk:density=0.05"


def hooked(module: nn.Module, dtype: str, codec: str = SPARSE) -> Any:
    ddp = DistributedDataParallel(module)
    feedback = gradwire.ErrorFeedback(dtype)
    return ddp, register(ddp, Compression(codec, min_elements=0, feedback=feedback, warm_up=0))


def train(codec: str) -> tuple[bool, bool, list[str]]:
    """Whether replicas agree, whether anything waits, and the types that are saved."""
    ddp, state = hooked(mlp(), "bfloat16", codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    saved = state.state_dict()["feedback"].values()
    return (
        same_everywhere(iter(ddp.parameters())),
        any(bool(each["residual"].any()) for each in saved),
        sorted({str(each["residual"].dtype) for each in saved}),
    )


@pytest.mark.parametrize("codec", ["onebit", "int8", "lowrank", SPARSE])
def test_replicas_agree(codec: str) -> None:
    for agree, waits, types in torch_ranks.run(3, train, codec):
        assert agree
        assert waits
        assert types == ["torch.bfloat16"]


class One(nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def holds(dtype: str, amount: float) -> tuple[DistributedDataParallel, State]:
    ddp, state = hooked(One(), dtype, "none")
    state.feedback.add("weight", torch.full((4,), amount).numpy())
    return ddp, state


def delivered(ddp: DistributedDataParallel) -> float:
    """The average, to which this step adds nothing."""
    ddp(torch.zeros(4)).backward()
    gradient = ddp.module.weight.grad
    assert gradient is not None
    assert same_everywhere(iter([gradient]))
    return float(gradient[0])


AMOUNTS = (800.0, 400.0, 1200.0, 800.0)  # which bfloat16 holds exactly


def save_all(dtype: str) -> bytes:
    _, state = holds(dtype, AMOUNTS[dist.get_rank()])
    file = io.BytesIO()
    torch.save(gather_state_dict(state), file)
    return file.getvalue()


def load_all(dtype: str, saved: bytes) -> float:
    ddp, state = holds(dtype, 7.0)
    gathered = torch.load(io.BytesIO(saved), weights_only=True)
    scatter_state_dict(state, gathered if dist.get_rank() == 0 else None)
    return delivered(ddp)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_what_was_gathered_goes_to_another_number_of_ranks(
    before: int, after: int, types: tuple[str, str]
) -> None:
    for old, new in (types, types[::-1]):
        saved = torch_ranks.run(before, save_all, old)[0]
        expected = sum(AMOUNTS[:before]) / before
        assert torch_ranks.run(after, load_all, new, saved) == [pytest.approx(expected)] * after


@torch_ranks.on_ranks(2)
def test_a_survivor_takes_over_what_waited() -> None:
    """Rank 0 takes over what rank 1 had held back."""
    ddp, state = holds("bfloat16", AMOUNTS[dist.get_rank()])
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state.state_dict())
    assert state.feedback is not None
    if dist.get_rank() == 0:
        state.add_residuals(states[1])
    else:
        state.feedback.clear()
    assert delivered(ddp) == 600.0
