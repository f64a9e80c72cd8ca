"""What Sandblaster L-BFGS reaches after some passes, beside SGD, Adam and L-BFGS in one process.

    python -m bench.asynchronous.sandblaster            # 5 minutes
    python -m bench.asynchronous.sandblaster --quick    # fewer samples and passes: a minute

Two full-batch problems: a logistic regression on Fashion-MNIST, and a physics-informed fit of a
boundary value problem by a small network. A pass is one gradient of all samples, so other work on
the machine changes nothing; L-BFGS counts all evaluations of its line search. SGD and Adam have the
best of several rates. Sandblaster runs over a real service of two shards with three replicas, which
are threads. Then, in virtual time, what a slow or stopped replica costs
(bench/asynchronous/portions; bench.asynchronous.stragglers measures it in real time).

Writes bench/results/sandblaster-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gradwire.torch
import torch
from gradwire import serve
from torch import nn

from bench.asynchronous import sandblaster_report
from bench.asynchronous.portions import over_bound
from bench.common import report
from bench.common.machine import OtherLoad
from bench.training import images

SPEEDS = {"5× slower": 0.2, "20× slower": 0.05}


class Problem(NamedTuple):
    """A loss over samples, as a sum, and parameters for it; `batch` is that of SGD or Adam."""

    name: str
    samples: int
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    stochastic: type[torch.optim.Optimizer]
    rates: tuple[float, ...]
    batch: int


def logistic(samples: int, data: Path | None) -> Problem:
    """Multinomial logistic regression with weight decay, which is strictly convex."""
    given = images.load(data)
    x = given.train_images.flatten(1)[:samples].double()
    x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    y = given.train_labels[:samples]

    def make() -> nn.Module:
        model = nn.Linear(x.shape[1], images.CLASSES, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        return model

    def loss(model: nn.Module, which: torch.Tensor) -> torch.Tensor:
        errors = nn.functional.cross_entropy(model(x[which]), y[which], reduction="sum")
        return errors + len(which) * 1e-4 / 2 * (model.weight**2).sum()

    rates = (0.01, 0.03, 0.1, 0.3)
    return Problem(
        f"logistic regression, {given.name}", len(x), make, loss, torch.optim.SGD, rates, 32
    )


def boundary_value(samples: int) -> Problem:
    """u'' = -π² sin πx on [0, 1], u = 0 at both ends: Raissi et al. 2019, in one dimension."""
    x = torch.linspace(0, 1, samples, dtype=torch.float64)[:, None]
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        return nn.Sequential(*layers).double()

    def loss(model: nn.Module, which: torch.Tensor) -> torch.Tensor:
        at = x[which].requires_grad_()
        (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), at, create_graph=True)
        inside = (curvature + torch.pi**2 * torch.sin(torch.pi * at)) ** 2
        return inside.sum() + len(which) * 100 * (model(ends) ** 2).sum()

    rates = (1e-3, 3e-3, 1e-2, 3e-2)
    return Problem(
        "boundary value problem, network 1-32-32-1",
        samples,
        make,
        loss,
        torch.optim.Adam,
        rates,
        samples,
    )


def stochastic(problem: Problem, rate: float, passes: int) -> Iterator[tuple[int, float]]:
    """Passes and the loss after each: SGD or Adam, in batches of a random order."""
    model = problem.make()
    optimizer = problem.stochastic(model.parameters(), lr=rate)
    draw = torch.Generator().manual_seed(1)
    for done in range(1, passes + 1):
        if problem.batch < problem.samples:  # rates fall to zero, as batches are noisy
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - (done - 1) / passes)
        for which in torch.randperm(problem.samples, generator=draw).split(problem.batch):
            optimizer.zero_grad()
            (problem.loss(model, which) / len(which)).backward()
            optimizer.step()
        yield done, whole(problem, model)


def whole(problem: Problem, model: nn.Module) -> float:
    """The mean loss of all samples."""
    return float(problem.loss(model, torch.arange(problem.samples)).detach()) / problem.samples


def one_process(problem: Problem, passes: int) -> Iterator[tuple[int, float]]:
    """torch.optim.LBFGS: evaluations, and the least loss so far."""
    model, found = problem.make(), []
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=passes,
        max_eval=passes,
        history_size=10,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = problem.loss(model, torch.arange(problem.samples)) / problem.samples
        loss.backward()
        found.append(float(loss.detach()))
        return found[-1]

    optimizer.step(closure)
    for done in range(1, min(passes, len(found)) + 1):
        yield done, min(found[:done])


def shared(problem: Problem, passes: int) -> Iterator[tuple[int, float]]:
    """Sandblaster, by three replicas: evaluations, and the loss after each iteration."""

    def make(server: serve.Server, **options: Any) -> gradwire.torch.Sandblaster:
        model = problem.make()
        return gradwire.torch.Sandblaster(
            model.parameters(),
            lambda which: problem.loss(model, which),
            samples=problem.samples,
            portion=-(-problem.samples // 24),
            store=server.store,
            **options,
        )

    with serve.Server(2) as server:
        replicas = [make(server, replica=f"replica {i}") for i in range(3)]
        threads = [threading.Thread(target=each.serve) for each in replicas]
        for each in threads:
            each.start()
        with make(server) as lead:
            done = 0
            while done < passes:
                found = lead.step()
                done += found.evaluations
                yield done, found.loss
                if found.converged:
                    break
        for each in threads:
            each.join()


def measure(problem: Problem, passes: int) -> dict[str, Any]:
    """All ways to minimize a problem."""
    tried = {rate: list(stochastic(problem, rate, passes)) for rate in problem.rates}
    best = min(tried, key=lambda rate: tried[rate][-1][1])
    name = f"{problem.stochastic.__name__}, batch {problem.batch:,}, rate {best:g}"
    return {
        "name": problem.name,
        "samples": problem.samples,
        "rates": list(problem.rates),
        "curves": {
            name: tried[best],
            "torch.optim.LBFGS": list(one_process(problem, passes)),
            "Sandblaster, 3 replicas": list(shared(problem, passes)),
        },
    }


def stragglers() -> list[dict[str, Any]]:
    """Seconds over the bound of the sum of the speeds: four replicas, five batches."""
    found = []
    for portions in (32, 64):
        for name, speed in SPEEDS.items():
            speeds = (speed, 1, 1, 1)
            found.append(
                {
                    "case": f"one of four {name}",
                    "portions": portions,
                    "backups": over_bound(speeds, portions),
                    "none": over_bound(speeds, portions, backups=False),
                    "equal": (1 / speed) * (3 + speed) / 4,
                }
            )
        equal = (1, 1, 1, 1)
        found.append(
            {
                "case": "one of four stops",
                "portions": portions,
                "backups": over_bound(equal, portions, stop=True),
                "none": None,
                "equal": None,
            }
        )
    return found


def main() -> int:
    """Measures, and writes what it found."""
    options = _parse()
    torch.set_num_threads(1)
    load = OtherLoad()
    problems = [logistic(options.samples, options.data), boundary_value(options.points)]
    found = {
        "problems": [
            measure(problems[0], options.passes),
            measure(problems[1], 5 * options.passes),
        ],
        "stragglers": stragglers(),
        **report.stamp("bench.asynchronous.sandblaster", load),
    }
    report.write(options.output, "sandblaster", found, sandblaster_report.document)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=6_000, help="images of the regression")
    parser.add_argument("--points", type=int, default=256, help="of the boundary value problem")
    parser.add_argument("--passes", type=int, default=50, help="five times as many for the fit")
    parser.add_argument("--data", type=Path, help="directory of other IDX files")
    parser.add_argument("--quick", action="store_true", help="--samples 500 --points 64 --passes 6")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    if options.quick:
        options.samples, options.points, options.passes = 500, 64, 6
    return options


if __name__ == "__main__":
    sys.exit(main())
