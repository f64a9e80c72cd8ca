"""Predicted times of a step: gradients are averaged while backward goes on, bucket by bucket.

As in DistributedDataParallel (Li et al. 2020, "PyTorch Distributed", sec. 3.2): buckets are there
in the order in which backward has them, and one after the other is averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradwire.torch.exchange.links import solve

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes: torch's defaults
_BACKWARD = 2 / 3  # of the time that computing takes: two products of matrices for one forward
_LEAST = 1e-6  # seconds

# The seconds in which a share of all gradients is averaged.
Exchange = Callable[[float], float]


class StepTimes:
    """The times of a step by codec, for gradients of so many bytes."""

    def __init__(
        self, nbytes: float, exchanges: Mapping[str, Exchange], *, hides: bool = True
    ) -> None:
        """With `hides`, averaging goes on beside backward; otherwise that waits for it."""
        self.nbytes, self._hides = nbytes, hides
        self._shares = [each / nbytes for each in _buckets(nbytes)]
        self._seconds = {
            codec: [known[share] for share in self._shares]
            for codec, exchange in exchanges.items()
            for known in ({share: exchange(share) for share in set(self._shares)},)
        }

    @property
    def codecs(self) -> Sequence[str]:
        """The codecs that it was given, in their order."""
        return [*self._seconds]

    def exchange(self, codec: str) -> float:
        """The seconds of averaging alone."""
        return sum(self._seconds[codec])

    def all(self, compute: float) -> dict[str, float]:
        """The seconds of a step that computes so long, by codec."""
        return {codec: self.step(codec, compute) for codec in self._seconds}

    def step(self, codec: str, compute: float) -> float:
        """The seconds of a step in which a rank computes for so many."""
        if not self._hides:
            return compute + self.exchange(codec)
        done, share = 0.0, 0.0
        for part, seconds in zip(self._shares, self._seconds[codec], strict=True):
            share += part
            ready = compute * (1 - _BACKWARD + _BACKWARD * share)
            done = max(done, ready) + seconds
        return max(compute, done)

    def compute(self, codec: str, step: float) -> float:
        """The seconds for which a rank computes in a step that takes so many.

        Of another codec nothing is known: it is taken to cost nothing.
        """
        if codec not in self._seconds:
            return step
        return solve(lambda its: self.step(codec, its), step, (_LEAST, max(step, _LEAST)))


def _buckets(nbytes: float) -> list[float]:
    found = [min(nbytes, _FIRST_BUCKET)]
    rest = nbytes - found[0]
    found += [_BUCKET] * int(rest // _BUCKET)
    return [*found, rest % _BUCKET] if rest % _BUCKET else found
