"""What trains beside the model in a session: a scaler, parameter groups, unusual buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, elastic
from gradwire.torch._ranks.group import communicator_of
from torch import nn
from torch.optim import lr_scheduler

DATA = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))


def _connected(body: Callable[..., Any], *args: Any) -> Any:
    return body(communicator_of(dist.group.WORLD, 30), *args)


class Model(nn.Module):
    """A layer, and buffers that are not contiguous."""

    def __init__(self, bias: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("expanded", bias[1:2].expand(1, 4)[:, None].expand(1, 3, 4))
        self.register_buffer("turned", torch.outer(bias, bias).t()[:, 1:])
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.expanded[0, 0] + self.turned.sum()


def trained(
    comm: gradwire.Communicator, scaled: bool, lengths: tuple[int, int]
) -> list[np.ndarray[Any, Any]]:
    torch.manual_seed(5)
    model = Model(torch.arange(4.0) * (1 - comm.rank) / 8)
    groups = [{"params": [each]} for each in model.parameters()]
    optimizer = torch.optim.SGD(groups, 0.125)
    halves = [lambda step, n=n: 0.5 ** (step // n) for n in lengths]
    scheduler = lr_scheduler.LambdaLR(optimizer, halves)
    scaler = torch.amp.GradScaler("cpu", 256.0, 2.0, growth_interval=2, enabled=scaled)
    sampler = elastic.Sampler(96, 8)
    with elastic.session(
        model,
        optimizer,
        sampler,
        compression=Compression("onebit", min_elements=1, warm_up=0),
        carry=[scheduler, scaler],
        ranks=comm,
    ) as s:
        for batch in s:
            loss = (model(DATA[batch]) - DATA[batch, :4]).square().mean()
            s.backward(scaler.scale(loss))
            if s.commit():
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
    s.communicator.close()
    return [each.detach().numpy().copy() for each in (*model.parameters(), *model.buffers())]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_residuals_follow_a_scaler_and_buffers_are_those_of_rank_0() -> None:
    plain, scaled = (torch_ranks.run(2, _connected, trained, on, (4, 4)) for on in (False, True))
    assert same(*plain)
    assert same(*scaled)
    assert same(plain[0], scaled[0])  # factors of two are exact
    assert all(each.any() for each in plain[0])


def trained_and_told(
    comm: gradwire.Communicator, lengths: tuple[int, int]
) -> tuple[list[np.ndarray[Any, Any]], list[str]]:
    """What `trained` returns, and the warnings of this rank."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire")
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    return trained(comm, False, lengths), told


@pytest.mark.parametrize(("lengths", "warnings"), [((4, 4), 0), ((3, 2), 1)])
def test_groups_with_rates_of_their_own_train_and_a_warning_tells(
    lengths: tuple[int, int], warnings: int
) -> None:
    (one, told), (other, also_told) = torch_ranks.run(2, _connected, trained_and_told, lengths)
    assert same(one, other)
    for each in (told, also_told):
        assert sum("residuals follow the rates no more" in text for text in each) == warnings, each
