"""UnusedParameters: finds the parameters that no rank used in a step.

With find_unused_parameters, DDP discards the average of such a parameter. The residual that was
sent in it is put back, so that nothing is lost, and the velocity stays as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from gradwire._calls.on_cpu import Work
from gradwire._communicator import Communicator


class UnusedParameters:
    """Records in each step for which parameters this rank has a gradient."""

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        self._index = {name: i for i, name in enumerate(names.values())}
        self._map = torch.zeros(len(self._index), dtype=torch.uint8, device="cpu")
        self._shared = self._map
        used = weakref.ref(self)
        for parameter, name in names.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_Mark(used, name))

    def share(self, communicator: Communicator, again: bool) -> Work:
        """Tells the other ranks which parameters this one used since the last call.

        With `again` it repeats the last result of all ranks, as DDP does within `join()` on a rank
        without inputs.
        """
        own = self._shared if again else self._map
        self._shared, self._map = own.clone(), torch.zeros_like(own)
        work: Work = communicator.all_reduce(self._shared, op="max", async_op=True)
        return work

    @property
    def names(self) -> set[str]:
        """The names of parameters that no rank used; valid once the work of `share` is over."""
        return {name for name, i in self._index.items() if not self._shared[i]}

    def mark(self, name: str) -> None:
        """Notes that this rank has a gradient for a parameter."""
        self._map[self._index[name]] = 1


class _Mark:
    """A hook on a parameter, which outlives the hook's state and must not keep it alive."""

    def __init__(self, unused: weakref.ref[UnusedParameters], name: str) -> None:
        self._unused, self._name = unused, name

    def __call__(self, _: torch.Tensor) -> None:
        unused = self._unused()
        if unused is not None:
            unused.mark(self._name)
