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
from gradwire.torch._step.repacking import Bucket


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

    def put(self, bucket: Bucket, is_last: bool, loss_scale: float) -> Sequence[Bucket]:
        """Takes a bucket; returns all buckets, clipped, after the last one, and none before."""
        self._buckets.append(bucket)
        if not is_last:
            return ()
        ready, self._buckets = self._buckets, []
        parts = [part for each in ready for part in each.whole]
        norm = math.hypot(*map(_norm, parts))
        limit = self._limit * loss_scale
        if (
            math.isfinite(norm) and norm > limit
        ):  # Inf passes, for the other ranks must skip the step too
            for part in parts:
                part.mul_(limit / norm)
        return ready


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
