"""What a rank of diloco.py does: trains in each way, or measures exchanges."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import gradwire
import torch
from gradwire.torch import DiLoCo
from gradwire.torch._ranks.group import communicator_of
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bench.asynchronous.diloco_report import WAYS, Way
from bench.common import job
from bench.training import images

_BATCH, _HIDDEN = 32, 256
_POINTS = 30  # of a curve
_EXCHANGES = 40  # measured; the least counts


class _Clock:
    """The seconds that this rank's gradients would have taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(options: argparse.Namespace) -> int:
    """A rank: joins the others, measures, and as rank 0 writes what all found."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{options.meet}/store", ranks)
    dist.init_process_group("gradwire", store=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    with communicator_of(group) as comm:
        found = _exchanges(comm) if options.exchanges else _runs(comm, options)
    if rank == 0:
        job.write(options.meet, found)
    dist.destroy_process_group()
    return 0


def network(seed: int, side: int = 28) -> nn.Module:
    """784-256-10, with 203,530 parameters, for images of 28 × 28."""
    torch.manual_seed(seed)
    layers = [nn.Linear(side * side, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, images.CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def _exchanges(comm: gradwire.Communicator) -> dict[str, float]:
    """Seconds of one synchronous averaging, and of one outer step with each codec."""
    model = network(1)
    gradients = [torch.randn_like(each) for each in model.parameters()]
    found = {"ring": _least(comm, lambda: comm.all_reduce(gradients, algorithm="ring"))}
    for codec in sorted({way.codec for way in WAYS}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = DiLoCo(model, optimizer, every=1, compression=codec, ranks=comm)
        found[codec] = _least(comm, outer.step)
    return found


def _least(comm: gradwire.Communicator, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_EXCHANGES):
        comm.barrier()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return float(min(comm.all_gather_object(min(seconds))))


def _runs(comm: gradwire.Communicator, options: argparse.Namespace) -> dict[str, Any]:
    data = images.load(options.data)
    steps = int(options.passes * len(data.train_labels) / (_BATCH * comm.size))
    runs = []
    total = len(options.seeds) * len(WAYS) * steps
    with tqdm(total=total, unit="step", disable=comm.rank != 0, mininterval=1) as bar:
        for seed in options.seeds:
            for way in WAYS:
                bar.set_description(f"{way.name}, seed {seed}")
                training = _Training(comm, data, way, seed, steps, options)
                runs.append({"way": way.name, "seed": seed, **training.run(bar.update)})
    parameters = sum(each.numel() for each in network(1, data.side).parameters())
    return {"runs": runs, "parameters": parameters, "steps": steps, "data": data.name}


class _Training:
    """One run of a way to train: as many gradients in all as the others."""

    def __init__(
        self,
        comm: gradwire.Communicator,
        data: images.Images,
        way: Way,
        seed: int,
        steps: int,
        options: argparse.Namespace,
    ) -> None:
        self._comm, self._data, self._way = comm, data, way
        self._gradients = steps * comm.size  # of all ranks
        count = len(data.train_labels)
        # A rank that is faster than another takes more of its own than a mean rank does.
        most = 2 * steps + way.every
        self._batches = iter(images.batches(count, _BATCH, comm.rank, comm.size, seed, most))
        self._model = network(seed, data.side)
        parameters = self._model.parameters()
        self._optimizer = torch.optim.SGD(parameters, way.rate, way.inner_momentum)
        slow = way.paced and comm.rank == comm.size - 1
        self._gradient = options.gradient_ms / 1e3 * (options.slow if slow else 1)
        self._clock = _Clock()

    def run(self, advance: Callable[[float], object]) -> dict[str, Any]:
        """The curve of accuracy, and the bytes sent for each gradient of a rank."""
        before = self._comm.traffic.bytes_sent
        curve = self._synchronous(advance) if self._way.every == 0 else self._rounds(advance)
        sent = self._comm.traffic.bytes_sent - before
        own = self._comm.all_gather_object(sent)
        return {"curve": curve, "bytes": sum(own) / self._gradients}

    def _synchronous(self, advance: Callable[[float], object]) -> list[list[float]]:
        parameters = list(self._model.parameters())
        self._comm.broadcast([each.detach() for each in parameters])
        steps = self._gradients // self._comm.size
        curve, marks = [], _marks(steps)
        for step in range(1, steps + 1):
            self._backward()
            gradients = [each.grad for each in parameters]
            self._comm.all_reduce(gradients, op="avg", algorithm="ring")
            self._optimizer.step()
            advance(1)
            if step in marks:
                curve.append([step * self._gradient, step, self._accuracy()])
        return curve

    def _rounds(self, advance: Callable[[float], object]) -> list[list[float]]:
        way = self._way
        outer = DiLoCo(
            self._model,
            self._optimizer,
            way.every,
            compression=way.codec,
            lr=way.lr,
            momentum=way.momentum,
            pace=way.paced,
            clock=self._clock,
            ranks=self._comm,
        )
        curve, done, busy = [], 0, 0.0
        marks = _marks(self._gradients)
        while done < self._gradients:
            pace, began = outer.pace, self._clock.now
            while not self._step(outer):
                pass
            busy += max(self._comm.all_gather_object(self._clock.now - began))
            done += sum(pace)
            advance(sum(pace) / self._comm.size)
            if any(mark <= done for mark in marks):
                marks = {mark for mark in marks if mark > done}
                curve.append([busy, outer.rounds, self._accuracy()])
        return curve

    def _step(self, outer: DiLoCo) -> bool:
        self._backward()
        self._optimizer.step()
        self._clock.now += self._gradient
        return outer.step()

    def _backward(self) -> None:
        chosen = next(self._batches)
        self._optimizer.zero_grad()
        outputs = self._model(self._data.train_images[chosen])
        cross_entropy(outputs, self._data.train_labels[chosen]).backward()

    @torch.inference_mode()
    def _accuracy(self) -> float:
        """Of rank 0, whose parameters are everyone's here."""
        if self._comm.rank:
            return 0.0
        right = self._model(self._data.test_images).argmax(1) == self._data.test_labels
        return float(right.float().mean())


def _marks(steps: int) -> set[int]:
    """After how much the accuracy is measured: often in the beginning, and at the end."""
    return {max(1, round(steps * (i / _POINTS) ** 1.5)) for i in range(1, _POINTS + 1)}
