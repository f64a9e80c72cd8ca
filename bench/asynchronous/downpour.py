"""What asynchronous training against a parameter server costs in accuracy, and when it wins.

    python -m bench.asynchronous.downpour            # 10 minutes
    python -m bench.asynchronous.downpour --quick    # one seed, a third of the images: 2 minutes
    python -m bench.asynchronous.downpour --only "the same, onebit up, int8 down"  # writes nothing

Four replicas, which are processes, train 784-32-10 on Fashion-MNIST by Downpour SGD, in real
time: a gradient is made to last 10 ms (`--gradient-ms`), on a slow replica five times that.
Synchronous training beside it is computed in this process, and its seconds are counted.

Writes bench/results/downpour-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gradwire import serve
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench.asynchronous import downpour_report, seeds
from bench.asynchronous.downpour_replica import BATCH, network
from bench.asynchronous.downpour_report import WAYS, Way
from bench.common import report
from bench.common.machine import OtherLoad
from bench.training import images

REPLICAS = 4
_POINTS = 30  # of a synchronous curve
_LOOK_SECONDS = 0.25  # between two points of an asynchronous one


def main() -> int:
    """Trains in each way with each seed, and writes what it found."""
    options = _parse()
    torch.set_num_threads(1)
    load, data = OtherLoad(), images.load(options.data)
    steps = int(options.passes * len(data.train_labels) / (BATCH * REPLICAS))
    runs: list[dict[str, Any]] = []
    ways = [way for way in WAYS if not options.only or way.name in options.only]
    with tqdm(total=len(options.seeds) * len(ways), unit="run") as bar:
        for seed in options.seeds:
            for way in ways:
                bar.set_description(f"{way.name}, seed {seed}")
                train = _synchronous if way.synchronous else _asynchronous
                found = train(way, data, seed, steps, options)
                runs.append({"way": way.name, "seed": seed, **found})
                bar.update()
    if options.only:
        for way in ways:
            ends = [100 * run["curve"][-1][2] for run in runs if run["way"] == way.name]
            print(f"{way.name}: {', '.join(f'{end:.2f}' for end in ends)} % by seed")
        return 0
    found = {
        **report.stamp("bench.asynchronous.downpour", load),
        "data": data.name,
        "steps": steps,
        "gradient_seconds": options.gradient_ms / 1e3,
        "slow": options.slow,
        "runs": runs,
    }
    own = downpour_report
    report.write(options.output, "downpour", found, own.document, own.draw)
    return 0


def _synchronous(
    way: Way, data: images.Images, seed: int, steps: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Steps of all replicas' images, each of which takes as long as one gradient."""
    model = network(seed, data.side)
    rule = {"Adagrad": torch.optim.Adagrad, "SGD": torch.optim.SGD}[way.rule]
    optimizer = rule(model.parameters(), lr=way.lr)
    chosen = images.batches(len(data.train_labels), BATCH * REPLICAS, 0, 1, seed, steps)
    curve = []
    for step, batch in enumerate(chosen, 1):
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[batch]), data.train_labels[batch]).backward()
        optimizer.step()
        if step % max(1, steps // _POINTS) == 0 or step == steps:
            seconds = step * options.gradient_ms / 1e3
            curve.append([seconds, step * REPLICAS, images.accuracy(model, data)])
    return {"curve": curve}


def _asynchronous(
    way: Way, data: images.Images, seed: int, steps: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Replicas as processes, which end when they have pushed as many gradients in all."""
    total = steps * REPLICAS
    with serve.Server(2) as server, contextlib.ExitStack() as stack:
        replicas = _Replicas(way, server.store, seed, total, options)
        stack.callback(replicas.kill)
        replicas.start(0)  # comes first, and makes the warm start
        for rank in range(1, REPLICAS):
            replicas.start(rank)
        model = network(seed, data.side)
        values = [each.detach() for each in model.parameters()]
        rule = getattr(serve, way.rule)(lr=way.lr)
        watcher = stack.enter_context(
            serve.connect(
                values,
                rule,
                codecs=list(dict.fromkeys(["none", way.push_codec, way.pull_codec])),
                store=server.store,
                staleness=way.staleness,  # type: ignore[arg-type]
            )
        )
        began, curve = time.perf_counter(), []
        while not curve or curve[-1][1] < total:
            time.sleep(_LOOK_SECONDS)
            watcher.pull(values)
            pushed = min(watcher.versions)
            curve.append([time.perf_counter() - began, pushed, images.accuracy(model, data)])
            if way.faults:
                replicas.disturb(pushed / total)
        rates = replicas.rates()
        watcher.pull(values)
        curve[-1][2] = images.accuracy(model, data)
        staleness = watcher.stats()[0]["mean_staleness"]
    return {"curve": curve, "rates": rates, "staleness": staleness}


class _Replicas:
    """The processes of one run, and what befalls them."""

    def __init__(
        self, way: Way, store: str, seed: int, total: int, options: argparse.Namespace
    ) -> None:
        self._way, self._options = way, options
        self._environment = {**os.environ, "GRADWIRE_STORE": store, "OMP_NUM_THREADS": "1"}
        self._seed, self._total = seed, total
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._faults = self._plan()

    def start(self, rank: int) -> None:
        """Starts a replica, and returns when it has joined, or waits for the warm start."""
        slow = self._options.slow if self._way.slow and rank == REPLICAS - 1 else 1
        gradient = self._options.gradient_ms / 1e3 * slow
        numbers = [self._seed, self._total, gradient, REPLICAS]
        command = [sys.executable, "-m", "bench.asynchronous.downpour_replica", self._way.name]
        data = [] if self._options.data is None else [str(self._options.data)]
        process = subprocess.Popen(
            [*command, *map(str, numbers), *data],
            env={**self._environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes[rank] = process
        if rank == 0:
            assert process.stdout is not None
            process.stdout.readline()

    def disturb(self, share: float) -> None:
        """Does what is due when a share of all gradients has been pushed."""
        while self._faults and share >= self._faults[0][0]:
            self._faults.pop(0)[1]()

    def rates(self) -> dict[str, float]:
        """Waits for the replicas; returns the steps a second of each that was not killed."""
        found = {}
        for rank, process in self._processes.items():
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"replica {rank} ended with {process.returncode}")
            found[str(rank)] = float(out.split()[-1])
        return found

    def kill(self) -> None:
        """Ends what still runs."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes.pop(rank).wait()

    def _plan(self) -> list[tuple[float, Callable[[], object]]]:
        """Kills a replica, stops another, starts the first one anew, and lets the second go on."""
        return [
            (0.3, lambda: self._kill(1)),
            (0.4, lambda: self._processes[2].send_signal(signal.SIGSTOP)),
            (0.6, lambda: self.start(1)),
            (0.7, lambda: self._processes[2].send_signal(signal.SIGCONT)),
        ]


def _parse() -> argparse.Namespace:
    parser = seeds.parser(__doc__)
    parser.add_argument("--slow", type=float, default=5.0, help="times a slow replica's gradient")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WAY",
        choices=[way.name for way in WAYS],
        help="print the accuracies of these ways, and write nothing",
    )
    return seeds.parse(parser)


if __name__ == "__main__":
    sys.exit(main())
