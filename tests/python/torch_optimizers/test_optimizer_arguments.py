"""Arguments of the optimizers that exchange, their names for parameters, and groups of ranks."""

from __future__ import annotations

import copy
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import Communicator, InvalidArgument
from gradwire.torch import Compression, OneBitAdam
from local_training import batch, bits, small
from ranks import on_ranks, run
from replicated_training import Replica, settings_of
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"warm_up": 0}, "warm_up=0 is less than 1"),
        ({"every": 0}, "every=0 is less than 1"),
        ({"lr": -1}, "lr=-1 is negative"),
        ({"betas": 0.9}, "betas=0.9"),
        ({"betas": (0.9, 1)}, "betas=(0.9, 1) are not"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"eps": -1e-8}, "eps=-1e-08 is negative"),
        ({"eps": float("inf")}, "eps=inf is negative, or no"),
        ({"eps": "small"}, "eps='small'"),
        ({"clip_norm": 0}, "clip_norm=0 is no norm"),
        ({"codec": "onebits"}, "onebits"),
        ({"warm_up_codec": 3}, "codec=3"),
        ({"rules": {"*": "none"}}, "a mapping"),
        ({"rules": [("x.*", "none")]}, "matches no parameter"),
        ({"feedback": 3}, "feedback=3"),
        ({"algorithm": "rng"}, "algorithm='rng'"),
        ({"scaler": torch.amp.GradScaler}, "scaler=GradScaler is a class"),
        ({"over": "world"}, "ranks='world'"),
        ({"over": None}, "give ranks=gradwire.init"),
        ({"compression": Compression("onebit", warm_up=9)}, "warm_up=9 of a Compression"),
        ({"codec": "auto"}, "register() and register_fsdp() choose"),
        ({"over": None, "timeout": 0}, "timeout=0 is not a positive number"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], text: str) -> None:
    def body(comm: Communicator) -> str:
        usual = {"over": comm, "warm_up": 1}
        with pytest.raises(InvalidArgument) as raised:
            OneBitAdam(small().named_parameters(), **settings_of(**usual | settings))
        return str(raised.value)

    assert text in run(1, body)[0]


def test_parameters_that_cannot_be_are_told_why() -> None:
    def body(comm: Communicator) -> list[str]:
        texts = []
        for params in (
            [("w", nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))],
            [("w", nn.Parameter(torch.zeros(3))), ("w", nn.Parameter(torch.zeros(3)))],
        ):
            with pytest.raises(InvalidArgument) as raised:
                OneBitAdam(params, warm_up=1, ranks=comm)
            texts.append(str(raised.value))
        replica = Replica(comm)
        with pytest.raises(InvalidArgument):
            replica.optimizer.add_param_group(
                {"params": [("x", nn.Parameter(torch.zeros(2).double()))]}
            )
        replica.train(1)
        return texts

    dtype, twice = run(1, body)[0]
    assert "'w' is torch.bfloat16" in dtype
    assert "two parameters have the name 'w'" in twice


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"lr": -1}, "lr=-1 is negative"),
        ({"betas": (0.9, 3)}, "betas=(0.9, 3) are not"),
        ({"weight_decay": -1}, "weight_decay=-1 is negative"),
        ({"eps": -1}, "eps=-1 is negative"),
    ],
)
def test_options_of_groups_are_checked(option: dict[str, Any], text: str) -> None:
    """In the constructor and later, where the group is not added."""

    def body(comm: Communicator) -> list[str]:
        wrong = {"params": [("x", nn.Parameter(torch.zeros(3)))], **option}
        optimizer = OneBitAdam(small().named_parameters(), warm_up=1, ranks=comm)
        texts = []
        for add in (
            lambda: OneBitAdam([wrong], warm_up=1, ranks=comm),
            lambda: optimizer.add_param_group(wrong),
        ):
            with pytest.raises(InvalidArgument) as raised:
                add()
            texts.append(str(raised.value))
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        return texts

    assert all(text in each for each in run(1, body)[0])


@on_ranks(2)
def test_rates_of_added_and_loaded_groups_that_differ_raise_on_all(comm: Communicator) -> None:
    replica = Replica(comm)
    optimizer = replica.optimizer
    group = {"params": [("x", nn.Parameter(torch.zeros(3)))], "lr": 0.1 * (1 + comm.rank)}
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.1 * (1 + comm.rank)
    scaler = torch.amp.GradScaler("cpu") if comm.rank else None
    texts = []
    for call in (
        lambda: optimizer.add_param_group(group),
        lambda: optimizer.load_state_dict(saved),
        lambda: Replica(comm, scaler=scaler),
    ):
        with pytest.raises(InvalidArgument) as raised:
            call()
        texts.append(str(raised.value))
    assert len(optimizer.param_groups) == 1
    added, loaded, scaled = texts
    assert added.startswith("add_param_group() was called with a different param_groups= by")
    assert loaded.startswith("load_state_dict() was called with a different param_groups= by")
    assert "different scaler= by rank: False on rank 0; True on rank 1" in scaled


