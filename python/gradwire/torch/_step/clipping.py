"""Local gradient clipping (Lin et al. 2018, "Deep Gradient Compression", sec. 3.2).

Gradients that wait in residuals would escape from a clipping of their average. So each rank clips
its own before they are added to what was held back. N ranks whose gradients are independent, each
of norm c / sqrt(N), have a sum of norm c: that is what they are clipped to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire._errors import InvalidArgument
from gradwire.torch._step.packing import Parcel


class Clipping:
    """Of one rank's gradients, all parameters together; holds buckets until all are there."""

    def __init__(self, norm: float, ranks: int) -> None:
        """`norm` is that of the sum of all ranks' gradients. Raises InvalidArgument."""
        if not (norm > 0 and math.isfinite(norm)):
            raise InvalidArgument(
                f"clip_norm={norm} is no norm: give a finite one above 0, or None"
            )
        self._limit = norm / math.sqrt(ranks)
        self._buckets: list[Parcel] = []

    def begin_step(self) -> None:
        """Forgets buckets of a step that was broken off."""
        self._buckets = []

    def put(self, bucket: Parcel, is_last: bool, loss_scale: float) -> Sequence[Parcel]:
        """All buckets, clipped, with the last one; none before."""
        self._buckets.append(bucket)
        if not is_last:
            return ()
        ready, self._buckets = self._buckets, []
        parts = [part for each in ready for part in each.whole]
        norm = math.hypot(*map(_norm, parts))
        limit = self._limit * loss_scale
        if math.isfinite(norm) and norm > limit:  # others must see that this step is to be skipped
            for part in parts:
                part.mul_(limit / norm)
        return ready


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
