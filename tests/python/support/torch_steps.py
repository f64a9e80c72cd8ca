"""One step of each way to train over a process group: a forward, and what waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gradwire.torch import DiLoCo, OneBitAdam, register, register_fsdp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_versions import has_fsdp_hooks
from trainer_options import grouped


class Training(NamedTuple):
    """A module in training, its optimizer, and the rest of a step after backward."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return mse_loss(self.module(x), y)

    def finish(self, loss: torch.Tensor) -> None:
        """Makes the rest of a step."""
        loss.backward()
        self.step()
        self.optimizer.zero_grad()


Group = dist.ProcessGroup | None


def _hook(module: nn.Module, lr: float, group: Group, **options: Any) -> Training:
    ddp = DistributedDataParallel(module, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    register(ddp, optimizer=optimizer, **grouped(**options))
    return Training(ddp, optimizer, optimizer.step)


def _sharded(module: nn.Module, lr: float, group: Group, **options: Any) -> Training:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
    model = fully_shard(module, mesh=mesh)
    register_fsdp(model, **grouped(**options))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Training(model, optimizer, optimizer.step)


def _local(module: nn.Module, lr: float, group: Group, **options: Any) -> Training:
    inner = torch.optim.SGD(module.parameters(), lr=lr)
    outer = DiLoCo(module, inner, every=1, pace=False, **grouped(over=group, **options))

    def step() -> None:
        inner.step()
        outer.step()
        outer.finish()

    return Training(module, inner, step)


def _stepping(make: Callable[..., torch.optim.Optimizer], **fixed: Any) -> Callable[..., Training]:
    def made(module: nn.Module, lr: float, group: Group, **options: Any) -> Training:
        named = module.named_parameters()
        optimizer = make(named, lr=lr, **fixed, **grouped(over=group, **options))
        return Training(module, optimizer, optimizer.step)

    return made


def _plain(module: nn.Module, lr: float, group: Group, timeout: float | None = None) -> Training:
    """DistributedDataParallel over the backend, without a hook."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    over = dist.new_group(backend="gradwire", timeout=limit)
    ddp = DistributedDataParallel(module, process_group=over)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    return Training(ddp, optimizer, optimizer.step)


_WAYS: dict[str, Callable[..., Training]] = {
    "the hook": _hook,
    "DiLoCo": _local,
    "OneBitAdam": _stepping(OneBitAdam, warm_up=2),
    "FSDP2": _sharded,
    "the backend": _plain,
}
every_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=has_fsdp_hooks if way == "FSDP2" else ()) for way in _WAYS]
)


def training(
    way: str, module: nn.Module, *, lr: float = 0.1, group: Group = None, **options: Any
) -> Training:
    """The module, trained in one of the ways; `options` are those that it takes, as `timeout`."""
    return _WAYS[way](module, lr, group, **options)
