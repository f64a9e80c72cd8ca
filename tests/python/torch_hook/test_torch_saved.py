"""The hook's state in a checkpoint: resumed training, and the residuals of ranks that left."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, Stages, State, register
from ranks import nightly
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    CODECS,
    LOSSY,
    SMALL_BUCKETS,
    Books,
    Tower,
    backward,
    flat,
    mlp,
    with_each,
    wrapped,
)

RESUMED = [*CODECS, "int8:rounding=stochastic"]
PLAIN = ["none"] * 8
ROUNDING = 16.0  # units in the last place of all that was added up

SETTINGS: dict[str, dict[str, Any]] = {
    "default": SMALL_BUCKETS,
    "bucket views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {**SMALL_BUCKETS, "static_graph": True},
    "unused": {**SMALL_BUCKETS, "find_unused_parameters": True},
}


class Training(NamedTuple):
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: State
    scaler: torch.amp.GradScaler | None = None


def start(
    setting: dict[str, Any], *codecs: str, follows: bool = False, dtype: str = "float32"
) -> Training:
    """Registers with an algorithm whose folds depend on where in a bucket an element lies.

    The hook `follows` a scale that doubles and a learning rate that falls after every step, or
    every other one, and has the momentum.
    """
    ddp, _ = wrapped(Tower(len(codecs)), **setting)
    momentum = 0.0 if follows else 0.9
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=momentum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1) if follows else None
    hook: dict[str, Any] = {}
    if follows:
        hook = {"scaler": scaler, "optimizer": optimizer, "momentum": 0.9}
    feedback = gradwire.ErrorFeedback(dtype)
    compression = Compression("none", rules=Tower.rules(codecs), min_elements=0, feedback=feedback)
    state = register(ddp, compression, algorithm="ring", **hook)
    return Training(ddp, optimizer, state, scaler)


def run(training: Training, steps: range) -> None:
    ddp, optimizer, _, scaler = training
    for step in steps:
        optimizer.zero_grad()
        backward(ddp, step, scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.param_groups[0]["lr"] = 0.1 * 0.7 ** ((step + 1) // 2)


def save(training: Training) -> bytes:
    file = io.BytesIO()
    torch.save([each.state_dict() for each in training_parts(training)], file)
    return file.getvalue()


def load(training: Training, saved: bytes, **changed: Any) -> None:
    state, *others = torch.load(io.BytesIO(saved), weights_only=True)
    own, *parts = training_parts(training)
    own.load_state_dict({**state, **changed})
    for part, its in zip(parts, others, strict=True):
        part.load_state_dict(its)


def training_parts(training: Training) -> list[Any]:
    """Parts of a training that have a state_dict()."""
    parts = (training.state, training.ddp.module, training.optimizer, training.scaler)
    return [each for each in parts if each is not None]


SAVED = (1, 2, 3, 7)  # before DDP rebuilds its buckets, while it may, and after that
END = 9


def kept_alike(one: Training, other: Training) -> list[str]:
    """The parameters of which both have the same bits, with equal states of their hooks."""
    assert one.state.steps == other.state.steps
    own, its = (each.state.state_dict() for each in (one, other))
    kept, its_kept = own["feedback"], its["feedback"]
    velocities, its_velocities = own["velocities"], its["velocities"]
    values = dict(other.ddp.module.named_parameters())
    return [
        name
        for name, value in one.ddp.module.named_parameters()
        if value.equal(values[name])
        and all(_same(kept[name][what], its_kept[name][what]) for what in kept[name])
        and _same(velocities.get(name), its_velocities.get(name))
    ]


def _same(one: Any, other: Any) -> bool:
    return one.equal(other) if isinstance(one, torch.Tensor) else one == other


def interrupted(
    setting: dict[str, Any],
    codecs: Sequence[str],
    follows: bool = False,
    dtype: str = "float32",
    **changed: Any,
) -> list[list[str]]:
    """The parts with the bits of an uninterrupted run in runs with a break after so many steps."""
    whole, saved = start(setting, *codecs, follows=follows, dtype=dtype), {}
    for step in range(END):
        if step in SAVED:
            saved[step] = save(whole)
        run(whole, range(step, step + 1))
    found = []
    for step, state in saved.items():
        again = start(setting, *codecs, follows=follows, dtype=dtype)
        load(again, state, **changed)
        run(again, range(step, END))
        found.append(kept_alike(whole, again))
    return found


@pytest.mark.parametrize(
    ("setting", "follows", "dtype"),
    [
        ("default", False, "float32"),
        ("bucket views", True, "float32"),
        ("static graph", False, "float32"),
        ("unused", True, "float32"),
        ("default", True, "bfloat16"),
    ],
)
def test_resumed_training_has_the_bits_of_uninterrupted_training(
    setting: str, follows: bool, dtype: str
) -> None:
    """The scale may have just doubled and the learning rate changed."""
    names = [name for name, _ in Tower(len(RESUMED)).named_parameters()]
    for found in torch_ranks.run(3, interrupted, SETTINGS[setting], RESUMED, follows, dtype):
        assert found == [names] * len(SAVED)


@torch_ranks.on_ranks(3)
def test_without_the_layout_resumed_training_rounds_differently() -> None:
    """A state saved before there is a layout does not."""
    *early, late = interrupted(SETTINGS["default"], PLAIN, layout=())
    assert all(len(each) == 34 for each in early)
    assert len(late) < 17


def in_jobs(starts: Sequence[int], setting: dict[str, Any]) -> tuple[bool, int]:
    """Whether jobs that begin at these steps end with the bits of one; and how many warn."""
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = warnings.append  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    whole = start(setting, *CODECS)
    run(whole, range(END))
    saved = None
    for first, end in zip(starts, [*starts[1:], END], strict=True):
        job = start(setting, *CODECS)
        if saved is not None:
            load(job, saved)
        run(job, range(first, end))
        saved = save(job)
    return flat(whole.ddp).equal(flat(job.ddp)), len(warnings)


@pytest.mark.parametrize("setting", ["default", "static graph"])
@pytest.mark.parametrize("starts", [(0, 3, 4, 5, 6), (0, 1, 4, 7)])
def test_training_may_be_interrupted_more_than_once(setting: str, starts: list[int]) -> None:
    assert torch_ranks.run(3, in_jobs, starts, SETTINGS[setting]) == [(True, 0)] * 3


@pytest.mark.parametrize(
    ("setting", "starts"), [("default", (0, 1, 2, 3, 4)), ("static graph", (0, 1, 3, 7))]
)
def test_a_warning_says_that_nobody_knew_the_buckets(setting: str, starts: list[int]) -> None:
    """No job lives to see DDP rebuild them before they are followed."""
    assert torch_ranks.run(3, in_jobs, starts, SETTINGS[setting]) == [(False, 1)] * 3


@torch_ranks.on_ranks(2)
def test_a_state_with_other_buckets_is_followed_until_ddp_has_its_own() -> None:
    first = start(SMALL_BUCKETS, *PLAIN)
    run(first, range(3))
    saved = save(first)
    ddp, _, state, _ = again = start({}, *PLAIN)
    load(again, saved)
    counts = []
    for step in range(3, 7):
        run(again, range(step, step + 1))
        counts.append(len(state.state_dict()["layout"]))
    run(first, range(3, 7))
    assert counts == [3, 1, 1, 1]
    assert torch.allclose(flat(ddp), flat(first.ddp), atol=1e-6)


def leave(codec: str, how: str) -> float:
    """Lets rank 2 leave after three steps; rank 0 takes over its residuals.

    The scale doubles at every step, and the learning rate changes as it leaves.
    """
    module = mlp()
    books = Books(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    hook: dict[str, Any] = {"scaler": scaler, "optimizer": optimizer}
    ddp = DistributedDataParallel(module, **SMALL_BUCKETS)
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0), **hook)

    def train(ranks: int) -> None:
        # An average over fewer ranks counts a gradient for more.
        books.unit = optimizer.param_groups[0]["lr"] / scaler.get_scale() / ranks
        backward(ddp, state.steps, scaler)
        books.note(ranks)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(3):
        train(3)
    saved: list[Any] = [None]
    if dist.get_rank() == 2:
        saved = [at_another_scale(state.state_dict())]
    dist.broadcast_object_list(saved, src=2)
    survivors = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        optimizer.param_groups[0]["lr"] = 0.03
        before = state
        ddp = DistributedDataParallel(module, process_group=survivors, **SMALL_BUCKETS)
        goes_on = before.feedback if how == "the same feedback" else True
        state = register(
            ddp, Compression(codec, min_elements=0, feedback=goes_on, warm_up=0), **hook
        )
        if how == "a state loaded":
            state.load_state_dict(before.state_dict(), resized=True)
        if how == "residuals added":
            state.add_residuals(before.state_dict())
        if dist.get_rank() == 0:
            state.add_residuals(saved[0])
        for _ in range(3):
            train(2)
    units = [books.unit]
    dist.broadcast_object_list(units)
    books.unit = units[0]
    return books.missing(state.feedback if dist.get_rank() < 2 else None)


def at_another_scale(saved: dict[str, Any]) -> dict[str, Any]:
    """The same, had it been saved at half the scale and twice the learning rate."""
    for kept in saved["feedback"].values():
        kept["residual"] /= 4
    rates = [2 * each for each in saved["learning_rates"]]
    return {**saved, "loss_scale": saved["loss_scale"] / 2, "learning_rates": rates}


@pytest.mark.parametrize(
    "how", ["a state loaded", *nightly("the same feedback", "residuals added")]
)
def test_what_a_rank_that_leaves_held_back_goes_to_a_survivor(how: str) -> None:
    for by_codec in torch_ranks.run(3, with_each, LOSSY, leave, how)[:2]:  # who survive
        for codec, missing in by_codec.items():
            assert missing < ROUNDING, codec


def refusals() -> list[str]:
    ddp, _ = wrapped(mlp())
    state = register(ddp, Compression("fp16", feedback=True))
    backward(ddp, 0)
    saved = state.state_dict()
    bare = register(DistributedDataParallel(mlp()), "fp16")
    wider = register(
        DistributedDataParallel(nn.Sequential(nn.Linear(21, 100))),
        Compression("none", feedback=True),
    )
    shorter = register(
        DistributedDataParallel(nn.Sequential(nn.Linear(20, 100))),
        Compression("none", feedback=True),
    )
    messages = []
    for other, what in ((bare, saved), (wider, saved), (shorter, saved), (state, {"steps": 1})):
        for method in (other.load_state_dict, other.add_residuals):
            with pytest.raises(gradwire.InvalidArgument) as raised:
                method(what)
            messages.append(str(raised.value))
    return messages


def test_the_state_of_something_else_is_refused() -> None:
    expected = (
        "keeps none: register it with feedback=True",
        "'0.weight' has 2000 elements, the model's parameter 2100",
        "a residual of '2.bias', the model no parameter",
        "give what state.state_dict",
    )
    for messages in torch_ranks.run(2, refusals):
        for message, words in zip(messages, (each for each in expected for _ in "12"), strict=True):
            assert words in message


def refused_velocities() -> list[str]:
    """None of which changes anything."""
    ddp, _ = wrapped(mlp())
    state = register(ddp, momentum=0.9)
    backward(ddp, 0)
    saved = state.state_dict()
    bare = register(DistributedDataParallel(mlp()))
    own = {"0.weight": torch.ones(100, 20)}
    cases = [
        (bare, own),
        (state, {"0.weight": torch.ones(20, 100)}),
        (state, {"0.weight": torch.ones(100, 20).half()}),
        (state, {"1.weight": torch.ones(100, 20)}),
    ]
    messages = []
    for other, velocities in cases:
        with pytest.raises(gradwire.InvalidArgument) as raised:
            other.load_state_dict({**saved, "velocities": velocities})
        messages.append(str(raised.value))
    now = state.state_dict()["velocities"]
    assert all(now[name].equal(each) for name, each in saved["velocities"].items())
    return messages


def test_velocities_of_something_else_are_refused() -> None:
    expected = (
        "keeps none: register it with momentum=",
        "'0.weight' is torch.float32 of shape (20, 100), the model's parameter torch.float32 of "
        "(100, 20)",
        "'0.weight' is torch.float16 of shape (100, 20)",
        "a velocity of '1.weight', the model no parameter",
    )
    for message, words in zip(torch_ranks.run(1, refused_velocities)[0], expected, strict=True):
        assert words in message


@torch_ranks.on_ranks(2)
def test_a_schedule_goes_on_where_it_was() -> None:
    """The codec changes in step 4, one of the resumed ones."""
    stages = Stages((0, "none"), (4, LOSSY[0]))

    def begin() -> Training:
        ddp, _ = wrapped(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        return Training(ddp, optimizer, register(ddp, stages))

    first = begin()
    run(first, range(3))
    again = begin()
    load(again, save(first))
    kept = []
    for step in range(3, 6):
        run(again, range(step, step + 1))
        kept.append(bool(again.state.feedback.residual("2.weight").any()))
    assert again.state.steps == 6
    assert kept == [False, True, True]
