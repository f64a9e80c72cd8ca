"""Sentences on what pays: compression, more ranks. Scaling, and the batch that suffices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from gradwire import _core
from gradwire._base import units
from gradwire.lab.planner.exchanges import LOSSLESS, Cluster
from gradwire.lab.planner.steps import SYNCHRONOUS, Prediction, buckets, synchronous
from gradwire.lab.planner.tables.network import Network

WORTH = 1.05  # a change that saves less does not pay
_RATES = 1e5, 1e14  # bits per second, between which a rate is sought
_WAITING = 0.1  # of a step
_MOST_BATCH = 1 << 20

Row = tuple[int, float, float]


def loss(codec: str) -> int:
    """The harm of a codec to training: 0 if no bit is lost, 1 if unbiased, 2 if biased."""
    if codec in ("none", LOSSLESS):
        return 0
    return 2 if _core.Codec(codec).biased else 1


class Judge:
    """Judges one model on one cluster, from the predictions for it."""

    def __init__(
        self,
        network: Network,
        batch: int,
        compute: float,
        cluster: Cluster,
        predictions: Sequence[Prediction],
    ) -> None:
        self._parts = buckets(network)
        self._batch = batch
        self._compute = compute
        self._cluster = cluster
        found = [each for each in predictions if each.mode == SYNCHRONOUS]
        self._dense = _fastest(each for each in found if each.codec == "none")
        encoded = [each for each in found if each.codec != "none"]
        self._encoded = _fastest(iter(encoded)) if encoded else None
        unbiased = [each for each in encoded if loss(each.codec) == 1]
        self._unbiased = _fastest(iter(unbiased)) if unbiased else None
        exact = [each for each in encoded if loss(each.codec) == 0]
        self._exact = _fastest(iter(exact)) if exact else None

    def sentences(self) -> Iterator[str]:
        """Says whether compression pays, and whether these ranks do."""
        if self._cluster.ranks == 1:
            yield "One rank exchanges nothing."
            return
        if self._encoded is not None:
            yield self._compression(self._encoded)
        yield self._ranks()

    def weak(self) -> Iterator[Row]:
        """Ranks, seconds of a step and speed-up, with the same batch on every rank, no codec."""
        for ranks in _powers(self._cluster.ranks):
            step = self._step(self._cluster.of(ranks), self._compute)
            yield ranks, step, ranks * self._compute / step

    def strong(self) -> Iterator[Row]:
        """Ranks, seconds and speed-up where the ranks share the batch that one rank has.

        Computing is taken to shrink with the batch.
        """
        for ranks in _powers(self._cluster.ranks):
            step = self._step(self._cluster.of(ranks), self._compute / ranks)
            yield ranks, step, self._compute / step

    def least_batch(self) -> int | None:
        """The samples a rank from which it waits for less than a tenth of a step, without codec."""
        each = self._compute / self._batch

        def waits(batch: int) -> bool:
            step = self._step(self._cluster, each * batch)
            return (step - each * batch) / step >= _WAITING

        low, high = 0, 1
        while waits(high):
            low, high = high, 2 * high
            if high > _MOST_BATCH:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if waits(middle) else (low, middle)
        return high

    def _compression(self, best: Prediction) -> str:
        gain = self._dense.step / best.step
        bits = self._turning_point(best.codec)
        if gain >= WORTH:
            until = f" From about {units.show_rate(bits)} on it would not." if bits else ""
            also = ""
            if self._unbiased is not None and self._unbiased.codec != best.codec:
                also = f"; the best unbiased codec, {self._unbiased.codec}, takes "
                also += units.show_seconds(self._unbiased.step)
            also += self._without_loss(best)
            return (
                f"Compression pays: a step takes {units.show_seconds(best.step)} with "
                f"{best.codec}, {gain:.1f} times as fast as without{also}.{until}"
            )
        from_ = f"It would below about {units.show_rate(bits)}." if bits else "It would on no link."
        return (
            f"Compression does not pay: the best codec, {best.codec}, saves "
            f"{max(0.0, 1 - 1 / gain):.1%} of a step. {from_}"
        )

    def _without_loss(self, best: Prediction) -> str:
        exact = self._exact
        if exact is None or exact.codec == best.codec or self._dense.step < WORTH * exact.step:
            return ""
        took = units.show_seconds(exact.step)
        return f"; {exact.codec}, by which every bit stays as without, takes {took}"

    def _turning_point(self, codec: str) -> float | None:
        """The rate of the links above which the codec does not pay."""

        def pays(bits: float) -> bool:
            at = self._cluster.at_rate(bits)
            return self._step(at, self._compute) >= WORTH * self._step(at, self._compute, codec)

        return _boundary(pays)

    def _ranks(self) -> str:
        found = [self._dense] if self._encoded is None else [self._dense, self._encoded]
        best = _fastest(iter(found))
        ranks = self._cluster.ranks
        speed_up = ranks * best.efficiency
        most, fewer = max((self._speed_up(few, best.codec), few) for few in _powers(ranks)[:-1])
        name = "no codec" if best.codec == "none" else best.codec
        if speed_up >= WORTH * most:
            return (
                f"{ranks} ranks pay: with {name} they do the work of {speed_up:.1f} "
                f"(efficiency {best.efficiency:.0%}), {fewer} that of {most:.1f}."
            )
        bits = self._rate_for_ranks(best.codec, fewer)
        from_ = f" From about {units.show_rate(bits)} on they would." if bits else ""
        return (
            f"More than {fewer} ranks do not pay: {ranks} do the work of {speed_up:.1f}, and "
            f"{fewer} that of {most:.1f}.{from_}"
        )

    def _speed_up(self, ranks: int, codec: str) -> float:
        """The work that fewer ranks do, with the codec or without, over that of one."""
        at = self._cluster.of(ranks)
        step = min(self._step(at, self._compute, each) for each in {"none", codec})
        return ranks * self._compute / step

    def _rate_for_ranks(self, codec: str, fewer: int) -> float | None:
        """The rate of the links from which all ranks do more than `fewer`."""
        ranks = self._cluster.ranks

        def fails(bits: float) -> bool:
            at = self._cluster.at_rate(bits)
            many, few = (self._step(at.of(each), self._compute, codec) for each in (ranks, fewer))
            return ranks / many < WORTH * fewer / few

        return _boundary(fails)

    def _step(self, cluster: Cluster, compute: float, codec: str = "none") -> float:
        """The seconds of a step by the fastest algorithm."""
        return min(
            synchronous(self._parts, compute, cluster, algorithm, codec).step
            for algorithm in cluster.algorithms(codec)
            if algorithm != "star" or cluster.ranks == 2
        )


def _fastest(found: Iterator[Prediction]) -> Prediction:
    return min(found, key=lambda each: each.step)


def _powers(ranks: int) -> list[int]:
    """Returns 1, 2, 4, … and the number of ranks."""
    return [*(1 << i for i in range((ranks - 1).bit_length())), ranks] if ranks > 1 else [1]


def _boundary(holds: Callable[[float], bool]) -> float | None:
    """The rate up to which `holds(rate)` is true; None if it is nowhere, or everywhere."""
    low, high = (math.log(rate) for rate in _RATES)
    if not holds(math.exp(low)) or holds(math.exp(high)):
        return None
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return float(f"{math.exp((low + high) / 2):.2g}")
