"""Checkpoints by Young and Daly, and slow ranks, against plain simulations."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire import InvalidArgument
from gradwire.lab.simulation.checkpoints import Failures
from gradwire.lab.simulation.runs import slowest

RUN = Failures(between=1e7, hosts=1000, checkpoint=100.0, restart=50.0)  # one in 10,000 s


def simulated(run: Failures, interval: float, work: float, seed: int) -> float:
    """The share of time lost by a run that fails at random."""
    random = np.random.default_rng(seed)
    done = clock = 0.0
    failure = random.exponential(run.mean)
    while done < work:
        end = clock + interval + run.checkpoint
        if end <= failure:
            done, clock = done + interval, end
            continue
        clock = failure + run.restart
        failure = clock + random.exponential(run.mean)
    return 1 - done / clock


def test_the_share_lost_is_that_of_a_simulated_run() -> None:
    for interval in (300.0, RUN.daly, 6000.0):
        assert RUN.lost(interval) == pytest.approx(simulated(RUN, interval, 5e7, 1), abs=0.01)


def test_dalys_interval_is_nearly_the_best() -> None:
    assert RUN.young == pytest.approx(np.sqrt(2 * 100 * 10_000))
    least = min(RUN.lost(each) for each in np.geomspace(100, 10_000, 400))
    assert RUN.lost(RUN.daly) == pytest.approx(least, abs=1e-4)
    assert RUN.lost(RUN.daly) <= RUN.lost(RUN.young)


def test_a_run_that_only_writes_checkpoints_gets_nowhere() -> None:
    hopeless = Failures(between=100.0, hosts=100, checkpoint=1000.0)
    assert hopeless.daly == hopeless.mean == 1.0
    assert hopeless.lost(hopeless.daly) == 1.0
    assert Failures(1.0, 1, 1.0, restart=1e9).lost(1.0) == 1.0


@pytest.mark.parametrize(
    "wrong", [{"between": 0.0}, {"checkpoint": -1.0}, {"hosts": 0}, {"restart": -1.0}]
)
def test_impossible_times_are_refused(wrong: dict[str, float]) -> None:
    given = {"between": 1.0, "hosts": 1, "checkpoint": 1.0, "restart": 0.0, **wrong}
    with pytest.raises(InvalidArgument):
        Failures(**given)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        RUN.lost(0.0)


@pytest.mark.parametrize(("ranks", "spread"), [(1, 0.3), (64, 0.1), (1000, 0.05)])
def test_the_slowest_rank_is_that_of_samples(ranks: int, spread: float) -> None:
    random = np.random.default_rng(2)
    sampled = np.exp(spread * random.standard_normal((4000, ranks))).max(axis=1).mean()
    assert slowest(ranks, spread) == pytest.approx(sampled, rel=0.02)


def test_more_ranks_wait_longer() -> None:
    found = [slowest(ranks, 0.05) for ranks in (1, 64, 4096, 100_000)]
    assert found == sorted(found)
    assert slowest(100_000, 0.0) == pytest.approx(1)
    with pytest.raises(InvalidArgument, match="spread"):
        slowest(4, -0.1)
