"""The ranks of trials: they train one after the other, and rank 0 writes what came of each.

    python -m bench.training.trials.ranks PLAN STORE RUNS [DATA]

`launch` starts them.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.training import images, replicas
from bench.training.train_ranks import Meter, progress, versions
from bench.training.train_runs import append, finite
from bench.training.trials import exchanges
from bench.training.trials.exchanges import Training
from bench.training.trials.tasks import TASKS, Batch, Task
from bench.training.trials.trial import Outcome, Point, Trial


def main(plan: str, store_path: str, output: str, data: str | None = None) -> int:
    """A rank; returns 1 if replicas differed."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(store_path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    trials = [Trial(**each) for each in json.loads(Path(plan).read_text())]
    made: dict[str, Task] = {}
    different = False
    with progress(sum(each.steps for each in trials), rank) as bar:
        for each in trials:
            if each.task not in made:
                made[each.task] = TASKS[each.task](Path(data) if data else None)
            bar.set_description(f"{each.task}, {each.optimizer}, {each.exchange}, {each.seed}")
            outcome = train(each, made[each.task], bar.update)
            different |= not outcome.identical
            if rank == 0:
                append(Path(output), outcome)
    replicas.leave(store, rank, ranks)
    return int(different)


def train(trial: Trial, task: Task, advance: Callable[[], object] = lambda: None) -> Outcome:
    """Every rank of torch's default group calls it."""
    torch.manual_seed(trial.seed)
    model = task.model()
    training = exchanges.begin(trial, model)
    try:
        seconds, curve = _steps(trial, task, training, advance)
        return Outcome(
            run=trial,
            data=task.data,
            parameters=sum(each.numel() for each in model.parameters()),
            curve=curve,
            identical=replicas.identical(model),
            seconds_per_step=typical(
                seconds[trial.first_steps :], exchanges.period(trial.exchange)
            ),
            finished=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            versions=versions(),
        )
    finally:
        training.close()


def _steps(
    trial: Trial, task: Task, training: Training, advance: Callable[[], object]
) -> tuple[list[float], list[Point]]:
    """Seconds of every step, and the points of the curve."""
    rate = torch.optim.lr_scheduler.LambdaLR(training.optimizer, trial.rate_factor)
    points = trial.measured(exchanges.period(trial.exchange))
    seconds: list[float] = []
    losses: list[float] = []
    curve: list[Point] = []
    meter = Meter(training.sent)
    for step, (inputs, labels) in enumerate(_batches(trial, task), 1):
        started = time.perf_counter()
        training.optimizer.zero_grad()
        loss = cross_entropy(training.model(inputs), labels.flatten())
        loss.backward()
        training.step()
        rate.step()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        if step == trial.steps:
            training.finish()
        if step in points:
            sent = meter.pause()
            trained = finite(replicas.mean(statistics.fmean(losses)))
            unseen, right = replicas.evaluated(training.model, *task.unseen)
            curve.append(Point(step, finite(unseen), right, trained, sent))
            losses.clear()
            meter.go_on()
        advance()
    return seconds, curve


def typical(seconds: list[float], period: int) -> float:
    """The median over whole periods of the mean of a step."""
    starts = range(0, max(1, len(seconds) - period + 1), period)
    return statistics.median(statistics.fmean(seconds[at : at + period]) for at in starts)


def _batches(trial: Trial, task: Task) -> Iterator[Batch]:
    """This rank's."""
    each = trial.batch // trial.ranks
    order = images.batches(task.count, each, dist.get_rank(), trial.ranks, trial.seed, trial.steps)
    return map(task.examples, order)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
