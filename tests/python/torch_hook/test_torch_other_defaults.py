"""Trainings have the same bits when a program sets another default device and type in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import torch
import torch_ranks
from gradwire.torch import Compression, DiLoCo, OneBitAdam, elastic, register, register_fsdp
from gradwire.torch._ranks.group import communicator_of
from torch import nn
from torch.distributed import group
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import Branches, batch, mlp
from torch_versions import has_fsdp_hooks
from trainer_options import grouped

Step = Callable[[torch.Tensor, torch.Tensor], None]
BATCHES = 5


def hook(module: nn.Module, **options: Any) -> Step:
    find_unused = isinstance(module, Branches)
    ddp = DistributedDataParallel(module, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = register(ddp, **grouped(min_elements=0, warm_up=0, optimizer=optimizer, **options))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(ddp(x, [0, 1]) if find_unused else ddp(x), y).backward()
        optimizer.step()
        state.stats()
        state.load_state_dict(state.state_dict())

    return step


def joined(module: nn.Module) -> Step:
    ddp = DistributedDataParallel(module)
    register(ddp, Compression("onebit", min_elements=0, warm_up=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + ddp.process_group.rank()):
                optimizer.zero_grad()
                mse_loss(ddp(x), y).backward()
                optimizer.step()

    return step


def stepping(module: nn.Module, make: Callable[..., Any], **options: Any) -> Step:
    optimizer = make(module.named_parameters(), lr=0.01, **options)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(module(x), y).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    return step


def local(module: nn.Module) -> Step:
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    rounds = DiLoCo(
        module, inner, every=2, compression=Compression("onebit", min_elements=0), pace=False
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        inner.zero_grad()
        mse_loss(module(x), y).backward()
        inner.step()
        rounds.step()
        rounds.load_state_dict(rounds.state_dict())

    return step


def sharded(module: nn.Module, **options: Any) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(module, mesh=init_device_mesh("cpu", (group.WORLD.size(),)))
    state = register_fsdp(model, **grouped(min_elements=0, warm_up=0, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        state.stats()
        state.load_state_dict(state.state_dict())

    return step


TRAININGS: dict[str, Callable[[nn.Module], Step]] = {
    "the hook": lambda module: hook(module, codec="onebit"),
    "momentum": lambda module: hook(module, codec="topk:density=0.1", momentum=0.9, clip_norm=1.0),
    "lowrank": lambda module: hook(module, codec="lowrank"),
    "bfloat16 residuals": lambda module: hook(
        module, codec="int8", feedback=gradwire.ErrorFeedback("bfloat16")
    ),
    "unused parameters": lambda module: hook(module, codec="onebit"),
    "join": joined,
    "OneBitAdam": lambda module: stepping(module, OneBitAdam, warm_up=2, clip_norm=1.0),
    "0/1 Adam": lambda module: stepping(module, OneBitAdam, warm_up=2, every=2),
    "DiLoCo": local,
}


def trained(
    make: Callable[[nn.Module], Step], module: nn.Module, other: bool
) -> list[torch.Tensor]:
    """The parameters, which are on the CPU and float32 as their batches are."""
    batches = [batch(step) for step in range(BATCHES)]
    if other:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
    try:
        step = make(module)
        for x, y in batches:
            step(x, y)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    return [each.detach().clone() for each in module.parameters()]


@pytest.mark.parametrize("name", TRAININGS)
@torch_ranks.on_ranks(2)
def test_defaults_do_not_change(name: str) -> None:
    make = TRAININGS[name]
    module = Branches if name == "unused parameters" else mlp
    usual, other = trained(make, module(), False), trained(make, module(), True)
    assert not all(map(torch.equal, usual, module().parameters()))  # they have learned
    assert all(map(torch.equal, usual, other))


@has_fsdp_hooks
@pytest.mark.parametrize(
    "options", [{"codec": "onebit"}, {"codec": "int8", "gather_codec": "int8"}]
)
@torch_ranks.on_ranks(2)
def test_defaults_do_not_change_fsdp(options: dict[str, Any]) -> None:
    def make(module: nn.Module) -> Step:
        return sharded(module, **options)

    pairs = zip(trained(make, mlp(), False), trained(make, mlp(), True), strict=True)
    for one, other in pairs:
        assert torch.equal(one.to_local(), other.to_local())


def elastically(other: bool) -> list[torch.Tensor]:
    module, (inputs, targets) = mlp(), batch(0)
    if other:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    over = communicator_of(group.WORLD)
    with elastic.session(
        module,
        optimizer,
        elastic.Sampler(len(inputs), batch=4, epochs=2),
        compression=Compression("onebit", min_elements=0, warm_up=0),
        verify=True,
        ranks=over,
    ) as s:
        for chosen in s:
            s.backward(mse_loss(module(inputs[chosen]), targets[chosen]))
            if s.commit():
                optimizer.step()
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    return [each.detach() for each in module.parameters()]


@torch_ranks.on_ranks(2)
def test_defaults_do_not_change_elastic_trainings() -> None:
    for one, other in zip(elastically(False), elastically(True), strict=True):
        assert torch.equal(one, other)
