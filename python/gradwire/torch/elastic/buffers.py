"""Buffers: tensors of a model that are no parameters; after a step those of rank 0 on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gradwire._communicator import Communicator


class Buffers:
    """The buffers of a model: their copies from before a step, and their way to the other ranks."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the tensors, each element of expanded ones once."""
        self._tensors = [without_repeats(each.detach()) for each in tensors]
        self._copies: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []  # the tensors, or contiguous copies of them
        kinds = [(each.dtype, each.device) for each in self._tensors]
        self._groups = [[i for i, kind in enumerate(kinds) if kind == one] for one in set(kinds)]
        self._groups.sort()  # alike on all ranks

    def keep(self) -> None:
        """Keeps copies, for `restore`."""
        if not self._copies:
            self._copies = [torch.empty_like(each) for each in self._tensors]
        _copy(self._copies, self._tensors)

    def restore(self) -> None:
        """Puts back what the last `keep` found."""
        _copy(self._tensors, self._copies)

    def share(self, communicator: Communicator) -> Iterator[Any]:
        """Starts to send rank 0's to the others; `take` ends it when the Works are over."""
        self._sent = [each.contiguous() for each in self._tensors]
        for group in self._groups:
            yield communicator.broadcast([self._sent[i] for i in group], root=0, async_op=True)

    def take(self) -> None:
        """Takes what has come."""
        moved = [i for i, each in enumerate(self._sent) if each is not self._tensors[i]]
        _copy([self._tensors[i] for i in moved], [self._sent[i] for i in moved])
        self._sent = []


def _copy(to: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, of)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The view with each element of an expanded tensor once."""
    for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(i, 0, 1)
    return tensor
