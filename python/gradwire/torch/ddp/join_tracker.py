"""JoinTracker: knows which ranks still train within DDP's `join()`; the others average zeros.

With `divide_by_initial_world_size=False` DDP averages over the ranks that still train. Its reducer
leaves that to a hook, too, and does not tell it how many there are.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._calls.work import Work
from gradwire._communicator import Communicator
from gradwire.torch.exchange.gradient_scale import GradientScale


class JoinTracker:
    """Tracks whether this rank trains, and counts those that do when averages are over them."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._forward = False  # whether a forward ran since the last step began
        self._trains = False
        self._count = torch.zeros(1, dtype=torch.int64, device="cpu")

    @property
    def in_join(self) -> bool:
        """Whether ranks may have no inputs left; the same on all ranks."""
        config = getattr(self._ddp(), "_join_config", None)  # torch offers no public way to it
        return config is not None and bool(config.enable)

    @property
    def has_joined(self) -> bool:
        """Whether this rank has no inputs left in the step under way."""
        return self.in_join and not self._trains

    def note_forward(self) -> None:
        """Notes a forward: this rank trains in this step."""
        self._forward = True

    def begin_step(self) -> bool:
        """Begins a step, whose forward, if there was one, is over.

        Returns whether its averages are over the ranks that train; the same on all ranks.
        """
        self._trains, self._forward = self._forward, False
        return self.in_join and not getattr(self._ddp(), "_divide_by_initial_world_size", True)

    def agree_on_scale(self, communicator: Communicator, scale: GradientScale) -> GradientScale:
        """The scale of the ranks that train: the others no longer follow scaler and optimizer."""
        scales = [scale.loss_scale, *scale.rates]
        own = torch.tensor(scales, dtype=torch.float64, device="cpu")
        agreed = own * self._trains
        communicator.all_reduce(agreed, op="max")
        loss_scale, *rates = agreed.tolist()
        return replace(scale, loss_scale=loss_scale, rates=tuple(rates))

    def share_count(self, communicator: Communicator) -> Work:
        """Tells the other ranks whether this one trains in this step."""
        self._count = torch.tensor([self._trains], dtype=torch.int64, device="cpu")
        work: Work = communicator.all_reduce(self._count, op="sum", async_op=True)
        return work

    def correction(self, ranks: int) -> float:
        """The factor from the average over all ranks to that over those that train.

        Valid once the work of `share_count` is over.
        """
        return ranks / int(self._count)
