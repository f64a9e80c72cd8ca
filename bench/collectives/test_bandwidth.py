"""Bandwidth of collectives: pytest bench/collectives --benchmark-only.

The times in pytest-benchmark's table are the ranks' own: one call on the slowest rank.
"""

from __future__ import annotations

from typing import Any

import pytest
from gradwire.lab.tuning.measure import Case, Result

from bench.collectives.rank_pool import RankPool

ROUNDS = 7


class RankClock:
    """Shows the seconds that ranks have measured, so that no command's way to them is counted."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """What pytest-benchmark takes for the time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets what a rank has measured pass."""
        self._now += seconds


CLOCK = RankClock()


@pytest.mark.benchmark(timer=CLOCK)
def test_bandwidth(benchmark: Any, pool: RankPool, case: Case, nbytes: int) -> None:
    benchmark.group = f"{case.collective} {nbytes} B, p={pool.ranks} {pool.transport}"
    calls = pool.fit(case)
    benchmark.pedantic(lambda: CLOCK.advance(pool.seconds(case, calls)), rounds=ROUNDS)
    if benchmark.stats is not None:  # None with --benchmark-disable
        result = Result(case, pool.ranks, benchmark.stats.stats.median, wrong=0)
        benchmark.extra_info.update(
            bytes=case.nbytes,
            ranks=pool.ranks,
            transport=pool.transport,
            algorithm=case.algorithm,
            algbw_GBps=float(f"{result.algbw:.4g}"),
            busbw_GBps=float(f"{result.busbw:.4g}"),
        )
