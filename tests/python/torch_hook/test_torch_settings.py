"""Wrong arguments of register(): errors that say what to give; and copies of its model."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import torch
import torch_ranks
from gradwire.torch import Compression, Ranks, State, register
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.ddp.hook import comm_hook
from ranks import LIMIT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch_training import backward, flat, mlp, same_everywhere
from trainer_options import grouped

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no codec": ({"codec": None}, "codec=None: give a codec's name"),
    "codec class": ({"codec": gradwire.codec.LowRank}, "codec=LowRank is a class: give a codec's"),
    "momentum as a text": ({"momentum": "0.9"}, "momentum='0.9' is of type str"),
    "no momentum": ({"momentum": math.nan}, "momentum=nan is not from 0 to below 1"),
    "momentum of 1": ({"momentum": 1.0}, "momentum=1.0 is not from 0 to below 1"),
    "negative momentum": ({"momentum": -0.1}, "momentum=-0.1 is not from 0 to below 1"),
    "nesterov as a number": ({"nesterov": 1}, "nesterov=1 is of type int: give True or False"),
    "nesterov alone": ({"nesterov": True}, "nesterov=True needs a momentum="),
    "masking": ({"factor_masking": None}, "factor_masking=None: give True or False"),
    "optimizer class": ({"optimizer": torch.optim.SGD}, "optimizer=SGD is a class: give the opt"),
    "no optimizer": ({"optimizer": [1]}, "optimizer=[1] is of type list: give the optimizer"),
    "scaler class": ({"scaler": torch.amp.GradScaler}, "scaler=GradScaler is a class: give the"),
    "feedback class": ({"feedback": gradwire.ErrorFeedback}, "ErrorFeedback is a class: give"),
    "no rules": ({"rules": {}}, "rules={} is a mapping: give a list of pairs"),
    "rules by name": ({"rules": {"*.bias": "none"}}, "is a mapping: give a list of pairs"),
    "rules as text": ({"rules": "*.bias"}, "give a list of pairs"),
    "one rule": ({"rules": ("*.bias", "none")}, "holds '*.bias': give a list of pairs"),
    "clip_norm as text": ({"clip_norm": "1"}, "clip_norm='1' is of type str: give a number"),
    "timeout as text": ({"timeout": "1"}, "timeout='1' is of type str: give a number"),
    "no timeout": ({"timeout": -1}, "timeout=-1 is not a positive number of seconds"),
    "fractional min_elements": (
        {"codec": "topk", "min_elements": 1.5},
        "min_elements=1.5 is of typ",
    ),
    "a rank's number": ({"ranks": 1}, "ranks=1 is of type int: give a gradwire.Communicator, a"),
    "rule for nothing": ({"rules": [("fc.*", "none")]}, "'fc.*', which matches no parameter"),
    "names with a prefix": ({"rules": [("module.*", "none")]}, "named_parameters(): 0.weight"),
}


def wrong_settings() -> dict[str, str]:
    found = {}
    for what, (setting, _) in WRONG.items():
        with pytest.raises(gradwire.InvalidArgument) as raised:
            register(DistributedDataParallel(mlp()), **grouped(**setting))
        found[what] = str(raised.value)
    return found


def test_wrong_settings_are_refused_with_what_to_give() -> None:
    for found in torch_ranks.run(2, wrong_settings):
        for what, (_, words) in WRONG.items():
            assert words in found[what]


@pytest.mark.parametrize("owns", [True, False])
@torch_ranks.on_ranks(2)
def test_where_one_rank_cannot_go_on_all_are_told(owns: bool) -> None:
    """Fails on rank 1 alone, when the ranks have met."""
    rules = [("fc.*", "none")] if torch.distributed.get_rank() else []
    given = None if owns else communicator_of(torch.distributed.group.WORLD)
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(ddp, Compression("none", rules=rules), ranks=given or Ranks(timeout=LIMIT))
    if given is not None:
        register(ddp, ranks=given)
    told, own = torch_ranks.gathered(str(raised.value))
    assert "'fc.*', which matches no parameter" in own
    assert told == f"register() failed on rank 1: InvalidArgument: {own}"


class Words(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.words = kind(50, 4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x)


@torch_ranks.on_ranks(1)
def test_a_sparse_embedding_that_ddp_ignores_is_taken() -> None:
    model = nn.Sequential(Words(nn.Embedding, sparse=True), nn.Linear(4, 2))
    names = [name for name, _ in model.named_parameters() if name.endswith("words.weight")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    assert len(names) * register(DistributedDataParallel(model)).communicator.size == 1


@pytest.mark.long
@torch_ranks.on_ranks(1)
def test_models_that_have_no_place_for_the_hook_are_refused() -> None:
    ddp = DistributedDataParallel(mlp())
    register(ddp)
    sparse = [
        DistributedDataParallel(Words(k, sparse=True)) for k in (nn.Embedding, nn.EmbeddingBag)
    ]
    found = []
    compiled = torch.compile(DistributedDataParallel(mlp()))
    for model in (mlp(), nn.Linear, None, ddp, compiled, *sparse):
        with pytest.raises(gradwire.InvalidArgument) as raised:
            register(model)
        found.append(str(raised.value))
    register(DistributedDataParallel(Words(nn.Embedding)))
    expected = [
        "this is a Sequential: wrap it in DistributedDataParallel",
        "the class Linear",
        "of type NoneType",
        "a communication hook already, comm_hook",
        "before torch.compile()",
        "the Embedding 'words' of shape (50, 4) has sparse gradients",
        "the EmbeddingBag 'words'",
    ]
    for message, words in zip(found, expected, strict=True):
        assert words in message


@torch_ranks.on_ranks(2)
def test_a_hook_without_a_state_says_so() -> None:
    ddp = DistributedDataParallel(mlp())
    ddp.register_comm_hook(None, comm_hook)
    with pytest.raises(gradwire.InvalidArgument) as raised:
        backward(ddp, 0)
    assert "with NoneType in place of a State: call gradwire.torch.register(ddp)" in str(
        raised.value
    )


@torch_ranks.on_ranks(2)
def test_one_feedback_for_two_models_is_refused() -> None:
    first = DistributedDataParallel(mlp())
    state = register(first, "onebit")
    second = DistributedDataParallel(mlp())
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(second, Compression("onebit", feedback=state.feedback))
    state.close()
    register(second, Compression("onebit", feedback=state.feedback))
    third = DistributedDataParallel(second.module)  # the same parameters
    register(third, Compression("onebit", feedback=state.feedback))
    backward(third, 0)
    assert "feedback= is in use by another model's hook" in str(raised.value)


def saved_and_loaded(ddp: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    found: DistributedDataParallel = torch.load(file, weights_only=False)
    return found


COPIES: dict[str, Callable[[DistributedDataParallel], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
    "torch.save": saved_and_loaded,
    "AveragedModel": AveragedModel,
}


def forward_hook(*_: Any) -> None:
    """A user's, which is copied."""


