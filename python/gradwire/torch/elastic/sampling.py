"""Sampler: which samples each rank takes in a step, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, NamedTuple

import torch

from gradwire._base import arguments
from gradwire._errors import InvalidArgument

CONSTANT, PROPORTIONAL = "constant", "proportional"


class SamplePart(NamedTuple):
    """The samples of one backward of a rank, and the weight of their mean loss."""

    indices: torch.Tensor  # int64
    weight: float  # of the gradient in the average over ranks


class Sampler:
    """The order of a training's samples, and the position in it, which all ranks share.

    The samples of all epochs form one sequence, shuffled anew for each epoch. A step takes the next
    of them, and every rank an equal part of these. Only a step that all ranks make moves the
    position: a step that was broken off is made again, with parts for the ranks that are left. So
    no sample is lost or taken twice, whoever comes and goes.
    """

    def __init__(
        self,
        data: int | Sized,
        batch: int,
        *,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """Takes a number of samples, or a dataset with a length, whose samples are then collated.

        `batch` is the most samples of one backward on one rank. Raises InvalidArgument.
        """
        self.data = None if isinstance(data, int) else data
        size = data if isinstance(data, int) else len(data)
        self.size = arguments.whole(size, "the number of samples", least=1)
        self.batch = arguments.whole(batch, "batch", least=1)
        self.epochs = arguments.whole(epochs, "epochs", least=1)
        self.shuffle = arguments.flag(shuffle, "shuffle")
        self.seed = arguments.whole(seed, "seed", least=0)
        self.position = 0
        self._order: tuple[int, torch.Tensor] = (
            -1,
            torch.empty(0, dtype=torch.int64, device="cpu"),
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.size

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be the same on all ranks."""
        names = ("size", "batch", "epochs", "shuffle", "seed")
        return {name: getattr(self, name) for name in names}

    def samples(self, world_size: int, reference: int) -> int:
        """The number of samples of the next step: `batch` for each of the `reference` ranks.

        Fewer at the end; 0 when there is not one for each of `world_size` ranks any more.
        """
        left = self.epochs * self.size - self.position
        found = min(self.batch * reference, left)
        return found if found >= world_size else 0

    def parts(self, samples: int, rank: int, world_size: int) -> list[SamplePart]:
        """A rank's part of the next step's samples, in parts of at most `batch` and equal sizes.

        Equal, but for one sample: a batch of one is too small for BatchNorm.
        """
        begin, end = (samples * each // world_size for each in (rank, rank + 1))
        own = self._take(self.position + begin, self.position + end)
        count = math.ceil(len(own) / self.batch)
        parts = own.tensor_split(count) if count > 1 else [own]
        return [SamplePart(each, len(each) * world_size / samples) for each in parts]

    def collated(self, indices: torch.Tensor) -> Any:
        """The samples of a dataset as one batch; the indices themselves where there is none."""
        if self.data is None:
            return indices
        data: Any = self.data
        return torch.utils.data.default_collate([data[i] for i in indices.tolist()])

    def _take(self, begin: int, end: int) -> torch.Tensor:
        parts = []
        while begin < end:
            epoch, first = divmod(begin, self.size)
            last = min(self.size, first + end - begin)
            parts.append(self._slice(epoch, first, last))
            begin += last - first
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slice(self, epoch: int, first: int, last: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(first, last, device="cpu")
        if self._order[0] != epoch:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = epoch, torch.randperm(self.size, generator=random, device="cpu")
        return self._order[1][first:last].clone()  # the loop may change it


def require_way(global_batch: Any) -> str:
    """Checks what stays when the number of ranks changes; raises InvalidArgument."""
    if global_batch not in (CONSTANT, PROPORTIONAL):
        raise InvalidArgument(
            f"global_batch={global_batch!r}: give {CONSTANT!r}, and ranks accumulate gradients "
            f"over more batches when there are fewer of them, or {PROPORTIONAL!r}, and the "
            "learning rate follows their number"
        )
    return str(global_batch)
