"""Does codec="auto" choose nearly the fastest codec? A grid of models, computing and links.

    python -m bench.planning.choices             # simulated: about a minute
    python -m bench.planning.choices --emulated  # some of it trained by two ranks, in two minutes

Models have 1 to 1,000 M parameters and compute for 10 to 1,000 ms a step; links have 0.1 to 25
Gbit/s. "auto" is given simulated links whose calls it times, each up to 10 % longer than the cost
model says (`SimulatedRanks`), and the time of computing. What a step then takes with each codec is
predicted by the planner of `gradwire advise`, by events and by the fastest algorithm. Prints each
case in which the choice is more than 1.1 times slower than the best one, and ends with 1 then.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gradwire import CostModel, Schedule, _core
from gradwire.lab.planner.exchanges import Cluster
from gradwire.lab.planner.steps import PlannedBucket, buckets, synchronous
from gradwire.lab.planner.tables.network import LINEAR, Layer, Network
from gradwire.lab.simulation.topology import flat
from gradwire.torch import Compression
from gradwire.torch.exchange.automatic import choose
from gradwire.torch.exchange.defaults import Model
from torch import nn

from bench.common import job

RATES = (0.1, 0.3, 1.0, 3.0, 10.0, 25.0)  # Gbit/s
PARAMETERS = (1, 10, 100, 1000)  # millions
COMPUTE = (0.01, 0.1, 1.0)  # seconds
RANKS = (2, 8)
EMULATED = ((1, 0.01, 0.1), (1, 0.1, 0.1), (1, 1.0, 0.1), (4, 0.1, 1.0), (4, 0.5, 1.0))
CLOSE = 1.1  # the goal: so many times the best one's step
_LAYERS = 16
_LATENCY = 50e-6  # seconds
_NOISE = 0.1
_OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


class SimulatedRanks:
    """Enough of a communicator: ranks on hosts of their own, whose calls take simulated time."""

    def __init__(
        self, costs: CostModel, hosts: Sequence[Sequence[int]], noise: float = 0.0
    ) -> None:
        """`costs` are the true ones; a call takes up to that share longer."""
        self.hosts, self.size = hosts, sum(map(len, hosts))
        self.cost_model = CostModel(_guesses(costs.parameters))
        self.seconds = 0.0  # since the beginning
        self._costs, self._noise, self._random = costs, noise, random.Random(1)

    def clock(self) -> float:
        """The simulated time, in seconds."""
        return self.seconds

    def all_reduce(
        self, x: Any, *, op: str, algorithm: str = "ring", codec: str = "none", **_: Any
    ) -> None:
        """Takes the time of a call, and leaves the array as it is."""
        hosts = [list(each) for each in self.hosts]
        schedule = Schedule.generate(algorithm, self.size, collective="all_reduce")._core
        its = self._costs._core.predict(schedule, float(x.nbytes), hosts, _core.Codec(codec))
        self.seconds += its * (1 + self._noise * self._random.random())


def _guesses(true: dict[str, float]) -> dict[str, float]:
    """What ranks without `gradwire tune` take costs to be, where links have any."""
    built_in = CostModel().parameters
    within = {"within.beta": built_in["between.beta"]} if true["within.beta"] else {}
    return built_in | within


@dataclass(frozen=True)
class Case:
    """A model of so many million parameters, seconds of computing, Gbit/s, ranks and optimizer."""

    parameters: int
    compute: float
    rate: float
    ranks: int
    optimizer: str

    def __str__(self) -> str:
        return (
            f"{self.parameters:>5} M, {self.compute * 1e3:>5.0f} ms, {self.rate:>5} Gbit/s, "
            f"{self.ranks} ranks, {self.optimizer}"
        )


@dataclass(frozen=True)
class Result:
    """A case, what "auto" chose at first and after the first steps, and the seconds of steps."""

    case: Case
    first: str
    chosen: str
    steps: dict[str, float] = field(hash=False)

    @property
    def slower(self) -> float:
        """The factor by which the choice is slower than the best one."""
        return self.steps[self.chosen] / min(self.steps.values())

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {its * 1e3:.4g} ms" for name, its in self.steps.items())
        chosen = self.chosen if self.first == self.chosen else f"{self.first}, then {self.chosen}"
        return f"{self.case}: {chosen}: {self.slower:.2f} times the best ({steps})"


def results(cases: Iterable[Case]) -> Iterator[Result]:
    """What "auto" chooses, and how long steps take."""
    clusters: dict[tuple[float, int], Cluster] = {}
    for case in cases:
        key = case.rate, case.ranks
        if key not in clusters:
            link = flat(f"{case.rate}gbit,{_LATENCY * 1e6}us")
            clusters[key] = Cluster(case.ranks, link, CostModel())
        yield _result(case, clusters[key])


def grid(
    parameters: Sequence[int] = PARAMETERS,
    compute: Sequence[float] = COMPUTE,
    rates: Sequence[float] = RATES,
    ranks: Sequence[int] = RANKS,
) -> list[Case]:
    """All cases of these."""
    every = itertools.product(parameters, compute, rates, ranks, _OPTIMIZERS)
    return [Case(*each) for each in every]


def _result(case: Case, cluster: Cluster) -> Result:
    width = round(math.sqrt(case.parameters * 1e6 / _LAYERS))
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS)))
    hosts = [[rank] for rank in range(case.ranks)]
    ranks = SimulatedRanks(cluster.model, hosts, _NOISE)
    optimizer = _OPTIMIZERS[case.optimizer](module.parameters(), lr=0.1)
    model = Model(module, dict(module.named_parameters()))
    chosen, later = choose(model, ranks, Compression("auto"), optimizer, ranks.clock)  # type: ignore[arg-type]
    assert later is not None
    last = later.settings(case.compute).last
    codecs = ["none", "lossless", "fp16", "int8"]
    codecs += ["int4", "lowrank"] if case.optimizer == "SGD" else []
    parts = buckets(_network(width))
    steps = {each: _step(parts, case.compute, cluster, each) for each in codecs}
    return Result(case, str(chosen.last), str(last), steps)


def _network(width: int) -> Network:
    size, flops = width * width, 2.0 * width * width
    layers = (
        Layer(f"l{i}", LINEAR, size, size, width, width, flops, ((width, width),))
        for i in range(_LAYERS)
    )
    return Network("equal matrices", "a vector", tuple(layers))


def _step(parts: Sequence[PlannedBucket], compute: float, cluster: Cluster, codec: str) -> float:
    return min(
        synchronous(parts, compute, cluster, algorithm, codec).step
        for algorithm in cluster.algorithms(codec)
    )


def _emulated() -> int:
    """Trains two ranks in each case; returns the exit code."""
    worst = 0.0
    for parameters, compute, rate in EMULATED:
        setting = {"GRADWIRE_LINK": f"{rate * 1e3:g}mbit,{_LATENCY * 1e6:g}us"}
        arguments = ["--parameters", str(parameters), "--compute", str(compute)]
        found = job.run("bench.planning.choice_ranks", arguments, 2, setting)
        best = min(found["steps"].values())
        worst = max(worst, found["steps"][found["chosen"]] / best)
        steps = ", ".join(f"{name} {its * 1e3:.4g} ms" for name, its in found["steps"].items())
        print(
            f"{parameters:>5} M, {compute * 1e3:>5.0f} ms, {rate:>5} Gbit/s: {found['chosen']}: "
            f"{found['steps'][found['chosen']] / best:.2f} times the best ({steps}; auto "
            f"{found['auto'] * 1e3:.4g} ms)"
        )
    return 1 if worst > CLOSE else 0


def main() -> int:
    """Prints the choices that are not close, and how many are; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="print every case")
    parser.add_argument("--emulated", action="store_true", help="train, over emulated links")
    options = parser.parse_args()
    if options.emulated:
        return _emulated()
    found = list(results(grid()))
    far = [each for each in found if each.slower > CLOSE]
    for each in found if options.all else far:
        print(each)
    worst = max(each.slower for each in found)
    chosen = Counter(each.chosen for each in found).most_common()
    print(
        f"{len(found) - len(far)} of {len(found)} within {CLOSE} times the best; worst {worst:.3f}"
    )
    print("chosen:", ", ".join(f"{codec} {count}" for codec, count in chosen))
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
