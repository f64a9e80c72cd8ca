"""How much of what a codec costs a training is noise: its losses beside those of dense controls.

    python -m bench.training.trials.codec_noise --task vit --seeds 1 2 3 4 5 6
    python -m bench.training.trials.codec_noise --exchanges none int8 "noise=0.01"
    python -m bench.training.trials.codec_noise --seeds 3 --until 75 --exchanges none int8@1024

A training of `optimizers.py` by AdamW, with all 4 ranks in one process, once for each seed and way
to average. Codecs work as in the algorithm "direct": each rank's gradients are encoded once, and
their average once more. All parameters are one array; with "int8@N" each is an array, and those of
less than N elements are dense. "reversed" is dense, and sums the ranks in the other order;
"noise=X" is dense, and adds normal noise whose squared norm is the share X of the averaged
gradient's, block by block of 32. "zero=X" is dense, but what is smaller than the share X of the
largest of its block of 32 travels as 0; "keep=X" is int8:block=32@0, where that travels as it is.
(int8 makes 0 of what is below 1/254.) `--until` ends a training early. Every training is a line in
the file of `--runs`, and is not made twice. Prints the means over seeds of the loss on unseen data
above that of none, seed by seed, with their standard deviations and standard errors. Bits depend on
the processor, not on what else it does.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import gradwire
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from bench.common.report import ROOT, spread, table
from bench.training import images
from bench.training.trials.tasks import TASKS, Batch, Task
from bench.training.trials.trial import Trial

RANKS = 4
_BLOCK = 32  # of noise
SETTINGS = {"lm": (0.004, 32), "vit": (0.001, 128), "cnn": (0.008, 128)}  # as in optimizers.py

Average = Callable[[list[torch.Tensor]], torch.Tensor]
Coded = Callable[[torch.Tensor], torch.Tensor]  # encoded and decoded again


def main() -> int:
    options = parse_options()
    torch.set_num_threads(1)
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.runs)
    for seed in options.seeds:
        for exchange in options.exchanges:
            key = key_of(options, seed, exchange)
            if key not in done:
                done[key] = train(trial_of(options, seed), exchange, options.until)
                _append(options.runs, key, done[key])
    print("\n".join(rows(options, done)))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=SETTINGS, default="vit")
    parser.add_argument("--exchanges", nargs="+", default=["none", "reversed", "int8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--until", type=int, help="so many of the steps are made; all if not given")
    parser.add_argument("--runs", type=Path, default=ROOT / "build/codec-noise-runs.jsonl")
    return parser.parse_args()


def trial_of(options: argparse.Namespace, seed: int) -> Trial:
    """What is trained."""
    rate, batch = SETTINGS[options.task]
    return Trial(options.task, "adamw", "", rate, batch, options.steps, seed, clip=1.0)


def train(trial: Trial, exchange: str, until: int | None = None) -> float:
    """The loss on unseen data at the end."""
    torch.manual_seed(trial.seed)
    task = task_of(trial.task)
    model = task.model()
    average = averaging(exchange, trial.seed, [each.numel() for each in model.parameters()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.rate)
    for step, some in enumerate(islice(batches(trial, task), until)):
        use(model, average([gradient(model, each) for each in some]))
        if trial.clip is not None:
            clip_grad_norm_(model.parameters(), trial.clip)
        for group in optimizer.param_groups:
            group["lr"] = trial.rate * trial.rate_factor(step)
        optimizer.step()
    return _loss(model, task)


@functools.cache
def task_of(name: str) -> Task:
    return TASKS[name](None)


def batches(trial: Trial, task: Task) -> Iterator[list[Batch]]:
    """Of all ranks, by step."""
    orders = [
        images.batches(task.count, trial.batch // RANKS, rank, RANKS, trial.seed, trial.steps)
        for rank in range(RANKS)
    ]
    for chosen in zip(*orders, strict=True):
        yield [task.examples(each) for each in chosen]


def gradient(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    model.zero_grad()
    cross_entropy(model(inputs), labels.flatten()).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def use(model: nn.Module, gradient: torch.Tensor) -> None:
    start = 0
    for each in model.parameters():
        each.grad = gradient[start : start + each.numel()].view_as(each)
        start += each.numel()


def averaging(exchange: str, seed: int, sizes: list[int]) -> Average:
    """How the ranks' gradients become one; raises InvalidArgument for an unknown codec.

    `sizes` are the parameters' numbers of elements.
    """
    name, _, share = exchange.partition("=")
    if exchange in ("none", "reversed"):
        return functools.partial(_mean, order=-1 if exchange == "reversed" else 1)
    if name == "noise":
        generator = torch.Generator().manual_seed(seed)
        return lambda every: _noisy(_mean(every), float(share), generator)
    if name in ("zero", "keep"):
        of_small = functools.partial(_zeroed if name == "zero" else _kept, float(share))
        return functools.partial(_each_apart, of_small, sizes, 0)
    name, apart, least = exchange.partition("@")
    coded = functools.partial(_coded, gradwire.codec.get(name))
    if apart:
        return functools.partial(_each_apart, coded, sizes, int(least))
    return functools.partial(_direct, coded)


def _mean(every: list[torch.Tensor], order: int = 1) -> torch.Tensor:
    return functools.reduce(torch.add, every[::order]) / len(every)


def _noisy(values: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    blocks = nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    noise = torch.randn(blocks.shape, generator=generator)
    size = blocks.square().mean(1, keepdim=True).sqrt() * math.sqrt(share)
    return values + (noise * size).view(-1)[: len(values)]


def _coded(codec: gradwire.codec.NativeCodec, values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(codec.decode(codec.encode(values), values.shape))


def _small(share: float, values: torch.Tensor) -> torch.Tensor:
    """Which elements are below the share of the largest magnitude of their block."""
    magnitudes = nn.functional.pad(values.abs(), (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    return (magnitudes < share * magnitudes.amax(1, keepdim=True)).view(-1)[: len(values)]


def _zeroed(share: float, values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(_small(share, values), 0.0)


def _kept(share: float, values: torch.Tensor) -> torch.Tensor:
    coded = _coded(gradwire.codec.get(f"int8:block={_BLOCK}"), values)
    return torch.where(_small(share, values), values, coded)


def _each_apart(
    coded: Coded, sizes: list[int], least: int, every: list[torch.Tensor]
) -> torch.Tensor:
    """Each parameter is an array; those of less than `least` elements are dense."""
    ranks = (each.split(sizes) for each in every)
    return torch.cat(
        [
            _mean(list(of_ranks)) if size < least else _direct(coded, list(of_ranks))
            for size, of_ranks in zip(sizes, zip(*ranks, strict=True), strict=True)
        ]
    )


def _direct(coded: Coded, every: list[torch.Tensor]) -> torch.Tensor:
    """Each rank owns a part: it adds its own gradient to what it decodes of the others'."""
    parts = [each.tensor_split(RANKS) for each in every]
    found = []
    for owner in range(RANKS):
        came = [parts[rank][owner] for rank in range(RANKS)]
        whole = [each if rank == owner else coded(each) for rank, each in enumerate(came)]
        found.append(coded(_mean(whole)))
    return torch.cat(found)


