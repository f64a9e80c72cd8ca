"""Residuals by parameter: nothing is lost, whatever DDP does with its buckets."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.codec import Codec
from gradwire.torch import Compression, Stages, State, register
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    ASKED,
    CODECS,
    IGNORED,
    LOSSY,
    SMALL_BUCKETS,
    Branches,
    Tower,
    backward,
    batch,
    mlp,
    same_everywhere,
    with_each,
    wrapped,
)
from trainer_options import grouped

ROUNDING = 16.0  # units in the last place of all that was added up

SETTINGS: dict[str, dict[str, Any]] = {
    "default": SMALL_BUCKETS,  # one bucket in the first step, several in other order from then on
    "bucket views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {**SMALL_BUCKETS, "static_graph": True},  # rebuilt a step later
    "unused": {**SMALL_BUCKETS, "find_unused_parameters": True},  # never rebuilt
}


def train(setting: dict[str, Any], codecs: Sequence[str | Codec]) -> tuple[float, bool, int]:
    """Trains until DDP's own buckets have been followed for two steps."""
    ddp, books = wrapped(Tower(len(codecs)), **setting)
    state = register(
        ddp,
        Compression("none", rules=Tower.rules(codecs), min_elements=0, feedback=True, warm_up=0),
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        backward(ddp, step)
        optimizer.step()
        books.deliver()
    assert state.feedback is not None
    return books.missing(state.feedback), same_everywhere(ddp.parameters()), state.buckets


def train_in_all_settings(codecs: Sequence[str | Codec]) -> dict[str, tuple[float, bool, int]]:
    return {name: train(setting, codecs) for name, setting in SETTINGS.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_when_buckets_are_rebuilt(ranks: int) -> None:
    for found in torch_ranks.run(ranks, train_in_all_settings, CODECS):
        for setting, (missing, same, buckets) in found.items():
            assert missing < ROUNDING, setting
            assert same, setting
            assert buckets > 6, setting


@dataclass  # and so without a hash
class Coarse(Codec):
    """Thousandths, or other parts."""

    parts: int = 1000

    def encode(self, x: NDArray[np.float32]) -> NDArray[np.int32]:
        return np.rint(x * self.parts).astype(np.int32)

    def decode(self, payload: memoryview, count: int) -> NDArray[np.float32]:
        return np.frombuffer(payload, np.int32).astype(np.float32) / np.float32(self.parts)


def test_nothing_is_lost_with_a_codec_written_in_python() -> None:
    for found in torch_ranks.run(2, train_in_all_settings, [Coarse(), Coarse(500)] * 2):
        for setting, (missing, same, _) in found.items():
            assert missing < ROUNDING, setting
            assert same, setting


def gradients(setting: dict[str, Any], codec: str) -> list[torch.Tensor]:
    """The gradients of each step."""
    ddp, _ = wrapped(mlp(), **setting)
    register(ddp, Compression(codec, min_elements=0, warm_up=0))
    found = []
    for step in range(5):
        ddp.zero_grad()
        backward(ddp, step)
        found.append(torch.cat([each.grad.flatten() for each in ddp.parameters()]))
    return found


def same_in_all_settings(codec: str) -> dict[str, list[bool]]:
    """The bits of each step, as with one bucket that is never rebuilt."""
    expected = gradients({"bucket_cap_mb": 25}, codec)
    return {
        name: list(map(torch.equal, gradients(setting, codec), expected))
        for name, setting in SETTINGS.items()
    }


def test_what_codecs_remember_survives_a_rebuild() -> None:
    """Ranks of two send bytes that depend on that alone: factors of lowrank, tau, a filter."""
    codecs = [each for each in LOSSY if each.startswith(("threshold", "topk", "lowrank"))]
    expected = dict.fromkeys(codecs, dict.fromkeys(SETTINGS, [True] * 5))
    assert torch_ranks.run(2, with_each, codecs, same_in_all_settings) == [expected] * 2


@torch_ranks.on_ranks(2)
def test_keys_are_the_parameters_names() -> None:
    ddp, _ = wrapped(mlp())
    state = register(ddp, Compression(LOSSY[0], min_elements=0, feedback=True, warm_up=0))
    backward(ddp, 0)
    assert state.feedback is not None
    expected = {name: each.numel() for name, each in mlp().named_parameters()}
    assert state.feedback.keys() == expected


def accumulate(codec: str, views: bool) -> float:
    """Averages two pairs of four batches together."""
    ddp, books = wrapped(mlp(), **SMALL_BUCKETS, gradient_as_bucket_view=views)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    for step in range(6):
        with contextlib.nullcontext() if step % 2 else ddp.no_sync():
            backward(ddp, step)
        if step % 2:
            books.deliver()
    assert state.steps == 3
    return books.missing(state.feedback)


@pytest.mark.parametrize("views", [False, True])
def test_nothing_is_lost_with_no_sync(views: bool) -> None:
    for found in torch_ranks.run(2, with_each, CODECS, accumulate, views):
        assert max(found.values()) < ROUNDING, found


def use_branches(codec: str) -> float:
    ddp, books = wrapped(Branches(), find_unused_parameters=True)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    for step, asked in enumerate(ASKED):
        x, y = batch(step)
        mse_loss(ddp(x, asked[dist.get_rank()]), y).backward()
        unused = {name for name, each in ddp.module.named_parameters() if each.grad is None}
        assert unused == IGNORED[step]
        books.deliver()
    return books.missing(state.feedback)


def use_branches_unevenly(codec: str) -> float:
    """Rank 0 has two batches less."""
    ddp, books = wrapped(Branches(), find_unused_parameters=True)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    with ddp.join():
        for step in range(3 + 2 * dist.get_rank()):
            x, y = batch(step)
            mse_loss(ddp(x, ASKED[step][dist.get_rank()]), y).backward()
            books.deliver()
    assert state.steps == 5
    return books.missing(state.feedback)


def use_branches_both_ways(codec: str) -> tuple[float, float]:
    return use_branches(codec), use_branches_unevenly(codec)


def test_nothing_is_lost_with_parameters_that_some_ranks_or_all_do_not_use() -> None:
    every = torch_ranks.run(2, with_each, CODECS, use_branches_both_ways)
    for found in every:
        assert max(evenly for evenly, _ in found.values()) < ROUNDING, found
    # By the books of the rank that trains longest.
    assert max(unevenly for _, unevenly in every[1].values()) < ROUNDING, every[1]


def accumulate_branches(codec: str) -> float:
    """Some are used only in the backward that is not averaged on its own."""
    ddp, books = wrapped(Branches(), find_unused_parameters=True)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    for step, (alone, averaged) in enumerate([([0], [0, 1, 2]), ([2], [0]), ([0], [1])]):
        x, y = batch(step)
        with ddp.no_sync():
            mse_loss(ddp(x, alone), y).backward()
        mse_loss(ddp(x, averaged), y).backward()
        books.deliver()
    return books.missing(state.feedback)


def test_nothing_is_lost_with_no_sync_and_parameters_that_are_not_used() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, accumulate_branches):
        assert max(found.values()) < ROUNDING, found


@pytest.mark.parametrize("by_all", [True, False])
@torch_ranks.on_ranks(3)
def test_nothing_is_lost_with_uneven_inputs(by_all: bool) -> None:
    """Rank r has 3 + 2 r batches; who has no more takes part with zeros.

    Nor does it hear from then on how scale and learning rate change.
    """
    ddp, books = wrapped(Tower(len(CODECS)), **SMALL_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    rules, follow = Tower.rules(CODECS), {"scaler": scaler, "optimizer": optimizer}
    state = register(
        ddp, Compression("none", rules=rules, min_elements=0, feedback=True, warm_up=0), **follow
    )
    ranks = dist.get_world_size()
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (step // 3)
            books.unit = 0.5 ** (step // 3) / scaler.get_scale()
            backward(ddp, step, scaler)
            active = sum(step < 3 + 2 * rank for rank in range(ranks))
            books.note(ranks if by_all else active)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    units = [books.unit]
    dist.broadcast_object_list(units, src=2)  # who trains longest
    books.unit = units[0]
    every = torch_ranks.gathered((books.missing(state.feedback), state.steps))
    assert every[2][0] < ROUNDING  # by the books of the rank that trains longest
    assert [steps for _, steps in every] == [7] * 3


def interrupt(_: torch.Tensor) -> None:
    raise RuntimeError("enough")


@torch_ranks.on_ranks(2)
def test_nothing_is_lost_when_buckets_change_later() -> None:
    module = Tower(len(CODECS))
    _, books = wrapped(module)
    feedback = gradwire.ErrorFeedback()
    rules = Tower.rules(CODECS)
    sizes = {0: 0.01, 5: 0.001, 7: 25.0}
    for step in range(9):
        if step in sizes:
            ddp = DistributedDataParallel(module, bucket_cap_mb=sizes[step])
            state = register(
                ddp, Compression("none", rules=rules, min_elements=0, feedback=feedback, warm_up=0)
            )
        backward(ddp, step)
        books.deliver()
        if step + 1 in sizes:
            forget = books.mark()
            handle = next(ddp.parameters()).register_hook(interrupt)
            with pytest.raises(RuntimeError, match="enough"):
                backward(ddp, step)
            dist.barrier()  # a rank that closes first would end another one's backward
            state.close()
            handle.remove()
            forget()
            ddp.zero_grad()
    assert books.missing(feedback) < ROUNDING


def freeze(codec: str) -> tuple[float, bool]:
    """A layer is frozen and thawed; DDP must be made anew for each, the residuals go on."""
    module = mlp()
    _, books = wrapped(module)
    feedback = None
    for step, trainable in enumerate([True, True, False, False, True, True]):
        module[2].requires_grad_(trainable)
        if step % 2 == 0:
            ddp, _ = wrapped(module, **SMALL_BUCKETS)
            state = register(
                ddp, Compression(codec, min_elements=0, feedback=feedback or True, warm_up=0)
            )
            feedback = state.feedback
        backward(ddp, step)
        books.deliver()
    assert feedback is not None
    return books.missing(feedback), feedback.residual("2.weight").size > 0


def test_nothing_is_lost_when_parameters_are_frozen_and_thawed() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, freeze):
        for codec, (missing, kept) in found.items():
            assert missing < ROUNDING, codec
            assert kept, codec


def switch(codec: str) -> tuple[float, list[float]]:
    ddp, books = wrapped(mlp(), **SMALL_BUCKETS)
    stages = Stages((0, "none"), (2, codec), (4, "none"))
    state = register(ddp, Compression(stages, min_elements=0, warm_up=0))
    norms = []
    for step in range(6):
        backward(ddp, step)
        books.deliver()
        norms.append(sum(each.residual_norm for each in state.stats().codecs.values()))
    return books.missing(state.feedback), norms


def test_nothing_is_lost_when_the_codec_changes() -> None:
    for found in torch_ranks.run(2, with_each, LOSSY, switch):
        for codec, (missing, norms) in found.items():
            assert missing < ROUNDING, codec
            assert norms[0] == norms[1] == norms[4] == norms[5] == 0  # none delivers what was kept
            assert min(norms[2:4]) > 0, codec


class Mixed(nn.Module):
    """Layers of four types, tied weights, an empty parameter and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20).double()
        self.third, self.fourth = nn.Linear(20, 20).half(), nn.Linear(20, 20).bfloat16()
        self.tied = nn.Linear(20, 10)
        self.also_tied = self.tied
        self.nothing, self.number = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).double())
        x = self.fourth(self.third(x.half()).bfloat16()).float()
        return self.also_tied(x) + self.tied(x) * self.number + self.nothing.sum()


def train_mixed(hook: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Float16 has the average of one layer's gradients, and not their sum."""
    ddp, books = wrapped(Mixed(), **SMALL_BUCKETS)
    ddp.module.third.weight.register_hook(lambda g: g + 40000)
    state = None if hook is None else register(ddp, **grouped(**hook))
    for step in range(3):
        ddp.zero_grad()
        backward(ddp, step)
        gradients = torch.cat([each.grad.double().flatten() for each in ddp.parameters()])
        books.only(torch.float32)
        books.deliver()
    return gradients, books.missing(state.feedback) if state else 0.0


def mixed_types(codec: str) -> tuple[bool, float, list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    plain, _ = train_mixed(None)
    assert plain.isfinite().all()
    hooked, missing = train_mixed(
        {"codec": codec, "feedback": True, "min_elements": 0, "warm_up": 0}
    )
    compressed = (torch.float32, torch.bfloat16, torch.float16)
    others = [each.dtype not in compressed for each in Mixed().parameters()]
    sizes = [each.numel() for each in Mixed().parameters()]
    chosen = torch.repeat_interleave(torch.tensor(others), torch.tensor(sizes))
    chosen = chosen | torch.tensor(codec == "none")
    logging.getLogger("gradwire").removeHandler(handler)
    return plain[chosen].equal(hooked[chosen]), missing, warnings


def test_several_types_in_one_model() -> None:
    """Float64 travels as it is: equal to plain DDP. Rank 0 says so where others do not."""
    words = "gradients of torch.float64 travel as they are"
    for rank, found in enumerate(torch_ranks.run(2, with_each, CODECS, mixed_types)):
        for codec, (equal, missing, warnings) in found.items():
            assert equal, codec
            assert missing < ROUNDING, codec
            told = [each for each in warnings if words in each]
            assert len(told) == (codec in LOSSY and rank == 0), codec


def kept_by(state: State) -> dict[str, list[torch.Tensor]]:
    """All that the next step depends on: residuals, what codecs adapt and remember, velocities."""
    saved: dict[str, Any] = state.state_dict()
    return {
        name: [torch.as_tensor(each) for each in (*kept.values(), saved["velocities"][name])]
        for name, kept in saved["feedback"].items()
    }


def break_off(how: str) -> tuple[str, list[str]]:
    """Fails in the sixth backward, when its first buckets may have been averaged already."""
    ddp, _ = wrapped(Tower(len(CODECS)), **SMALL_BUCKETS)
    rules = Tower.rules(CODECS)
    state = register(
        ddp,
        Compression("none", rules=rules, min_elements=0, feedback=True, warm_up=0),
        momentum=0.9,
    )
    for step in range(5):
        backward(ddp, step)
        ddp.zero_grad()
    before = kept_by(state)
    store = dist.distributed_c10d._get_default_store()
    if how == "wait":
        state.communicator._timeout = 2.0

    def fail(_: torch.Tensor) -> None:
        while state._steps.completions.pending:
            os.sched_yield()
        if how == "raise":
            raise RuntimeError("in backward")
        if dist.get_rank() == 1:
            if how == "die":
                torch_ranks.die()
            elif how == "abort":
                state.communicator.abort("enough")
            else:
                store.wait(["rank 0 has had enough"])

    next(ddp.parameters()).register_hook(fail)  # whose gradient comes last
    with pytest.raises((gradwire.Error, RuntimeError)) as raised:
        backward(ddp, 5)
    store.set("rank 0 has had enough", "yes")
    after = kept_by(state)
    assert state.steps == 5
    assert before.keys() == after.keys() == {name for name, _ in ddp.module.named_parameters()}
    moved = [
        name
        for name, kept in before.items()
        if not all(one.equal(other) for one, other in zip(kept, after[name], strict=True))
    ]
    return type(raised.value).__name__, moved


def test_a_rank_that_dies_in_backward_moves_no_residual() -> None:
    found = torch_ranks.run(3, break_off, "die", dying=(1,))
    assert [found[0], found[2]] == [("TransportError", [])] * 2


@pytest.mark.parametrize(
    ("how", "error"), [("abort", "Aborted"), ("raise", "RuntimeError"), ("wait", "Timeout")]
)
def test_a_backward_that_is_broken_off_moves_no_residual(how: str, error: str) -> None:
    assert torch_ranks.run(3, break_off, how) == [(error, [])] * 3
