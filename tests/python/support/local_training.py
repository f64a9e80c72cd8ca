"""A small training with DiLoCo, on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from gradwire import Communicator
from gradwire.torch import DiLoCo
from torch import nn
from torch.nn.functional import mse_loss
from trainer_options import grouped

seeding = threading.Lock()  # torch's generator is the process's


def small(*, normalized: bool = False) -> nn.Module:
    """The same on every rank but for what the rank adds to it, which DiLoCo takes away."""
    with seeding:
        torch.manual_seed(3)
        between = nn.BatchNorm1d(40) if normalized else nn.Tanh()
        return nn.Sequential(nn.Linear(8, 40), between, nn.Linear(40, 4))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 8, generator=source), torch.randn(8, 4, generator=source)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def bits(model: nn.Module) -> bytes:
    """Those of all parameters."""
    parameters = [each.detach().contiguous().flatten() for each in model.parameters()]
    return b"".join(each.view(torch.uint8).numpy().tobytes() for each in parameters)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in model.parameters()])


class Trainee:
    """One rank's model, inner optimizer and DiLoCo, on batches of its own."""

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module | None = None,
        optimizer: Callable[[nn.Module], Any] = sgd,
        **settings: Any,
    ) -> None:
        self.rank = comm.rank
        self.model = small() if model is None else model
        self.optimizer = optimizer(self.model)
        options = {"min_elements": 0, "pace": False, "ranks": comm, **settings}
        self.outer = DiLoCo(self.model, self.optimizer, **grouped(**options))
        self.step_number = 0

    def inner_step(self) -> None:
        x, y = batch(self.step_number, self.rank)
        self.step_number += 1
        self.optimizer.zero_grad()
        dtype = next(self.model.parameters()).dtype
        mse_loss(self.model(x.to(dtype)), y.to(dtype)).backward()
        self.optimizer.step()

    def step(self) -> bool:
        self.inner_step()
        return self.outer.step()

    def train(self, steps: int) -> list[bytes]:
        """The parameters after each outer step."""
        return [bits(self.model) for _ in range(steps) if self.step()]


def assert_same(one: Any, other: Any) -> None:
    """Compares saved states; tensors must have the same bits."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for its, others in zip(one, other, strict=True):
            assert_same(its, others)
    else:
        assert one == other