@torch.inference_mode()
def _loss(model: nn.Module, task: Task) -> float:
    total = 0.0
    inputs, labels = task.unseen
    for some, wanted in zip(inputs.split(500), labels.split(500), strict=True):
        total += float(cross_entropy(model(some), wanted.flatten(), reduction="sum"))
    return total / labels.numel()


Key = tuple[str, int, int, int, str]  # task, steps, those made, seed, exchange


def key_of(options: argparse.Namespace, seed: int, exchange: str) -> Key:
    """What tells a training from others."""
    return options.task, options.steps, options.until or options.steps, seed, exchange


def read(path: Path) -> dict[Key, float]:
    """Losses of a file, none if there is no file."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(task, steps, made, seed, name): loss for task, steps, made, seed, name, loss in lines}


def _append(path: Path, key: Key, loss: float) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps([*key, loss]) + "\n")


def rows(options: argparse.Namespace, losses: dict[Key, float]) -> list[str]:
    """A row for each way, beside none."""

    def of(seed: int, exchange: str) -> float | None:
        return losses.get(key_of(options, seed, exchange))

    def row(exchange: str) -> list[str]:
        both = [(of(seed, exchange), of(seed, "none")) for seed in options.seeds]
        above = [100 * (a / b - 1) for a, b in both if a is not None and b is not None]
        error = statistics.stdev(above) / math.sqrt(len(above)) if len(above) > 1 else math.nan
        known = [a for a, _ in both if a is not None]
        return [
            exchange,
            str(len(known)),
            spread(known, 4),
            spread(above, 2, sign=True),
            f"{error:.2f}",
        ]

    head = "| exchange | seeds | loss | above none, % | standard error |"
    return table(head.strip("| "), [row(each) for each in options.exchanges])


if __name__ == "__main__":
    sys.exit(main())
