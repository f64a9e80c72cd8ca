"""A small model, its training on each rank's own batches, and the same on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss


def model(*, normalized: bool = False) -> nn.Module:
    torch.manual_seed(3)
    between = nn.BatchNorm1d(32) if normalized else nn.Tanh()
    return nn.Sequential(nn.Linear(20, 32), between, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    own = dist.get_rank() if rank is None else rank
    source = torch.Generator().manual_seed(1000 * step + own)
    return torch.randn(8, 20, generator=source), torch.randn(8, 8, generator=source)


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in module.parameters()])


def train(
    module: nn.Module,
    steps: int = 4,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> None:
    made = (optimizer or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)))(module.parameters())
    for step in range(steps):
        x, y = batch(step)
        made.zero_grad()
        mse_loss(module(x), y).backward()
        made.step()


def agreed(module: nn.Module) -> torch.Tensor:
    """The weights, which are the same on every rank."""
    own = weights(module)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)
    return own


def averaged() -> torch.Tensor:
    """The weights of the same training on one rank, which sees all batches."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            x, y = batch(step, rank)
            (mse_loss(module(x), y) / dist.get_world_size()).backward()
        optimizer.step()
    return weights(module)
