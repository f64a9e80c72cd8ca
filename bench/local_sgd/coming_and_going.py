"""What it costs elastic.DiLoCo that ranks are killed, stopped and started again.

    python -m bench.local_sgd.coming_and_going            # 2 minutes
    python -m bench.local_sgd.coming_and_going --quick    # one seed

Four ranks, which are processes, train 784-32-10 on Fashion-MNIST until they have made so many inner
steps together, each of which is made to last 20 ms; once undisturbed, and once while random ranks
are killed and started again at once, or stopped for one to three seconds. Both have the same seeds.
An event happens every four seconds (`--between`), so a rank fails every 16 s.

Writes bench/results/coming-and-going-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gradwire import serve
from torch.nn.functional import cross_entropy

from bench.common import report
from bench.common.machine import OtherLoad
from bench.local_sgd.coming_and_going_report import document
from bench.local_sgd.ranks import Plan, Team, images_of, joined, network

RANKS = 4
_STOPPED = (1.0, 3.0)  # seconds
_LOOK_SECONDS = 0.05
_LIMIT = 300.0  # seconds of a training


def main() -> int:
    """Trains with and without events for each seed, and writes what it found."""
    options = _parse()
    torch.set_num_threads(1)
    load = OtherLoad()
    runs = []
    for seed in options.seeds:
        plan = Plan(seed=seed, data=options.data)
        for disturbed in (False, True):
            run = _run(plan, options, disturbed)
            runs.append({"seed": seed, "disturbed": disturbed, **run})
            print(runs[-1] | {"gaps": "", "stops": len(run["stops"])}, file=sys.stderr)
    found = {
        **report.stamp("bench.local_sgd.coming_and_going", load),
        "ranks": RANKS,
        "steps": options.steps,
        "between": options.between,
        "step_seconds": Plan().step_seconds,
        "grace": Plan().grace,
        "every": Plan().every,
        "runs": runs,
    }
    report.write(options.output, "coming-and-going", found, lambda found, _: document(found))
    return 0


def _run(plan: Plan, options: argparse.Namespace, disturbed: bool) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serve.Server(1))
        team = stack.enter_context(Team(plan, server.store, folder))
        for number in range(RANKS):
            team.start(number)
        _await(lambda: all(team.times(number) for number in range(RANKS)))
        began, before = time.monotonic(), team.steps()
        events = _Events(team, plan.seed, options.between) if disturbed else None
        total = options.steps * RANKS
        while team.steps() - before < total:
            time.sleep(_LOOK_SECONDS)
            if events is not None:
                events.look()
            if time.monotonic() - began > _LIMIT:
                raise RuntimeError(f"{team.steps() - before} of {total} steps in {_LIMIT} s")
        seconds = time.monotonic() - began
        if events is not None:
            events.end()
        team.finish(60.0)
        return {
            "seconds": seconds,
            **(_of(events, team) if events is not None else {"kills": 0, "stops": []}),
            "gap": statistics.median(_gaps(team, range(RANKS), began, began + seconds)),
            **_loss(plan, server),
        }


def _await(ready: Any) -> None:
    deadline = time.monotonic() + _LIMIT
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks did not begin")
        time.sleep(_LOOK_SECONDS)


class _Events:
    """What befalls the ranks, drawn by a seed; one stopped rank at a time."""

    def __init__(self, team: Team, seed: int, between: float) -> None:
        self._team, self._between = team, between
        self._chance = random.Random(seed)
        self._due = time.monotonic() + self._chance.uniform(0, between)
        self._resumes = 0.0
        self.stopped: int | None = None
        self.kills = 0
        self.stops: list[tuple[int, float, float]] = []  # rank, from, until

    def look(self) -> None:
        """Does what is due."""
        now = time.monotonic()
        if self.stopped is not None and now >= self._resumes:
            self.end()
        if now < self._due or self.stopped is not None:
            return
        self._due = now + self._chance.uniform(0.5, 1.5) * self._between
        number = self._chance.randrange(RANKS)
        if self._chance.random() < 0.5:
            self._team.kill(number)
            self._team.start(number)
            self.kills += 1
        else:
            self._team.stop(number)
            self.stopped, length = number, self._chance.uniform(*_STOPPED)
            self._resumes = now + length
            self.stops.append((number, now, self._resumes))

    def end(self) -> None:
        """Lets who is stopped go on."""
        if self.stopped is not None:
            self._team.resume(self.stopped)
            self.stopped = None


def _of(events: _Events, team: Team) -> dict[str, Any]:
    """The events, and the longest step of another rank while one was stopped."""
    longest = []
    for stopped, since, until in events.stops:
        others = [number for number in range(RANKS) if number != stopped]
        longest.append(max(_gaps(team, others, since, until), default=0.0))
    return {"kills": events.kills, "stops": longest}


def _gaps(team: Team, ranks: Any, since: float, until: float) -> list[float]:
    """The seconds of all steps of some ranks that ended in a time."""
    found = []
    for number in ranks:
        times = team.times(number)
        found += [b - a for a, b in itertools.pairwise(times) if since < b < until]
    return found


@torch.inference_mode()
def _loss(plan: Plan, server: serve.Server) -> dict[str, Any]:
    """Of the common values, on the test images."""
    data = images_of(plan)
    model = network(plan, data.side)
    with contextlib.closing(joined(plan, model, server.store, "watcher")) as outer:
        outer.fetch()
        statistics_ = outer.server.stats()[0]
    outputs = model(data.test_images)
    return {
        "loss": float(cross_entropy(outputs, data.test_labels)),
        "accuracy": float((outputs.argmax(1) == data.test_labels).float().mean()),
        "rounds": statistics_["version"],
        "pushes": statistics_["pushes"],
        "mean_staleness": statistics_["mean_staleness"],
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=600, help="of a rank, on average")
    parser.add_argument("--between", type=float, default=4.0, help="seconds between events")
    parser.add_argument("--data", type=Path, help="directory of other IDX files")
    parser.add_argument("--quick", action="store_true", help="--seeds 1")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    if options.quick:
        options.seeds = [1]
    return options


if __name__ == "__main__":
    sys.exit(main())