@pytest.mark.parametrize("how", COPIES)
@torch_ranks.on_ranks(2)
def test_a_model_is_copied_and_saved_without_its_hook(how: str) -> None:
    """A copy behaves as plain DDP, can be registered itself, and the model goes on."""
    warnings = torch_ranks.logged()
    ddp = DistributedDataParallel(mlp())
    ddp.register_forward_hook(forward_hook)
    state = register(ddp, "onebit")
    backward(ddp, 0)
    made = COPIES[how](ddp)
    plain = made.module if how == "AveragedModel" else made
    alike = flat(plain).equal(flat(ddp)) and len(plain._forward_hooks) == 1
    backward(plain, 1)
    averaged = same_everywhere(each.grad for each in plain.parameters())
    again = DistributedDataParallel(plain.module)
    register(again)
    backward(again, 2)
    backward(ddp, 1)
    assert state.steps == 2
    warnings, *right = (
        warnings,
        alike,
        averaged,
        same_everywhere(each.grad for each in ddp.parameters()),
    )
    assert len(warnings) == 1
    assert "without gradwire's hook" in warnings[0]
    assert right == [True] * 3


@torch_ranks.on_ranks(1)
def test_a_state_is_copied_as_nothing() -> None:
    state: State = register(DistributedDataParallel(mlp()))
    assert [copy.deepcopy({"state": state}), pickle.loads(pickle.dumps(state))] == [
        {"state": None},
        None,
    ]
