"""Ranks without inputs left, within DDP's `join()`: they take part with zeros.

With `divide_by_initial_world_size=False` DDP averages over those that still train. Its reducer
leaves that to a hook, too, and does not tell it how many these are.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._calls.work import Work
from gradwire._communicator import Communicator
from gradwire.torch._step.units import Units


class Active:
    """Which ranks train, and how many where averages are to be over these."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._forward = False  # went through the model since the last step began
        self._trains = False
        self._count = torch.zeros(1, dtype=torch.int64)

    @property
    def in_join(self) -> bool:
        """Whether ranks may have no inputs left; the same on all ranks."""
        config = getattr(self._ddp(), "_join_config", None)  # torch offers no public way to it
        return config is not None and bool(config.enable)

    @property
    def counts(self) -> bool:
        """Whether DDP is to divide by those that train; the same on all ranks."""
        return self.in_join and not getattr(self._ddp(), "_divide_by_initial_world_size", True)

    @property
    def joined(self) -> bool:
        """Whether this rank has no inputs left in the step under way."""
        return self.in_join and not self._trains

    def note_forward(self) -> None:
        """This rank trains in this step."""
        self._forward = True

    def begin_step(self) -> None:
        """Its forward, if there was any, is over."""
        self._trains, self._forward = self._forward, False

    def agree(self, communicator: Communicator, units: Units) -> Units:
        """Those of the ranks that train; who does not no longer follows scaler and optimizer."""
        own = torch.tensor([units.loss_scale, *units.rates], dtype=torch.float64)
        agreed = own * self._trains
        communicator.all_reduce(agreed, op="max")
        loss_scale, *rates = agreed.tolist()
        return replace(units, loss_scale=loss_scale, rates=tuple(rates))

    def share(self, communicator: Communicator) -> Work:
        """Tells the other ranks whether this one trains in this step."""
        self._count = torch.tensor([int(self._trains)])
        work: Work = communicator.all_reduce(self._count, op="sum", async_op=True)
        return work

    def factor(self, ranks: int) -> float:
        """From the average over all ranks to that over those that train, once the work is over."""
        return ranks / int(self._count)
