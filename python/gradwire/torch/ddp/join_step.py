"""JoinStep: a step within DDP's `join()`, in which ranks without inputs average zeros.

With `divide_by_initial_world_size=False` DDP averages over the ranks that still train. Its reducer
leaves that to a hook, too, and does not tell it how many there are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._calls.on_cpu import Work
from gradwire._communicator import Communicator
from gradwire.torch.exchange.gradient_scale import GradientScale


class JoinStep:
    """One step: whether this rank trains in it, and how many ranks do."""

    def __init__(self, ddp: DistributedDataParallel | None, *, trains: bool) -> None:
        """`trains` says that this rank has inputs left."""
        self.trains = trains
        self.counts = not getattr(ddp, "_divide_by_initial_world_size", True)
        """Whether averages are over the ranks that train; the same on all ranks."""
        self._count = torch.tensor([trains], dtype=torch.int64, device="cpu")

    def agree_on_scale(self, communicator: Communicator, scale: GradientScale) -> GradientScale:
        """The scale of the ranks that train: the others no longer follow scaler and optimizer."""
        scales = [scale.loss_scale, *scale.rates]
        own = torch.tensor(scales, dtype=torch.float64, device="cpu")
        agreed = own * self.trains
        communicator.all_reduce(agreed, op="max")
        loss_scale, *rates = agreed.tolist()
        return replace(scale, loss_scale=loss_scale, rates=tuple(rates))

    def share_count(self, communicator: Communicator) -> Work:
        """Tells the other ranks whether this one trains in this step."""
        work: Work = communicator.all_reduce(self._count, op="sum", async_op=True)
        return work

    def correction(self, ranks: int) -> float:
        """The factor from the average over all ranks to that over those that train.

        Valid once the work of `share_count` is over.
        """
        return ranks / int(self._count)
