"""Biased codecs as `register` sets them by itself, beside the codec alone and dense training.

    python -m bench.training.hook_defaults

Two ranks train a small CNN on scikit-learn's digits by SGD with momentum 0.9, whose learning rate
falls to 0. Of each way and seed it prints the final cross-entropy and accuracy on images that were
not trained with, and the bytes of a dense ring divided by those sent. Results have the same bits
whatever else the machine does.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.torch import Momentum
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.common import spawned
from bench.training import images

RANKS, BATCH, RATE, FACTOR = 2, 32, 0.05, 0.9
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    **{
        f"{codec}{suffix}": {"codec": codec, **hook}
        for codec in ("onebit", "topk:density=0.003")
        for suffix, hook in (
            (", warm_up=0", {"warm_up": 0}),
            ("", {}),
            (", momentum in the hook", {"momentum": Momentum(FACTOR)}),
        )
    },
}


class Result(NamedTuple):
    """Of one training."""

    loss: float
    accuracy: float
    ratio: float


def main() -> int:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    return spawned.run(RANKS, _serve, parser.parse_args())


def _serve(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    data = images.load_digits()
    if rank == 0:
        print("| | loss | accuracy, % | ratio |\n|---|---:|---:|---:|", flush=True)
    for name, hook in WAYS.items():
        found = [train(data, hook, seed, options.steps) for seed in options.seeds]
        loss, accuracy, ratio = (", ".join(map(_short, each)) for each in zip(*found, strict=True))
        if rank == 0:
            print(f"| {name} | {loss} | {accuracy} | {ratio} |", flush=True)
    dist.destroy_process_group()


def train(data: images.Images, hook: dict[str, Any], seed: int, steps: int) -> Result:
    """Trains once; every rank calls it."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(images.small_cnn(data.side))
    momentum = 0.0 if "momentum" in hook else FACTOR
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=momentum)
    state = gradwire.torch.register(ddp, optimizer=optimizer, **hook)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 1e-9))
    count = len(data.train_labels)
    for chosen in images.batches(count, BATCH, dist.get_rank(), RANKS, seed, steps):
        optimizer.zero_grad()
        cross_entropy(ddp(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
        rate.step()
    with torch.no_grad():
        scores = ddp.module.eval()(data.test_images)
    right = (scores.argmax(1) == data.test_labels).float().mean()
    loss = float(cross_entropy(scores, data.test_labels))
    state.close()
    return Result(loss, 100 * float(right), state.stats().total.ratio)


def _short(value: float) -> str:
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
