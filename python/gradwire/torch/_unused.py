"""Parameters that no rank used in a step.

With find_unused_parameters DDP throws the average of such a parameter away. What its residuals
delivered into it is put back, so that nothing is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch

from gradwire._communicator import Communicator
from gradwire._work import Work


class Unused:
    """Watches, step by step, for which parameters this rank has a gradient."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._index = {name: i for i, name in enumerate(names.values())}
        self._map = torch.zeros(len(self._index), dtype=torch.uint8)
        self._shared = self._map
        used = weakref.ref(self)
        for parameter, name in names.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_Mark(used, name))

    def share(self, communicator: Communicator) -> Work:
        """Tells the other ranks what this one used since it last did so."""
        self._shared, self._map = self._map, torch.zeros_like(self._map)
        work: Work = communicator.all_reduce(self._shared, op="max", async_op=True)
        return work

    def of(self, names: Iterable[str]) -> list[str]:
        """Those that no rank used, once the work is over."""
        return [name for name in names if not self._shared[self._index[name]]]

    def mark(self, name: str) -> None:
        """This rank has a gradient of it."""
        self._map[self._index[name]] = 1


class _Mark:
    """Parameters outlive the hook's state, and must not keep it."""

    def __init__(self, unused: weakref.ref[Unused], name: str) -> None:
        self._unused, self._name = unused, name

    def __call__(self, _: torch.Tensor) -> None:
        unused = self._unused()
        if unused is not None:
            unused.mark(self._name)
