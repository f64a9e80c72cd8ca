"""Saved states know their rank and the number of ranks, and can be loaded on another number."""

from __future__ import annotations

import io
import logging
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import (
    Compression,
    State,
    gather_state_dict,
    register,
    scatter_state_dict,
)
from ranks import nightly, some
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import CODECS, SMALL_BUCKETS, Tower, backward, mlp, same_everywhere, wrapped


class One(nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self, elements: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def holds(*amounts: float) -> tuple[DistributedDataParallel, State]:
    """A hook that has held back so much on each rank."""
    ddp = DistributedDataParallel(One())
    state = register(ddp, Compression("none", min_elements=0, feedback=True, warm_up=0))
    assert state.feedback is not None
    state.feedback.add("weight", torch.full((4,), amounts[dist.get_rank()]).numpy())
    return ddp, state


def delivered(ddp: DistributedDataParallel) -> float:
    """The average, to which this step adds nothing."""
    ddp(torch.zeros(4)).backward()
    gradient = ddp.module.weight.grad
    assert gradient is not None
    assert bool((gradient == gradient[0]).all())
    assert same_everywhere(iter([gradient]))
    return float(gradient[0])


def message(call: Any, *arguments: Any) -> str:
    with pytest.raises(gradwire.InvalidArgument) as raised:
        call(*arguments)
    return str(raised.value)


def load_states_of_others() -> tuple[str, str, float]:
    """Loads as a trainer does that saves on rank 0 only."""
    ddp, state = holds(1.0, 2.0, 3.0)
    saved = [state.state_dict()]
    dist.broadcast_object_list(saved)
    own = ""
    if dist.get_rank() > 0:
        own = message(state.load_state_dict, saved[0])
    wider = message(state.load_state_dict, {**saved[0], "world_size": 4})
    return own, wider, delivered(ddp)


def test_the_state_of_another_rank_is_refused() -> None:
    _, *others = ended = torch_ranks.run(3, load_states_of_others)
    for rank, (own, _, _) in enumerate(others, start=1):
        assert f"that of rank 0 of 3, and this is rank {rank} of 3" in own
        assert "gather_state_dict" in own
    for rank, (_, wider, average) in enumerate(ended):
        assert f"that of rank 0 of 4, and this is rank {rank} of 3" in wider
        assert average == 2.0  # nothing was changed


@torch_ranks.on_ranks(1)
def test_the_state_of_an_earlier_version_is_taken_with_a_warning() -> None:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda each: warnings.append(each.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    ddp, state = holds(2.0)
    old = {k: v for k, v in state.state_dict().items() if k not in ("rank", "world_size")}
    state.load_state_dict({**old, "version": 1})
    assert len(warnings) == 1
    assert "without its rank" in warnings[0]
    assert delivered(ddp) == 2.0


AMOUNTS = (800.0, 400.0, 1200.0, 800.0, 0.0, 1600.0)


def save_all(dst: int) -> bytes | None:
    _, state = holds(*AMOUNTS)
    gathered = gather_state_dict(state, dst)
    assert (gathered is None) == (dist.get_rank() != dst)
    file = io.BytesIO()
    torch.save(gathered, file)
    return file.getvalue()


def load_all(saved: bytes, src: int | None) -> tuple[float, int, int]:
    gathered = torch.load(io.BytesIO(saved), weights_only=True)
    ddp, state = holds(*[7.0] * 6)
    if src is None:
        state.load_state_dict(gathered)
    else:
        scatter_state_dict(state, gathered if dist.get_rank() == src else None, src)
    own = state.state_dict()
    return delivered(ddp), own["rank"], own["world_size"]


RESIZED = [(4, 2), (2, 4), (3, 2), (2, 3), (4, 1), (1, 2)]


@pytest.mark.parametrize(
    ("before", "after", "scatters"),
    some(
        [(*ranks, scatters) for ranks in RESIZED for scatters in (False, True)],
        lambda before, after, scatters: scatters == (before < after) and 4 not in (before, after),
    ),
)
def test_residuals_weigh_the_same_on_another_number_of_ranks(
    before: int, after: int, scatters: bool
) -> None:
    saved = torch_ranks.run(before, save_all, before - 1)[before - 1]
    expected = sum(AMOUNTS[:before]) / before
    ended = torch_ranks.run(after, load_all, saved, after - 1 if scatters else None)
    for rank, (average, its, size) in enumerate(ended):
        assert average == pytest.approx(expected, rel=1e-6)
        assert (its, size) == (rank, after)


def train(steps: range, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()


def start() -> tuple[DistributedDataParallel, torch.optim.Optimizer, State]:
    ddp, _ = wrapped(Tower(len(CODECS)), **SMALL_BUCKETS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return (
        ddp,
        optimizer,
        register(
            ddp,
            Compression("none", rules=Tower.rules(CODECS), min_elements=0, feedback=True),
            momentum=0.9,
        ),
    )


@torch_ranks.on_ranks(2)
def test_what_was_gathered_goes_back_bit_for_bit() -> None:
    ddp, optimizer, state = start()
    train(range(4), ddp, optimizer)
    weights = {name: each.clone() for name, each in ddp.module.state_dict().items()}
    gathered = gather_state_dict(state)
    train(range(4, 7), ddp, optimizer)
    found = []
    for loads in (True, False):
        again, optimizer, its = start()
        again.module.load_state_dict(weights)
        if loads:
            saved = [gathered]
            dist.broadcast_object_list(saved)
            its.load_state_dict(saved[0])
        else:
            scatter_state_dict(its, gathered)
        train(range(4, 7), again, optimizer)
        assert its.steps == state.steps
        pairs = zip(ddp.parameters(), again.parameters(), strict=True)
        found.append(all(one.equal(other) for one, other in pairs))
    assert found == [True, True]


def train_on_others() -> bytes:
    ddp, optimizer, state = start()
    train(range(4), ddp, optimizer)
    file = io.BytesIO()
    torch.save(gather_state_dict(state), file)
    return file.getvalue()


def go_on_with_all(saved: bytes) -> tuple[bool, float, float]:
    """Sums over ranks of residuals and velocities, by what they weigh in an average."""
    gathered = torch.load(io.BytesIO(saved), weights_only=True)
    ddp, optimizer, state = start()
    state.load_state_dict(gathered)
    ranks, before, worst = dist.get_world_size(), len(gathered["ranks"]), [0.0, 0.0]
    own = state.state_dict()
    for name, _ in ddp.module.named_parameters():
        for i, of in enumerate((residual_of, velocity_of)):
            mean = of(own, name) / ranks
            dist.all_reduce(mean)
            expected = sum(of(each, name) for each in gathered["ranks"]) / before
            worst[i] = max(worst[i], float((mean - expected).abs().max()))
    train(range(4, 7), ddp, optimizer)
    return same_everywhere(ddp.parameters()), *worst


def residual_of(saved: dict[str, Any], name: str) -> torch.Tensor:
    kept: torch.Tensor = saved["feedback"][name]["residual"]
    return kept.double()


def velocity_of(saved: dict[str, Any], name: str) -> torch.Tensor:
    kept: torch.Tensor = saved["velocities"][name]
    return kept.double()


@pytest.mark.parametrize("ranks", [2, *nightly(4)])
def test_training_goes_on_with_all_codecs_on_another_number_of_ranks(ranks: int) -> None:
    saved = torch_ranks.run(3, train_on_others)[0]
    for same, residuals, velocities in torch_ranks.run(ranks, go_on_with_all, saved):
        assert same
        assert residuals < 1e-6
        assert velocities < 1e-6


def shrink_to_half(how: str) -> float | None:
    """Ranks 2 and 3 leave; each survivor takes over what one of them had held back."""
    _, state = holds(*[800.0] * 4)
    saved: list[Any] = [None] * 4
    dist.all_gather_object(saved, state.state_dict())
    survivors = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank > 1:
        return None
    kept: Any = state.feedback if how == "the same feedback" else True
    ddp = DistributedDataParallel(One(), process_group=survivors)
    state.close()
    again = register(ddp, Compression("none", min_elements=0, feedback=kept, warm_up=0))
    if how == "loaded":
        again.load_state_dict(saved[rank], resized=True)
    if how == "added":
        again.add_residuals(saved[rank])
    again.add_residuals(saved[rank + 2])
    ddp(torch.zeros(4)).backward()
    return float(ddp.module.weight.grad[0])


@pytest.mark.parametrize("how", ["the same feedback", "loaded", "added"])
def test_of_half_as_many_ranks_residuals_weigh_no_more(how: str) -> None:
    assert torch_ranks.run(4, shrink_to_half, how)[:2] == [800.0, 800.0]


@torch_ranks.on_ranks(2)
def test_what_is_not_all_states_is_refused_on_all_ranks() -> None:
    ddp, state = holds(1.0, 2.0)
    gathered = gather_state_dict(state)
    own = state.state_dict()
    wrong: list[Any] = [None, own]
    if gathered is not None:
        one, other = gathered["ranks"]
        wrong += [{**gathered, "ranks": each} for each in ([], [one], [other, one])]
        wrong += [{**gathered, "ranks": [one, {**other, "steps": 3}]}]
        longer = {"weight": {**other["feedback"]["weight"], "residual": torch.zeros(5)}}
        wrong += [{**gathered, "ranks": [one, {**other, "feedback": longer}]}]
    else:
        wrong += [None] * 5
    assert "give what state.state_dict()" in message(state.load_state_dict, None)
    found = [message(scatter_state_dict, state, each) for each in wrong]
    assert delivered(ddp) == 1.5  # nothing was changed, and ranks are in step
    expected = ["no states of all ranks"] * 2 + ["those of all ranks, in order"] * 3
    expected += ["of different steps, 0, 3", "5 elements of 'weight', another's has 4"]
    for text, words in zip(found, expected, strict=True):
        assert words in text


@torch_ranks.on_ranks(2)
def test_states_that_are_not_whole_are_refused_on_all_ranks() -> None:
    _, state = holds(1.0, 2.0)
    whole = gather_state_dict(state)
    found = []
    for broken in ([3, 4], [{**each, "feedback": None} for each in whole["ranks"]] if whole else 0):
        found.append(message(scatter_state_dict, state, {"ranks": broken}))
    assert all("the states are not whole" in text for text in found), found


@torch_ranks.on_ranks(2)
def test_all_states_of_another_model_are_refused() -> None:
    _, state = holds(1.0, 2.0)
    gathered = gather_state_dict(state)
    other = register(DistributedDataParallel(mlp()), Compression("none", feedback=True))
    assert "a residual of 'weight', the model no parameter" in message(
        scatter_state_dict, other, gathered
    )
