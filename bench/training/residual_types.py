"""What residuals in bfloat16 cost a training: its losses beside those with float32.

    python -m bench.training.residual_types

Two ranks train two small networks, per seed and codec once with each type of residuals, from the
same parameters over the same data: a CNN on scikit-learn's digits, by SGD, with the hook's
momentum; and a transformer that learns the text of Python's standard library byte by byte, by
AdamW. The learning rate falls to 0, and residuals follow it. Biased codecs come after a tenth of
the steps with int8. The figure is the final cross-entropy
on data that was not trained with: means and standard deviations over seeds, and of the differences,
seed by seed. `--seeds`, `--steps` and `--networks` make it shorter. Results have the same bits
whatever else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import gradwire
import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.torch import Stages
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.common import spawned
from bench.training import images
from bench.training.models.text import standard_library, windows
from bench.training.models.transformers import LanguageModel

RANKS, CONTEXT, WIDTH = 2, 64, 64
CODECS = ("int8", "onebit", "topk:density=0.01", "topk:density=0.001")
TYPES = ("float32", "bfloat16")

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(NamedTuple):
    """A network and what it learns."""

    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Batch]]  # by seed and steps, this rank's
    unseen: Batch
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    hook: dict[str, Any]
    seeds: int


def digits() -> Task:
    data = images.load_digits()

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        count = len(data.train_labels)
        for chosen in images.batches(count, 32, dist.get_rank(), RANKS, seed, steps):
            yield data.train_images[chosen], data.train_labels[chosen]

    return Task(
        lambda: images.small_cnn(data.side),
        batches,
        (data.test_images, data.test_labels),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        {"momentum": 0.9},
        seeds=12,
    )


def text(rank: Callable[[], int] = dist.get_rank) -> Task:
    """The standard library's text; `rank` tells which part of the data a rank sees."""
    data = standard_library()
    seen, total = len(data.seen), len(data.seen) + len(data.unseen)

    def pick(source: torch.Tensor, starts: torch.Tensor) -> Batch:
        found = windows(source, starts, CONTEXT)
        return found[:, :-1], found[:, 1:].flatten()

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(1000 * seed + rank())
        for _ in range(steps):
            yield pick(data.seen, torch.randint(seen - CONTEXT, (16,), generator=random))

    return Task(
        lambda: LanguageModel(WIDTH, 2, CONTEXT, norm_first=False),
        batches,
        pick(data.unseen, torch.arange(0, len(data.unseen) - CONTEXT - 1, total // 5000)),
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        {},
        seeds=3,
    )


NETWORKS = {"CNN, SGD": digits, "transformer, AdamW": text}


def main() -> int:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--seeds", type=int, help="of each network, in place of 12 and 3")
    parser.add_argument("--steps", type=int, default=300)
    return spawned.run(RANKS, _serve, parser.parse_args())


def _serve(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    say = print if rank == 0 else lambda *_, **__: None
    say(f"| | codec | {' | '.join(TYPES)} | difference |\n|---|---|---:|---:|---:|", flush=True)
    for name in options.networks:
        task = NETWORKS[name]()
        seeds = range(1, 1 + (options.seeds or task.seeds))
        plain = [train(task, "none", None, seed, options.steps) for seed in seeds]
        say(f"| {name} | none | {spread(plain)} | | |", flush=True)
        for codec in options.codecs:
            found: dict[str, list[float]] = {dtype: [] for dtype in TYPES}
            for seed, dtype in product(seeds, TYPES):
                found[dtype].append(train(task, codec, dtype, seed, options.steps))
            wide, narrow = found.values()
            change = [b - a for a, b in zip(wide, narrow, strict=True)]
            cells = f"{spread(wide)} | {spread(narrow)} | {spread(change, '+')}"
            say(f"| {name} | {codec} | {cells} |", flush=True)
    dist.destroy_process_group()


def train(task: Task, codec: str, dtype: str | None, seed: int, steps: int) -> float:
    """The final cross-entropy on what was not seen; `dtype` of the residuals, None: no feedback."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.model())
    wanted = codec if codec in ("none", "int8") else Stages((0, "int8"), (steps // 10, codec))
    feedback = False if dtype is None else gradwire.ErrorFeedback(dtype)
    optimizer = task.optimizer(ddp.parameters())
    state = gradwire.torch.register(
        ddp, gradwire.torch.Compression(wanted, feedback=feedback), optimizer=optimizer, **task.hook
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 1e-9))
    for x, labels in task.batches(seed, steps):
        optimizer.zero_grad()
        cross_entropy(ddp(x), labels).backward()
        optimizer.step()
        rate.step()
    x, labels = task.unseen
    with torch.no_grad():
        loss = float(cross_entropy(ddp.module.eval()(x), labels))
    state.close()
    return loss


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation, as a text."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.4f} ± {deviation:.4f}"


if __name__ == "__main__":
    sys.exit(main())
