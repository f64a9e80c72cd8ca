"""The ranks of train.py: they train one run after the other."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gradwire
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench.training import images, methods, replicas
from bench.training.methods import Averaging, Method
from bench.training.train_runs import Point, Result, Run, append, finite

HIDDEN = 640


def serve(store_path: str, runs: list[Run], data_path: Path | None, output: Path) -> int:
    """One rank of the launch; rank 0 appends each result as soon as there is one."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(store_path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    data = images.load(data_path)
    different = False
    count = len(data.train_labels)
    with progress(sum(each.steps(count) for each in runs), rank) as bar:
        for run in runs:
            bar.set_description(f"{run.method}, batch {run.batch}, seed {run.seed}")
            result = train(run, data, bar.update)
            different |= not result.identical
            if rank == 0:
                append(output, result)
    replicas.leave(store, rank, ranks)
    return int(different)


def train(run: Run, data: images.Images, advance: Callable[[], object]) -> Result:
    """Every rank of torch's default group calls it."""
    torch.manual_seed(run.seed)
    model = images.small_cnn(data.side, HIDDEN)
    method = Method.parse(run.method)
    optimizer = method.optimizer(model, run.learning_rate)
    first = round(method.first_share(run.warm_up) * run.steps(len(data.train_labels)))
    averaging = methods.average(model, method, run.algorithm, first, optimizer)
    try:
        seconds, curve = _steps(run, data, averaging, optimizer, advance)
        return Result(
            run=run,
            parameters=sum(each.numel() for each in model.parameters()),
            test_accuracy=curve[-1].test_accuracy,
            training_loss=finite(replicas.training_loss(model, data)),
            identical=replicas.identical(model),
            seconds_per_step=statistics.median(seconds),
            curve=curve,
            finished=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            versions=versions(),
        )
    finally:
        averaging.close()


def _steps(
    run: Run,
    data: images.Images,
    averaging: Averaging,
    optimizer: torch.optim.Optimizer,
    advance: Callable[[], object],
) -> tuple[list[float], list[Point]]:
    """Seconds of every step, and the points of the curve."""
    count, ddp = len(data.train_labels), averaging.ddp
    points = set(run.points(count))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: run.learning_rate_factor(step, count)
    )
    order = images.batches(count, run.batch, dist.get_rank(), run.ranks, run.seed, run.steps(count))
    seconds: list[float] = []
    losses: list[float] = []
    curve: list[Point] = []
    meter = Meter(averaging.sent)
    for step, chosen in enumerate(order, 1):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(ddp(data.train_images[chosen]), data.train_labels[chosen])
        loss.backward()
        optimizer.step()
        rate.step()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        if step in points:
            sent = meter.pause()
            mean_loss = replicas.mean(statistics.fmean(losses))
            accuracy = replicas.test_accuracy(ddp.module, data)
            curve.append(Point(step, accuracy, finite(mean_loss), sent))
            losses.clear()
            meter.go_on()
        advance()
    return seconds, curve


class Meter:
    """Counts what is sent in training, and not what is sent in between."""

    def __init__(self, sent: Callable[[], int | None]) -> None:
        self._sent = sent
        self._total: int | None = 0
        self.go_on()

    def go_on(self) -> None:
        """Counts from here on; every rank calls it."""
        dist.barrier()
        self._before = self._sent()

    def pause(self) -> float | None:
        """The bytes so far, mean over ranks."""
        now = self._sent()
        if self._total is None or self._before is None or now is None:
            self._total = None
            return None
        self._total += now - self._before
        return replicas.mean(self._total)


def progress(steps: int, rank: int) -> tqdm:
    """A bar of rank 0's."""
    return tqdm(
        total=steps,
        unit="step",
        disable=rank != 0,
        smoothing=0.01,
        mininterval=0.2 if sys.stderr.isatty() else 60,
    )


def versions() -> dict[str, str]:
    """Of gradwire, torch and this repository."""
    found = {"gradwire": gradwire.__version__, "torch": torch.__version__}
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        found["revision"] = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return found  # not in a repository
    return {key: value.strip() for key, value in found.items()}
