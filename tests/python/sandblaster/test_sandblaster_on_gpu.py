"""Sandblaster with parameters on a simulated GPU, whose streams run late.

torch's CPU build has no autograd for other devices: the loss is computed from copies on the CPU,
and its gradients are put on the GPU.
"""

from __future__ import annotations

import threading
from typing import Any

import gradwire.torch
import pytest
import simulated_gpu
import simulated_torch_cuda as simulated
import torch
import torch_ranks
from gradwire import serve
from simulated_torch_cuda import cpu, cuda

pytestmark = simulated_gpu.needed
SAMPLES, ITERATIONS = 60, 4


def fitted(on_gpu: bool, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of some iterations, and a replica's parameters at the end: a linear regression."""
    to = cuda if on_gpu else torch.Tensor.clone
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SAMPLES, n, generator=draw, dtype=dtype) for n in (7, 3))
    parameters = [torch.zeros(7, 3, dtype=dtype), torch.ones(3, dtype=dtype)]
    parameters = [to(each).requires_grad_() for each in parameters]

    def loss(which: torch.Tensor) -> torch.Tensor:
        read.values = [(cpu(each) if on_gpu else each).detach() for each in parameters]
        weight, bias = (each.requires_grad_() for each in read.values)
        away = x[which] @ weight + bias - y[which]
        return (away * away).sum()

    def grad(of: torch.Tensor, given: Any, **options: Any) -> list[torch.Tensor]:
        assert all(a is b for a, b in zip(given, parameters, strict=True))
        return [to(each) for each in autograd(of, read.values, **options)]

    def make(server: serve.Server) -> gradwire.torch.Sandblaster:
        return gradwire.torch.Sandblaster(
            parameters, loss, samples=SAMPLES, portion=SAMPLES, store=server.store
        )

    def work(replica: gradwire.torch.Sandblaster) -> None:
        with simulated.on_stream(simulated.Stream()):
            replica.serve()
            done.extend((cpu if on_gpu else torch.Tensor.clone)(each) for each in parameters)

    done: list[torch.Tensor] = []
    read = threading.local()
    autograd, torch.autograd.grad = torch.autograd.grad, grad
    with serve.Server(2) as server:
        thread = threading.Thread(target=work, args=(make(server),))
        thread.start()
        with make(server) as lead:
            losses = [lead.step().loss for _ in range(ITERATIONS)]
        thread.join()
    torch.autograd.grad = autograd
    return losses, [each.detach() for each in done]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch_ranks.on_ranks(1)
def test_values_and_gradients_pass_through_pinned_memory(dtype: torch.dtype) -> None:
    simulated.install()
    losses, parameters = fitted(True, dtype)
    expected, on_cpu = fitted(False, dtype)
    assert losses == expected
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, on_cpu, strict=True))
