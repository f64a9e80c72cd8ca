"""Ranks without inputs left, within DDP's `join()`: they take part with zeros.

With `divide_by_initial_world_size=False` DDP averages over those that still train. Its reducer
leaves that to a hook, too, and does not tell it how many these are.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._communicator import Communicator
from gradwire._work import Work


class Active:
    """How many ranks train, where averages are to be over these."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._trains = False
        self._count = torch.zeros(1, dtype=torch.int64)

    @property
    def counts(self) -> bool:
        """Whether DDP is to divide by it; the same on all ranks."""
        ddp = self._ddp()  # torch offers no public way to what join() was given
        config = getattr(ddp, "_join_config", None)
        divides_by_all = getattr(ddp, "_divide_by_initial_world_size", True)
        return config is not None and config.enable and not divides_by_all

    def note_forward(self) -> None:
        """This rank trains in this step."""
        self._trains = True

    def share(self, communicator: Communicator) -> Work:
        """Tells the other ranks whether this one trained in the step that ends."""
        self._count = torch.tensor([int(self._trains)])
        self._trains = False
        work: Work = communicator.all_reduce(self._count, op="sum", async_op=True)
        return work

    def factor(self, ranks: int) -> float:
        """From the average over all ranks to that over those that train, once the work is over."""
        return ranks / int(self._count)
