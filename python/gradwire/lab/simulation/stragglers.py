"""Slow ranks: a synchronous step waits for the slowest of all."""

from __future__ import annotations

from math import exp
from statistics import NormalDist, fmean

from gradwire._errors import InvalidArgument

_POINTS = 1000  # of the distribution of the slowest rank


def slowest(ranks: int, spread: float) -> float:
    """The mean time of the slowest of `ranks` in a step, over the median of one.

    Times are independent and lognormal; `spread` is the standard deviation of their logarithm. The
    slowest of p has the distribution F^p, whose quantiles are averaged.
    """
    if not 0 <= spread <= 10:
        raise InvalidArgument(f"spread={spread} is not from 0 to 10")
    normal = NormalDist(0.0, spread or 1e-300)
    below = ((point + 0.5) / _POINTS for point in range(_POINTS))
    return fmean(_exp(normal, each ** (1 / ranks)) for each in below)


def _exp(normal: NormalDist, share: float) -> float:
    return exp(normal.inv_cdf(min(share, 1 - 1e-16)))
