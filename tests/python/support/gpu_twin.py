"""A model on the simulated GPU, for which a twin on the CPU computes losses and gradients.

Torch's CPU build has no autograd for tensors on a GPU. All else happens there: averages, the
optimizer's steps, what ranks give to each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from simulated_torch_cuda import CudaTensor, cpu, cuda
from torch import nn


class Twin:
    """A model on the CPU, and `model`, its copy on the GPU, whose values count."""

    def __init__(self, own: nn.Module) -> None:
        self._own, self.model = own, _on_gpu(copy.deepcopy(own))

    def loss(self, call: Callable[[nn.Module], torch.Tensor]) -> Loss:
        """The loss that `call` computes with the model; its buffers change as in any forward."""
        with torch.no_grad():
            for own, its in self._pairs():
                own.copy_(cpu(its))
        found = call(self._own)
        for own, its in zip(self._own.buffers(), self.model.buffers(), strict=True):
            its.copy_(cuda(own))
        return Loss(found, self)

    def take_gradients(self) -> None:
        """Adds the twin's gradients to the model's, the last first, as backward does."""
        pairs = list(zip(self._own.parameters(), self.model.parameters(), strict=True))
        for own, its in reversed(pairs):
            assert own.grad is not None
            if its.grad is None:
                its.grad = cuda(own.grad)
            else:
                its.grad.add_(cuda(own.grad))
            own.grad = None
            for hook in dict(its._post_accumulate_grad_hooks or {}).values():
                hook(its)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, CudaTensor]]:
        yield from zip(self._own.parameters(), self.model.parameters(), strict=True)  # type: ignore[misc]
        yield from zip(self._own.buffers(), self.model.buffers(), strict=True)  # type: ignore[misc]


class Loss:
    """The part of a loss that training loops need."""

    def __init__(self, value: torch.Tensor, twin: Twin) -> None:
        self._value, self._twin = value, twin

    def __mul__(self, factor: float) -> Loss:
        return Loss(self._value * factor, self._twin)

    def backward(self) -> None:
        self._value.backward()
        self._twin.take_gradients()


def _on_gpu(model: nn.Module) -> nn.Module:
    for part in model.modules():
        held: dict[str, Any] = part._parameters
        for name, each in held.items():
            held[name] = nn.Parameter(cuda(each.detach()))
        held = part._buffers
        for name, each in held.items():
            held[name] = cuda(each)
    return model
