"""DiLoCo with parameters on a simulated GPU, whose streams run late."""

from __future__ import annotations

from typing import Any

import pytest
import simulated_gpu
import simulated_torch_cuda as simulated
import torch
import torch_ranks
from gradwire.torch import DiLoCo
from simulated_torch_cuda import CudaTensor, cpu, cuda
from torch import nn
from trainer_options import grouped

pytestmark = simulated_gpu.needed
STEPS = 7


class Net(nn.Module):
    """Parameters alone: their gradients are drawn."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for name, shape in (("weight", (30, 50)), ("bias", (50,))):
            values = torch.randn(shape, generator=draw)
            setattr(self, name, nn.Parameter(cuda(values) if on_gpu else values))


def train(on_gpu: bool, rank: int, **settings: Any) -> list[torch.Tensor]:
    """The parameters after some rounds, of a rank that alternates between streams."""
    net = Net(on_gpu)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    options = {"every": 2, "pace": False, "min_elements": 0, **settings}
    outer = DiLoCo(net, optimizer, **grouped(**options))
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank)
        with simulated.on_stream(simulated.Stream()):
            for each in net.parameters():
                gradient = torch.randn(each.shape, generator=draw)
                each.grad = cuda(gradient) if on_gpu else gradient
            optimizer.step()
            outer.step()
    with simulated.on_stream(simulated.Stream()):
        outer.finish()
        outer.check_agreement()
        found = [each.detach() for each in net.parameters()]
        assert all(isinstance(each, CudaTensor) == on_gpu for each in found)
        return [cpu(each) if on_gpu else each.clone() for each in found]


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "none"},
        {"codec": "onebit"},
        {"codec": "int8", "fragments": 2, "delay": 1, "every": 4},
    ],
    ids=["none", "onebit", "fragments of int8"],
)
@torch_ranks.on_ranks(2)
def test_values_are_those_of_the_cpu(settings: dict[str, Any]) -> None:
    simulated.install()
    simulated.compute()
    rank = torch.distributed.get_rank()
    found, expected = (train(on_gpu, rank, **settings) for on_gpu in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], Net(False).weight)
    one, other = torch_ranks.gathered([each.numpy().tobytes() for each in found])
    assert one == other
