"""One replica of downpour.py: trains until all have pushed enough; prints its steps a second."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from gradwire import serve
from gradwire.torch import Downpour
from torch import nn
from torch.nn.functional import cross_entropy

from bench.asynchronous.downpour_report import WAYS
from bench.training import images

BATCH, _HIDDEN = 32, 32


def network(seed: int, side: int = 28) -> nn.Module:
    """784-32-10 for images of 28 × 28."""
    torch.manual_seed(seed)
    layers = [nn.Linear(side * side, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, images.CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def main(
    name: str, seed: int, total: int, gradient: float, replicas: int, data: Path | None
) -> None:
    """Trains as the way of this name does; a gradient lasts `gradient` seconds."""
    torch.set_num_threads(1)
    rank, way = int(os.environ["RANK"]), next(each for each in WAYS if each.name == name)
    shown = images.load(data)
    chosen = images.batches(len(shown.train_labels), BATCH, rank, replicas, seed, total)
    model = network(seed, shown.side)
    optimizer = Downpour(
        model.parameters(),
        getattr(serve, way.rule)(lr=way.lr),
        compression=way.push_codec,
        warm_start=way.warm_start,
        pull_codec=way.pull_codec,
        staleness=way.staleness,  # type: ignore[arg-type]
    )
    print("joined", flush=True)
    began, steps = time.perf_counter(), 0
    due = began
    while min(optimizer.server.versions) < total:
        batch = chosen[steps]
        optimizer.zero_grad()
        cross_entropy(model(shown.train_images[batch]), shown.train_labels[batch]).backward()
        due = max(due + gradient, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        optimizer.step()
        steps += 1
    seconds = time.perf_counter() - began
    optimizer.close()
    print(steps / seconds)


if __name__ == "__main__":
    folder = Path(sys.argv[6]) if len(sys.argv) > 6 else None
    main(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        float(sys.argv[4]),
        int(sys.argv[5]),
        folder,
    )
