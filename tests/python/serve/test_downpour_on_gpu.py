"""Downpour SGD with parameters on a simulated GPU, whose streams run late."""

from __future__ import annotations

import simulated_gpu
import simulated_torch_cuda as simulated
import torch
import torch_ranks
from gradwire import serve
from gradwire.torch import Downpour
from simulated_torch_cuda import cpu, cuda

pytestmark = simulated_gpu.needed
STEPS = 6


def gradients(step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(3, 5, generator=draw), torch.randn(700, generator=draw)]


def train(on_gpu: bool, push_codec: str, pull_codec: str) -> list[torch.Tensor]:
    """The values after some steps, of one replica that alternates between two streams."""
    to = cuda if on_gpu else torch.Tensor.clone
    parameters = [to(each).requires_grad_() for each in gradients(100)]
    with serve.Server(2) as server:
        optimizer = Downpour(
            parameters,
            serve.SGD(lr=0.1),
            compression=push_codec,
            pull_codec=pull_codec,
            store=server.store,
        )
        for step in range(STEPS):
            with simulated.on_stream(simulated.Stream()):
                for each, gradient in zip(parameters, gradients(step), strict=True):
                    each.grad = to(gradient)
                optimizer.step()
                found = [(cpu if on_gpu else torch.Tensor.clone)(each) for each in parameters]
        optimizer.close()
    return [each.detach() for each in found]


@torch_ranks.on_ranks(1)
def test_values_and_gradients_pass_through_pinned_memory() -> None:
    codecs = [("none", "none"), ("onebit", "int8")]
    simulated.install()
    for push, pull in codecs:
        pairs = zip(train(True, push, pull), train(False, push, pull), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), (push, pull)
        start = gradients(100)
        assert not any(
            torch.equal(a, b) for a, b in zip(train(True, push, pull), start, strict=True)
        )
