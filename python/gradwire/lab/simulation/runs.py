"""simulate(): all_reduces on networks of any size, and what slow ranks and failures cost a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from statistics import NormalDist, fmean
from typing import Any

from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire._model import CostModel
from gradwire._schedules.schedule import Schedule
from gradwire.lab.simulation import exchange
from gradwire.lab.simulation.topology import Topology

ALL = "all"
_POINTS = 1000  # of the distribution of the slowest rank
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Run:
    """One all_reduce: its seconds, and how they were found: "events" or "closed form"."""

    algorithm: str
    ranks: int
    nbytes: float
    seconds: float
    found_by: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self)}


def simulate(
    algorithms: Sequence[str | Schedule],
    ranks: Sequence[int],
    sizes: Sequence[float],
    topology: Topology,
    *,
    codec: str = "none",
    slow: float = 1.0,
    base: CostModel | None = None,
    progress: Progress | None = None,
) -> list[Run]:
    """Simulates every algorithm for every number of ranks and bytes.

    "all" are those that `algorithm="auto"` tries, and star. With `slow`, rank 0 is so many times
    slower than the others, with its host's link. Raises InvalidArgument for what no simulation
    covers.
    """
    exchange.check_codec(codec)
    counts = [arguments.whole(each, "ranks", least=1) for each in ranks]
    model = topology.model(base)
    cases = [
        (name, count, size)
        for count in counts
        for name in _names(algorithms, count, topology, codec)
        for size in sizes
    ]
    tell = progress or (lambda *_: None)
    found = []
    for index, (name, count, size) in enumerate(cases):
        tell(index / len(cases), f"{count} ranks")
        seconds, how = exchange.seconds(name, size, count, topology, model, codec=codec, slow=slow)
        text = name.name if isinstance(name, Schedule) else name
        found.append(Run(text, count, size, seconds, how))
    tell(1.0, "")
    return found


def _names(
    algorithms: Sequence[str | Schedule], ranks: int, topology: Topology, codec: str
) -> list[str | Schedule]:
    found: list[str | Schedule] = []
    for each in algorithms:
        if isinstance(each, Schedule):
            found.append(_checked(each, ranks))
        elif each == ALL:
            found += exchange.algorithms(ranks, min(topology.per_host, ranks), codec)
        else:
            found.append(each)
    return found


def _checked(schedule: Schedule, ranks: int) -> Schedule:
    """A user's schedule; raises InvalidArgument unless it is an all_reduce that can run."""
    if schedule.ranks != ranks:
        raise InvalidArgument(f"the schedule is for {schedule.ranks} ranks, and not {ranks}")
    if schedule.collective != "all_reduce":
        raise InvalidArgument(f"the schedule is of {schedule.collective}, and not all_reduce")
    if not schedule.verify().ok:
        raise InvalidArgument("the schedule is wrong: see `gradwire schedule verify`")
    return schedule


def fastest(runs: Sequence[Run]) -> dict[tuple[int, float], Run]:
    """The fastest run by ranks and bytes."""
    best: dict[tuple[int, float], Run] = {}
    for each in runs:
        key = each.ranks, each.nbytes
        if key not in best or each.seconds < best[key].seconds:
            best[key] = each
    return best


@dataclass(frozen=True)
class Step:
    """A synchronous step, in seconds: the slowest rank computes, then all exchange."""

    compute: float
    slowest: float
    exchange: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.slowest + self.exchange

    @property
    def efficiency(self) -> float:
        """The share in which a rank of median speed computes."""
        return self.compute / self.seconds


def step(compute: float, ranks: int, exchanged: float, *, slow: float, spread: float) -> Step:
    """A step in which ranks compute for `compute` seconds at the median.

    Logarithms of the times have the standard deviation `spread`; one rank takes `slow` times as
    long. Nothing overlaps.
    """
    late = max(slow, slowest(ranks, spread))
    return Step(compute, compute * late, exchanged)


def slowest(ranks: int, spread: float) -> float:
    """The mean time of the slowest of `ranks` in a step, over the median of one.

    Times are independent and lognormal; `spread` is the standard deviation of their logarithm. The
    slowest of p has the distribution F^p, whose quantiles are averaged.
    """
    if not 0 <= spread <= 10:
        raise InvalidArgument(f"spread={spread} is not from 0 to 10")
    normal = NormalDist(0.0, spread or 1e-300)
    below = ((point + 0.5) / _POINTS for point in range(_POINTS))
    shares = (min(each ** (1 / ranks), 1 - 1e-16) for each in below)
    return fmean(exp(normal.inv_cdf(each)) for each in shares)
