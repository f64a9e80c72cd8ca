"""Which settings Downpour SGD needs: with one-bit pushes, and with 16 and 64 replicas.

    python -m bench.asynchronous.downpour_search            # 6 minutes
    python -m bench.asynchronous.downpour_search --quick    # one seed, a third of the images

784-32-10 on Fashion-MNIST in virtual time, as in downpour_simulated. `--serving-ms` is what a push
and a pull cost a server; it is no measured one by default, so that all runs are the same again.

Writes bench/results/search-downpour-DATE.json, .md and .png, anew after each seed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tqdm import tqdm

from bench.asynchronous import downpour_search_report, seeds
from bench.asynchronous.downpour_events import Network
from bench.asynchronous.downpour_search_report import CASES
from bench.asynchronous.downpour_simulated import LATENCY, NO_LINK, fashion_mnist, train
from bench.common import report
from bench.common.machine import OtherLoad


def main() -> int:
    """Trains in all ways with each seed."""
    parser = seeds.parser(__doc__)
    parser.add_argument("--serving-ms", type=float, default=0.38)
    parser.add_argument("--replicas", type=int, nargs="+", default=list(CASES))
    options = seeds.parse(parser)
    torch.set_num_threads(1)
    load, task = OtherLoad(), fashion_mnist(options)
    place = Network(NO_LINK, LATENCY, options.serving_ms / 1e3)
    gradients = int(options.passes * len(task.data.train_labels) / task.batch)
    cases = [(replicas, way) for replicas in options.replicas for way in CASES[replicas]]
    runs: list[dict[str, Any]] = []
    with tqdm(total=len(cases) * len(options.seeds), unit="run") as bar:
        for seed in options.seeds:
            for replicas, way in cases:
                total = gradients - gradients % replicas
                done = train(task, way, replicas, place, seed, total, points=1)
                head = {"way": way.name, "replicas": replicas, "seed": seed, "gradients": total}
                runs.append({**head, **done})
                bar.update()
            found = {
                **report.stamp("bench.asynchronous.downpour_search", load),
                "data": task.data.name,
                "runs": runs,
            }
            own = downpour_search_report
            name = "search-downpour"
            report.write(options.output, name, found, own.document, own.draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
