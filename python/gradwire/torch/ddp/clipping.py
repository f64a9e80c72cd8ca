"""Local gradient clipping (Lin et al. 2018, "Deep Gradient Compression", sec. 3.2).

Clipping the average would miss the gradients that wait in residuals. So each rank clips its own
gradients before they are added to its residuals. The sum of N independent gradients of norm
c / sqrt(N) has norm c, so that is the norm they are clipped to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.rules import Bucket


class Clipping:
    """Clips one rank's gradients, all parameters together; holds buckets until all are there."""

    def __init__(self, norm: float, ranks: int) -> None:
        """`norm` is the limit for the sum of all ranks' gradients. Raises InvalidArgument."""
        if not (arguments.number(norm, "clip_norm") > 0 and math.isfinite(norm)):
            raise InvalidArgument(
                f"clip_norm={norm} is no norm: give a finite one above 0, or None"
            )
        self._limit = norm / math.sqrt(ranks)
        self._buckets: list[Bucket] = []

    def begin_step(self) -> None:
        """Drops the buckets of an unfinished step."""
        self._buckets = []

    def put(
        self, bucket: Bucket, is_last: bool, loss_scale: float | torch.Tensor
    ) -> Sequence[Bucket]:
        """Takes a bucket; returns all buckets, clipped, after the last one, and none before.

        On a GPU norm and factor stay there, and nothing waits for them.
        """
        self._buckets.append(bucket)
        if not is_last:
            return ()
        ready, self._buckets = self._buckets, []
        parts = [part for each in ready for part in each.whole]
        norm = torch.linalg.vector_norm(torch.stack([_norm(part) for part in parts]))
        factor = self._factor(norm, loss_scale)
        if factor.is_cuda or factor != 1:
            for part in parts:
                scale_by(part, factor)
        return ready

    def _factor(self, norm: torch.Tensor, loss_scale: float | torch.Tensor) -> torch.Tensor:
        """The factor for all gradients, float64; 1 for Inf, since all ranks must skip the step."""
        if isinstance(loss_scale, torch.Tensor):
            loss_scale = loss_scale.double().view(())
        limit = loss_scale * self._limit
        clips = torch.isfinite(norm) & (norm > limit)
        return torch.where(clips, limit / norm, torch.ones_like(norm))


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def scale_by(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiplies by a factor of no dimensions, as by a number: one of 16 bits in float32."""
    if tensor.dtype.itemsize > 2:
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.float().mul_(factor))
