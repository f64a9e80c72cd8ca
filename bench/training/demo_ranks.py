"""The ranks of demo.py: they train a network by each method in turn."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from bench.network import pacing
from bench.training import images, methods, replicas
from bench.training.demo_report import Row
from bench.training.methods import Averaging, Method
from bench.training.train_runs import WARM_UP
from tests.python.support import namespaces

HIDDEN = 640  # of small_cnn, which has 1.02 M parameters then
CHECKS = 12  # of the test accuracy, for the picture
_LEARNING_RATE, _SEED = 0.05, 1
_TIMED = 100  # steps that a training for some seconds is taken to have, where a share is asked for
_MEGABYTE = 1e6
_PACED = 3  # steps before each of which new connections are looked for
_WATCH = 0.5  # seconds


class Plan(NamedTuple):
    """What every rank trains, and where."""

    methods: Sequence[str]
    data: images.Images
    ranks: int
    batch: int  # images per rank and step
    seconds: float | None  # of each training; None: so many steps
    steps: int
    checks: bool  # of the accuracy, on the way
    setting: Mapping[str, str]  # of the environment
    namespaces: Sequence[str | None]  # where each rank is, by path; None: here
    algorithm: str = "auto"  # of gradwire's all_reduce
    pace: float | None = None  # bits a second of each TCP connection


def prepare() -> None:
    """Does what takes torch seconds once in a process: that is, before the forks."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    torch.optim.SGD(model.parameters(), lr=1).step()


def run(plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """Trains in forks of this process, a rank each; raises RuntimeError if one failed."""
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe(duplex=False)
    plan = plan._replace(setting={**plan.setting, "GRADWIRE_SECRET": secrets.token_hex()})
    with tempfile.TemporaryDirectory() as meet:
        processes = [
            context.Process(target=_serve, args=(rank, plan, meet, far, say))
            for rank in range(plan.ranks)
        ]
        try:
            for each in processes:
                each.start()
            _await(processes)
            rows: list[Row] = near.recv()
            return rows
        finally:
            started = [each for each in processes if each.pid is not None]
            for each in started:  # all, before one finds another gone, and says so
                each.kill()
            for each in started:
                each.join()


def _await(ranks: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """Returns when all have ended, or raises when one has failed."""
    running = {each.sentinel: each for each in ranks}
    while running:
        for ended in multiprocessing.connection.wait(list(running)):
            if running.pop(ended).exitcode:
                codes = [each.exitcode for each in ranks]
                raise RuntimeError(f"the ranks ended with {codes}; None is one that did not end")


def _serve(rank: int, plan: Plan, meet: str, rows: Connection, say: Callable[[str], None]) -> None:
    """A rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    if (path := plan.namespaces[rank]) is not None:
        namespaces.enter(path)
    os.environ.update(plan.setting)
    store = dist.FileStore(f"{meet}/store", plan.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    found = []
    for each in plan.methods:
        method = Method.parse(each).check()
        if rank == 0:
            say(f"training by {method.short_title}")
        found.append(train_row(plan, method))
    if rank == 0:
        rows.send(found)
    replicas.leave(store, rank, plan.ranks)


def train_row(plan: Plan, method: Method) -> Row:
    """Trains from the start: every method the same parameters, with the same images in order."""
    torch.manual_seed(_SEED)
    model = images.small_cnn(plan.data.side, HIDDEN)
    optimizer = method.optimizer(model, _LEARNING_RATE)
    share = method.first_share(WARM_UP)
    first = round(share * (_TIMED if plan.seconds else plan.steps))
    averaging = methods.average(model, method, plan.algorithm, first, optimizer)
    training = Training(plan, averaging, optimizer)
    try:
        training.run(first)
        return Row(
            title=method.short_title,
            seconds=training.seconds,
            first_steps=first,
            first_share=share,
            megabytes=training.megabytes(),
            accuracy=replicas.test_accuracy(model, plan.data),
            identical=replicas.identical(model),
            curve=training.curve,
        )
    finally:
        averaging.close()


class Training:
    """One model under training."""

    def __init__(self, plan: Plan, averaging: Averaging, optimizer: torch.optim.Optimizer) -> None:
        self._plan, self._data = plan, plan.data
        self._averaging, self._optimizer = averaging, optimizer
        self._sent: list[int | None] = []  # before the codec begins, and at the end
        self._counted = 0  # steps between the two
        self.seconds: list[float] = []  # of each step
        self.curve: list[tuple[float, float]] = []

    def run(self, first_steps: int) -> None:
        """As many steps as the plan asks for, and one after the first in any case."""
        done = 0.0
        for step, chosen in enumerate(self._batches()):
            if step == first_steps:
                self._sent.append(self._averaging.sent())
            self._step(chosen)
            done = self._share_done()
            ended = done >= 1 and step >= first_steps
            if self._plan.checks and (ended or done * CHECKS > len(self.curve)):
                accuracy = replicas.test_accuracy(self._averaging.ddp.module, self._data)
                self.curve.append((sum(self.seconds), accuracy))
            if ended:
                break
        self._sent.append(self._averaging.sent())
        self._counted = len(self.seconds) - first_steps

    def megabytes(self) -> float | None:
        """Sent a step once the codec had begun, mean over ranks; None: not to be known."""
        before, after = self._sent
        if before is None or after is None:
            return None
        return replicas.mean(after - before) / self._counted / _MEGABYTE

    def _batches(self) -> Iterator[torch.Tensor]:
        """Indices of this rank's images in each step, epoch after epoch."""
        rank, ranks, count = dist.get_rank(), dist.get_world_size(), len(self._data.train_labels)
        each = self._plan.batch
        for seed in itertools.count(_SEED):
            yield from images.batches(count, each, rank, ranks, seed, count // (each * ranks))

    def _step(self, chosen: torch.Tensor) -> None:
        if self._plan.pace is not None and len(self.seconds) < _PACED:
            pacing.pace_connections(self._plan.pace)
        start = time.perf_counter()
        self._optimizer.zero_grad()
        outputs = self._averaging.ddp(self._data.train_images[chosen])
        cross_entropy(outputs, self._data.train_labels[chosen]).backward()
        self._optimizer.step()
        self.seconds.append(time.perf_counter() - start)

    def _share_done(self) -> float:
        """Of the training; the same on every rank."""
        if self._plan.seconds is None:
            return len(self.seconds) / self._plan.steps
        spent = torch.tensor(sum(self.seconds), dtype=torch.float64)
        dist.broadcast(spent, 0)
        return float(spent) / self._plan.seconds


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, however that ended."""
    while os.getppid() == parent:
        time.sleep(_WATCH)
    os._exit(1)
