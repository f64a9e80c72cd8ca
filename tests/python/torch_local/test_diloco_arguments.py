"""Arguments of DiLoCo that are refused, and the groups that it works over."""

from __future__ import annotations

from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import Communicator, InvalidArgument
from gradwire.torch import DiLoCo
from local_training import Trainee, bits, sgd, small
from ranks import on_ranks, run
from torch import nn
from trainer_options import grouped


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every": 0}, "every=0 is less than 1"),
        ({"every": 2.5}, "every=2.5"),
        ({"every": 3, "fragments": 4}, "every=3 is less than fragments=4"),
        ({"every": 99, "fragments": 89}, "the parameters have 88 rows"),
        ({"every": 10, "fragments": 2, "delay": 6}, "more than the 5 inner steps"),
        ({"delay": -1}, "delay=-1 is less than 0"),
        ({"mix": 1}, "mix=1 is not from 0 to below 1"),
        ({"lr": 0}, "local SGD has lr=1"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1}, "momentum=1 is not"),
        ({"nesterov": 1}, "nesterov=1"),
        ({"pace": "yes"}, "pace='yes'"),
        ({"codec": "fp17"}, "fp17"),
        ({"rules": {"*": "none"}}, "a mapping"),
        ({"rules": [("x.*", "none")]}, "matches no parameter"),
        ({"algorithm": "rng"}, "algorithm='rng'"),
        ({"feedback": 3}, "feedback=3"),
        ({"codec": "onebit", "warm_up": 9}, "warm_up=9 of a Compression is for register()"),
        ({"codec": "auto"}, "only gradwire.torch.register() and register_fsdp() choose a"),
        ({"over": "world"}, "ranks='world'"),
        ({"over": None}, "give ranks=gradwire.init"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], text: str) -> None:
    model = small()

    def body(comm: Communicator) -> str:
        with pytest.raises(InvalidArgument) as raised:
            DiLoCo(model, sgd(model), **grouped(**{"over": comm, **settings}))
        return str(raised.value)

    assert text in run(1, body)[0]


def test_models_and_optimizers_that_cannot_be_are_told_why() -> None:
    model = small()
    sparse, other = nn.Linear(2, 2), nn.Linear(3, 3)
    for wrong, optimizer, text in (
        (list(model.parameters()), sgd(model), "model="),
        (model, torch.optim.SGD, "inner_optimizer=SGD is a class"),
        (model, [sgd(model), 3], "inner_optimizer=3"),
        (sparse, sgd(other), "2 parameters that are not the model's"),
        (small().requires_grad_(requires_grad=False), [], "trains none of the model's parameters"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            DiLoCo(wrong, optimizer)
    quarter = nn.Linear(4, 4).to(torch.float8_e5m2)
    with pytest.raises(InvalidArgument, match="'weight' is torch\\.float8"):
        DiLoCo(quarter, sgd(quarter))


@on_ranks(2)
def test_settings_and_models_that_differ_between_ranks_raise_on_all(comm: Communicator) -> None:
    texts = []
    for every, width in ((50 + comm.rank, 4), (50, 4 + comm.rank)):
        model = nn.Linear(3, width)
        with pytest.raises(InvalidArgument) as raised:
            DiLoCo(model, sgd(model), every, ranks=comm)
        texts.append(str(raised.value))
    settings, shapes = texts
    assert settings.startswith("DiLoCo() was called with a different every= by rank: 50 on")
    assert "'weight' is torch.float32 of shape (5, 3) on rank 1" in shapes


@on_ranks(3)
def test_all_ranks_begin_with_rank_0s_model(comm: Communicator) -> None:
    model = small(normalized=True)
    with torch.no_grad():
        for each in (*model.parameters(), model[1].running_mean):
            each.add_(comm.rank + 1)
    trainee = Trainee(comm, model)
    found = comm.all_gather_object((bits(trainee.model), float(model[1].running_mean[0])))
    assert found == found[:1] * 3


def test_one_feedback_is_for_one_model() -> None:
    def body(comm: Communicator) -> str:
        kept = gradwire.ErrorFeedback()
        first = Trainee(comm, codec="onebit", feedback=kept)
        with pytest.raises(InvalidArgument) as raised:
            Trainee(comm, codec="onebit", feedback=kept)
        first.outer.close()
        Trainee(comm, codec="onebit", feedback=kept)
        assert not comm.closed
        return str(raised.value)

    assert "in use by another model" in run(1, body)[0]


@pytest.mark.parametrize("backend", ["gloo", "gradwire"])
@torch_ranks.on_ranks(2)
def test_it_works_over_a_process_group(backend: str) -> None:
    """Its own communicator is closed; that of the backend is the group's."""
    model = small()
    optimizer = sgd(model)
    outer = DiLoCo(model, optimizer, every=2, compression="int8", pace=False)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + step + dist.get_rank())).sum().backward()
        optimizer.step()
        outer.step()
    outer.close()
    one, other = torch_ranks.gathered((bits(model), outer.communicator.closed, repr(outer)))
    assert one[0] == other[0]
    assert one[1] == (backend == "gloo")
    assert one[2] == "DiLoCo(rank 0 of 2, rounds=2, pace=[2, 2])"
