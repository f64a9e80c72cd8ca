"""The processes of a training with elastic.DiLoCo, which others kill, stop and start again."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import struct
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from gradwire.torch import elastic
from torch import nn
from torch.nn.functional import cross_entropy

from bench.training import images

_context = multiprocessing.get_context("forkserver")  # imports torch once, has no threads
_context.set_forkserver_preload(["torch._dynamo", "bench.local_sgd.ranks"])
_TIME = struct.Struct("d")


@dataclass(frozen=True)
class Plan:
    """What the ranks train: 784-HIDDEN-10, or for images of another side as many inputs."""

    seed: int = 1
    every: int = 25
    step_seconds: float = 0.02  # that an inner step is made to last
    grace: float = 0.25
    batch: int = 32
    hidden: int = 32
    rate: float = 0.1
    small: bool = False  # generated images of 8 x 8 pixels, for a test
    data: Path | None = None


def images_of(plan: Plan) -> images.Images:
    """What they train on."""
    return images.generated(2000, 500, side=8) if plan.small else images.load(plan.data)


def network(plan: Plan, side: int) -> nn.Module:
    """The network as all ranks begin with it."""
    torch.manual_seed(plan.seed)
    hidden = plan.hidden
    layers = [nn.Linear(side * side, hidden), nn.ReLU(), nn.Linear(hidden, images.CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def joined(plan: Plan, model: nn.Module, store: str, replica: str) -> elastic.DiLoCo:
    """A rank's DiLoCo, or that of who only looks at the common values."""
    optimizer = torch.optim.SGD(model.parameters(), plan.rate)
    return elastic.DiLoCo(
        model, optimizer, plan.every, grace=plan.grace, store=store, replica=replica
    )


def _train(plan: Plan, store: str, number: int, life: int, folder: str, parent: int) -> None:
    """Trains until the file `stop` is there; writes the time of each step, and at last its bits."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the fork server ended
        return
    torch.set_num_threads(1)
    place, data = Path(folder), images_of(plan)
    model = network(plan, data.side)
    optimizer = torch.optim.SGD(model.parameters(), plan.rate)
    outer = elastic.DiLoCo(
        model,
        optimizer,
        plan.every,
        grace=plan.grace,
        store=store,
        replica=f"rank {number}",
    )
    draw = torch.Generator().manual_seed(1000 * plan.seed + 100 * life + number)
    due = time.monotonic()
    with (place / f"{number}.{life}").open("ab", buffering=0) as log:
        while not (place / "stop").exists():
            chosen = torch.randint(len(data.train_labels), (plan.batch,), generator=draw)
            optimizer.zero_grad()
            cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
            optimizer.step()
            due = max(due + plan.step_seconds, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            outer.step()
            log.write(_TIME.pack(time.monotonic()))
    outer.finish()
    outer.close()


class Team:
    """The ranks of one training, by number; a rank that is started again begins another life."""

    def __init__(self, plan: Plan, store: str, folder: Path) -> None:
        self._plan, self._store, self._folder = plan, store, folder
        self._lives: dict[int, int] = {}
        self._processes: dict[int, Any] = {}
        self._ended: list[Any] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self._processes.values(), *self._ended]:
            each.kill()
            each.join()

    def start(self, number: int) -> None:
        """Starts a rank, for the first time or again."""
        life = self._lives[number] = self._lives.get(number, -1) + 1
        forkserver.ensure_running()
        parent = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        process = _context.Process(
            target=_train,
            args=(self._plan, self._store, number, life, str(self._folder), parent),
        )
        process.start()
        self._processes[number] = process

    def kill(self, number: int) -> None:
        """Ends a rank at once."""
        process = self._processes.pop(number)
        process.kill()
        self._ended.append(process)

    def stop(self, number: int) -> None:
        """Stops a rank until `resume`."""
        os.kill(self._processes[number].pid, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """Lets a stopped rank go on."""
        os.kill(self._processes[number].pid, signal.SIGCONT)

    def times(self, number: int) -> list[float]:
        """When the rank made each of its steps, in all of its lives."""
        found: list[float] = []
        for life in range(self._lives.get(number, -1) + 1):
            log = self._folder / f"{number}.{life}"
            raw = log.read_bytes() if log.exists() else b""
            whole = len(raw) // _TIME.size * _TIME.size
            found += [each[0] for each in _TIME.iter_unpack(raw[:whole])]
        return found

    def steps(self) -> int:
        """Of all ranks, in all their lives."""
        return sum(each.stat().st_size // _TIME.size for each in self._folder.glob("*.*"))

    def finish(self, seconds: float) -> None:
        """Ends the training; raises RuntimeError for a rank that does not end well by then."""
        (self._folder / "stop").touch()
        deadline = time.monotonic() + seconds
        for number, each in self._processes.items():
            each.join(max(0.0, deadline - time.monotonic()))
            if each.exitcode != 0:
                raise RuntimeError(f"rank {number} ended with {each.exitcode}; None: not at all")
