"""How Downpour SGD scales to 16 and 64 replicas, and over a thin link, in virtual time.

    python -m bench.asynchronous.downpour_simulated            # 10 minutes
    python -m bench.asynchronous.downpour_simulated --quick    # one seed, a third of the images

Gradients and codecs are real, the servers' arithmetic is that of `gradwire.serve`, and the order of
all is that of virtual clocks (downpour_events): a gradient lasts 10 ms, and what a push and a pull
cost a server is measured first, or given by `--serving-ms`. So other work on the machine makes this
take longer, and changes that one cost only. Two tasks: 784-32-10 on
Fashion-MNIST, and a small CNN on scikit-learn's digits.

Writes bench/results/simulated-downpour-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from gradwire import serve
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench.asynchronous import downpour_events, downpour_simulated_report, seeds
from bench.asynchronous.downpour_events import Network, Plan, Task
from bench.asynchronous.downpour_replica import BATCH, network
from bench.asynchronous.downpour_simulated_report import LINKS, REPLICAS, TASKS, WAYS, Way
from bench.common import report
from bench.common.machine import OtherLoad
from bench.training import images

LATENCY = 100e-6
NO_LINK = 1e12  # bytes a second, where the network costs nothing


def main() -> int:
    """Trains every task in every way with every number of replicas, link and seed."""
    parser = seeds.parser(__doc__)
    parser.add_argument("--serving-ms", type=float, help="of a push and a pull, not measured")
    options = seeds.parse(parser)
    torch.set_num_threads(1)
    load = OtherLoad()
    tasks = dict(zip(TASKS, (fashion_mnist(options), _digits(options)), strict=True))
    passes = dict(zip(TASKS, (options.passes, 10 * options.passes), strict=True))
    given = options.serving_ms
    serving = {
        name: downpour_events.measure_serving(task) if given is None else given / 1e3
        for name, task in tasks.items()
    }
    runs = []
    for name, way, replicas, link, seed in tqdm(_cases(options), unit="run"):
        task = tasks[name]
        total = int(passes[name] * len(task.data.train_labels) / task.batch)
        total -= total % replicas
        rate = LINKS[link] or NO_LINK
        place = Network(rate, LATENCY, serving[name])
        found = train(task, way, replicas, place, seed, total)
        head = {"task": name, "way": way.name, "replicas": replicas, "link": link, "seed": seed}
        runs.append({**head, "gradients": total, **found})
    found = {
        **report.stamp("bench.asynchronous.downpour_simulated", load),
        "gradient_seconds": options.gradient_ms / 1e3,
        "serving_seconds": serving,
        "runs": runs,
    }
    own = downpour_simulated_report
    name = "simulated-downpour"
    report.write(options.output, name, found, own.document, own.draw)
    return 0


def _cases(options: argparse.Namespace) -> list[tuple[str, Way, int, str, int]]:
    """All numbers of replicas on a network that costs nothing, and the smallest over links."""
    return [
        (task, way, replicas, link, seed)
        for task in TASKS
        for link in LINKS
        for replicas in (REPLICAS if LINKS[link] is None else REPLICAS[:1])
        for way in WAYS
        if not (way.synchronous and LINKS[link] is not None)
        for seed in options.seeds
    ]


def train(
    task: Task,
    way: Way,
    replicas: int,
    place: Network,
    seed: int,
    total: int,
    points: int = downpour_events.POINTS,
) -> dict[str, Any]:
    """One run: its curve of so many points, and its mean staleness."""
    if way.synchronous:
        return _synchronous(task, way, replicas, seed, total, points)
    plan = Plan(
        getattr(serve, way.rule)(lr=way.lr),
        replicas,
        warm_start=way.warm_start * replicas,
        push_codec=way.push_codec,
        pull_codec=way.pull_codec,
        staleness=way.staleness,
        max_staleness=way.max_staleness,
        warm_up=way.warm_up,
        rules=way.rules,
        int8_every=way.int8_every,
        int8_from=way.int8_from,
    )
    return downpour_events.train(task, plan, place, seed, total, points)


def _synchronous(
    task: Task, way: Way, replicas: int, seed: int, total: int, points: int
) -> dict[str, Any]:
    """As many gradients, averaged over all replicas in each step, without any exchange."""
    model, steps = task.network(seed), total // replicas
    rule = {"Adagrad": torch.optim.Adagrad, "SGD": torch.optim.SGD}[way.rule]
    optimizer = rule(model.parameters(), lr=way.lr)
    data, count = task.data, len(task.data.train_labels)
    curve = []
    for step, batch in enumerate(images.batches(count, task.batch * replicas, 0, 1, seed, steps)):
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[batch]), data.train_labels[batch]).backward()
        optimizer.step()
        if (step + 1) % max(1, steps // points) == 0 or step + 1 == steps:
            seconds = (step + 1) * task.gradient
            right = images.accuracy(model, data)
            curve.append([seconds, (step + 1) * replicas, right])
    return {"curve": curve, "staleness": 0.0}


def fashion_mnist(options: argparse.Namespace) -> Task:
    """784-32-10 on Fashion-MNIST, or on the files of --data."""
    data = images.load_fashion_mnist() if options.data is None else images.load(options.data)
    seconds = options.gradient_ms / 1e3
    return Task(data, lambda seed: network(seed, data.side), BATCH, seconds, perceptron=True)


def _digits(options: argparse.Namespace) -> Task:
    data = images.load_digits()

    def cnn(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return images.small_cnn(data.side)

    return Task(data, cnn, 8, options.gradient_ms / 1e3)


if __name__ == "__main__":
    sys.exit(main())
