"""SharedBuffers: a model's buffers, which outer steps bring together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gradwire._communicator import Communicator
from gradwire.torch.outer.outer import copy_into


class SharedBuffers:
    """Buffers of real numbers are averaged, and all ranks get rank 0's others.

    What travels of the former is their change since the last time, so that a buffer that no rank
    changes keeps its bits.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.values = {
            name: each.clone(memory_format=torch.contiguous_format)
            for name, each in self._now().items()
            if each.is_floating_point()
        }

    def average(self, communicator: Communicator, weight: float) -> None:
        """Sums the ranks' changes times `weight`; every rank calls it."""
        now = self._now()
        for dtype in sorted({each.dtype for each in self.values.values()}, key=str):
            names = [name for name, each in self.values.items() if each.dtype is dtype]
            changes = [_change(self.values[name], now[name]) for name in names]
            communicator.all_reduce(changes, feedback=False)
            for name, change in zip(names, changes, strict=True):
                self.values[name].add_(change.mul_(weight))
                now[name].copy_(self.values[name])
        others = [each for name, each in now.items() if name not in self.values]
        if others:
            sent = [each.contiguous() for each in others]
            communicator.broadcast([each.view(-1).view(torch.uint8) for each in sent], root=0)
            for each, received in zip(others, sent, strict=True):
                each.copy_(received)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces the values of the last time; raises InvalidArgument for another model's."""
        copy_into(self.values, values, "buffer")

    def _now(self) -> dict[str, torch.Tensor]:
        """The model's buffers; a module may have replaced some."""
        found = {name: each.detach() for name, each in self._model.named_buffers()}
        return {name: each for name, each in found.items() if each.numel()}


def _change(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The difference, at least as float32; 0 where nothing changed, be it infinite."""
    wide = torch.float64 if before.dtype is torch.float64 else torch.float32
    difference = now.to(wide) - before.to(wide)
    return difference.masked_fill_(now == before, 0).contiguous()