@on_ranks(2)
def test_steps_with_nothing_to_send(comm: Communicator) -> None:
    """All parameters are frozen, or have no elements."""
    replica = Replica(comm)
    replica.train(1)
    before = bits(replica.model)
    for each in replica.model.parameters():
        each.requires_grad_(False)
    replica.optimizer.step()
    assert bits(replica.model) == before
    for each in replica.model.parameters():
        each.requires_grad_(True)
    replica.train(1)
    assert bits(replica.model) != before
    empty = nn.ParameterList([nn.Parameter(torch.zeros(0, 3))])
    Replica(comm, model=empty).optimizer.step()
    assert replica.optimizer.steps == 3


@on_ranks(1)
def test_copies_say_that_they_are(comm: Communicator) -> None:
    original = Replica(comm).optimizer
    copied = copy.deepcopy(original)
    saved = original.state_dict()
    for call in (
        copied.state_dict,
        copied.check_agreement,
        copied.close,
        copied.step,
        lambda: copied.load_state_dict(saved),
        lambda: copied.after_shrink(comm),
    ):
        with pytest.raises(InvalidArgument, match="this OneBitAdam is a copy"):
            call()


@on_ranks(2)
def test_settings_and_groups_that_differ_between_ranks_raise_on_all(comm: Communicator) -> None:
    texts = []
    for settings in ({"warm_up": 1 + comm.rank}, {"warm_up": 1, "lr": 0.1 * (1 + comm.rank)}):
        with pytest.raises(InvalidArgument) as raised:
            OneBitAdam(small().named_parameters(), ranks=comm, **settings)
        texts.append(str(raised.value))
    with pytest.raises(InvalidArgument) as raised:
        OneBitAdam(nn.Linear(3, 3 + comm.rank).parameters(), warm_up=1, ranks=comm)
    warm_up, rates, shapes = [*texts, str(raised.value)]
    assert warm_up.startswith("OneBitAdam() was called with a different warm_up= by rank: 1 on")
    assert "different param_groups=" in rates
    assert "'0.0' is torch.float32 of shape (4, 3) on rank 1" in shapes


@on_ranks(2)
def test_several_models_and_optimizers_in_one_process(comm: Communicator) -> None:
    """Each has residuals of its own, also where names are the same; one feedback is for one."""
    kept = gradwire.ErrorFeedback()
    first = Replica(comm, feedback=kept)
    second = Replica(comm, codec="int8")
    for _ in range(5):
        first.train(1)
        second.train(1)
    with pytest.raises(InvalidArgument, match="in use by another model"):
        Replica(comm, feedback=kept)
    first.optimizer.close()
    Replica(comm, feedback=kept)
    alone = Replica(comm)
    alone.train(5)
    one, other = comm.all_gather_object((bits(first.model), bits(second.model), bits(alone.model)))
    assert one == other
    assert one[0] == one[2] != one[1]


def test_parameters_without_names_and_all_ranks_beginning_alike() -> None:
    def body(comm: Communicator) -> Any:
        model = small()
        with torch.no_grad():
            model[0].weight.add_(comm.rank)
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-4}]
        optimizer = OneBitAdam(
            groups, compression=Compression("onebit", min_elements=0), warm_up=1, ranks=comm
        )
        for step in range(3):
            x, y = batch(step, comm.rank)
            loss = optimizer.step(lambda x=x, y=y: backward(model, x, y))
            assert float(loss.detach()) > 0
        assert optimizer.feedback is not None
        return bits(model), sorted(optimizer.feedback.keys()), repr(optimizer)

    def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    one, other = run(2, body)
    assert one[:2] == other[:2]
    assert one[1] == ["0.0", "0.1", "1.0", "1.1"]
    assert one[2] == "OneBitAdam(rank 0 of 2, steps=3, groups=2)"


@pytest.mark.parametrize("backend", ["gloo", "gradwire"])
@torch_ranks.on_ranks(2)
def test_it_works_over_a_process_group(backend: str) -> None:
    """Its own communicator is closed; that of the backend is the group's. DDP does nothing."""
    model = small()
    ddp = DistributedDataParallel(model)
    optimizer = OneBitAdam(
        model.named_parameters(), 0.01, compression=Compression("onebit", min_elements=0), warm_up=2
    )
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((2, 8), 1.0 + step + dist.get_rank())).sum().backward()
        optimizer.step()
    optimizer.close()
    one, other = torch_ranks.gathered((bits(model), optimizer.communicator.closed))
    assert one[0] == other[0]
    assert one[1] == (backend == "gloo")


@pytest.mark.parametrize(
    ("model", "codec", "warns"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), "onebit", True),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), "int8", False),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)), "onebit", False),  # cuts patches
    ],
)
def test_one_bit_adam_warns_of_convolutions(
    caplog: pytest.LogCaptureFixture, model: nn.Module, codec: str, warns: bool
) -> None:
    def body(comm: Communicator) -> None:
        OneBitAdam(model.named_parameters(), warm_up=1, compression=codec, ranks=comm).close()

    gradwire.spawn(body, 1, threads=True, timeout=30)
    assert ("2 parameters, such as 0.weight, are kernels" in caplog.text) == warns
