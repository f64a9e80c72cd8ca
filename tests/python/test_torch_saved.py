"""The hook's state in a checkpoint: resumed training, and the residuals of ranks that left."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Stages, State, register
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

Training = tuple[DistributedDataParallel, torch.optim.Optimizer, State]


def start(setting: dict[str, Any], *codecs: str) -> Training:
    """With an algorithm whose folds depend on where in a bucket an element lies."""
    ddp, _ = wrapped(Tower(len(codecs)), **setting)
    rules = Tower.rules(codecs)
    state = register(ddp, algorithm="ring", feedback=True, rules=rules, min_elements=0)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), state


def run(training: Training, steps: range) -> None:
    ddp, optimizer, _ = training
    for step in steps:
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()


def save(training: Training) -> bytes:
    ddp, optimizer, state = training
    file = io.BytesIO()
    parts = (ddp.module.state_dict(), optimizer.state_dict(), state.state_dict())
    torch.save(parts, file)
    return file.getvalue()


def load(training: Training, saved: bytes, **changed: Any) -> None:
    ddp, optimizer, state = training
    parts = torch.load(io.BytesIO(saved), weights_only=True)
    ddp.module.load_state_dict(parts[0])
    optimizer.load_state_dict(parts[1])
    state.load_state_dict({**parts[2], **changed})


SAVED = (1, 2, 3, 7)  # before DDP rebuilds its buckets, while it may, and after that
END = 9


def kept_alike(one: Training, other: Training) -> list[str]:
    """Of which parameters both have the same bits, and their hooks keep the same."""
    (first, _, hook), (second, _, its_hook) = one, other
    assert hook.steps == its_hook.steps
    own, its = (each.state_dict()["feedback"] for each in (hook, its_hook))
    values = dict(second.module.named_parameters())
    return [
        name
        for name, value in first.module.named_parameters()
        if value.equal(values[name])
        and all(_same(own[name][what], its[name][what]) for what in own[name])
    ]


def _same(one: Any, other: Any) -> bool:
    return one.equal(other) if isinstance(one, torch.Tensor) else one == other


def interrupted(setting: dict[str, Any], codecs: Sequence[str], **changed: Any) -> list[list[str]]:
    """What has the bits of an uninterrupted run in those with a break after so many steps."""
    whole, saved = start(setting, *codecs), {}
    for step in range(END):
        if step in SAVED:
            saved[step] = save(whole)
        run(whole, range(step, step + 1))
    found = []
    for step, state in saved.items():
        again = start(setting, *codecs)
        load(again, state, **changed)
        run(again, range(step, END))
        found.append(kept_alike(whole, again))
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_resumed_training_has_the_bits_of_uninterrupted_training(setting: str) -> None:
    names = [name for name, _ in Tower(len(RESUMED)).named_parameters()]
    for found in torch_ranks.run(3, interrupted, SETTINGS[setting], RESUMED):
        assert found == [names] * len(SAVED)


def test_without_the_layout_resumed_training_rounds_differently() -> None:
    """Unless it was saved before there is one."""
    for *early, late in torch_ranks.run(3, without_layout):
        assert all(len(each) == 34 for each in early)
        assert len(late) < 17


def without_layout() -> list[list[str]]:
    return interrupted(SETTINGS["default"], PLAIN, layout=())


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
    return flat(whole[0]).equal(flat(job[0])), len(warnings)


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


def other_buckets() -> tuple[list[int], bool]:
    """Goes on with buckets of another size than the saved ones."""
    first = start(SMALL_BUCKETS, *PLAIN)
    run(first, range(3))
    saved = save(first)
    ddp, _, state = again = start({}, *PLAIN)
    load(again, saved)
    counts = []
    for step in range(3, 7):
        run(again, range(step, step + 1))
        counts.append(len(state.state_dict()["layout"]))
    run(first, range(3, 7))
    return counts, torch.allclose(flat(ddp), flat(first[0]), atol=1e-6)


def test_a_state_with_other_buckets_is_followed_until_ddp_has_its_own() -> None:
    for counts, close in torch_ranks.run(2, other_buckets):
        assert counts == [3, 1, 1, 1]
        assert close


def leave(codec: str) -> float:
    """After three steps rank 2 leaves, and rank 0 takes over what it had held back."""
    module = mlp()
    books = Books(module)
    ddp = DistributedDataParallel(module, **SMALL_BUCKETS)
    state = register(ddp, codec=codec, feedback=True, min_elements=0)
    for step in range(3):
        backward(ddp, step)
        books.deliver()
    saved: list[Any] = [None]
    if dist.get_rank() == 2:
        saved = [state.state_dict()]
    dist.broadcast_object_list(saved, src=2)
    survivors = dist.new_group([0, 1])
    feedback = None
    if dist.get_rank() < 2:
        ddp = DistributedDataParallel(module, process_group=survivors, **SMALL_BUCKETS)
        again = register(ddp, codec=codec, feedback=state.feedback, min_elements=0)
        if dist.get_rank() == 0:
            again.add_residuals(saved[0])
        for step in range(3, 6):
            backward(ddp, step)
            books.deliver(ranks=2)
        feedback = again.feedback
    return books.missing(feedback)


def test_what_a_rank_that_leaves_held_back_goes_to_a_survivor() -> None:
    for found in torch_ranks.run(3, with_each, LOSSY, leave)[:2]:  # by the survivors' books
        assert max(found.values()) < ROUNDING, found


def refusals() -> list[str]:
    ddp, _ = wrapped(mlp())
    state = register(ddp, codec="fp16", feedback=True)
    backward(ddp, 0)
    saved = state.state_dict()
    bare = register(DistributedDataParallel(mlp()), codec="fp16")
    wider = register(DistributedDataParallel(nn.Sequential(nn.Linear(21, 100))), feedback=True)
    shorter = register(DistributedDataParallel(nn.Sequential(nn.Linear(20, 100))), feedback=True)
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


def resume_a_schedule() -> tuple[int, list[bool]]:
    """The codec changes in step 4, one of the resumed ones."""
    stages = Stages((0, "none"), (4, LOSSY[0]))

    def begin() -> Training:
        ddp, _ = wrapped(mlp())
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), register(ddp, codec=stages)

    first = begin()
    run(first, range(3))
    again = begin()
    load(again, save(first))
    kept = []
    for step in range(3, 6):
        run(again, range(step, step + 1))
        kept.append(bool(again[2].feedback.residual("2.weight").any()))
    return again[2].steps, kept


def test_a_schedule_goes_on_where_it_was() -> None:
    assert torch_ranks.run(2, resume_a_schedule) == [(6, [False, True, True])] * 2
