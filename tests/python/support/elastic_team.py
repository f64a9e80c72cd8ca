"""A training with gradwire.torch.elastic whose processes come, stop and die, and what they report.

The driver serves the store, as `gradwire run` does. Each process reports every step that it has
made, with a digest of its whole state: of all processes that report a step, dead ones included, the
digests must be the same.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import secrets
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import gradwire
import simulated_torch_cuda as simulated
import torch
from gpu_twin import Twin
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire.torch import Compression, Ranks, elastic
from ranks import LIMIT
from torch import nn

_context = multiprocessing.get_context("forkserver")  # imports torch once, has no threads
_context.set_forkserver_preload(["pytest", "torch._dynamo", "gradwire.torch", "elastic_team"])
SAMPLES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What the processes train."""

    codec: str = "none"
    global_batch: str = "constant"
    steps: int = 1 << 30  # after which the loop is left
    batch: int = 4
    min_ranks: int | None = 1  # None: a majority of those before
    wait: float = 20.0
    timeout: float = 20.0
    transport: str = "shm"
    samples: int = SAMPLES
    seconds: float = 0.0  # of computation in a batch
    gpu: bool = False  # whether the model is on a simulated one


class Recorder(nn.Module):
    """Assigns its buffers anew in each forward: the mean of its inputs, and the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("before", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before = self.mean
        self.mean = 0.9 * self.mean + x.detach().mean()
        return x + 0.01 * self.before


def model_of() -> nn.Module:
    """A small model with all that a step can change: buffers, and masks of random numbers."""
    return nn.Sequential(
        *(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.ReLU(), Recorder(), nn.Dropout(0.1)),
        nn.Linear(40, 4),
    )


def train(plan: Plan, number: int, report: Callable[[Any], None]) -> elastic.Session:
    """Trains, and reports after each step."""
    torch.manual_seed(number)
    own = model_of()
    twin = Twin(own) if plan.gpu else None
    model = own if twin is None else twin.model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.95)
    sampler = elastic.Sampler(plan.samples, plan.batch)
    with elastic.session(
        model,
        optimizer,
        sampler,
        compression=Compression(
            plan.codec, min_elements=1, warm_up=0 if plan.codec in ("onebit", "lowrank") else None
        ),
        carry=[scheduler],
        global_batch=plan.global_batch,
        bucket_bytes=512,
        min_ranks=plan.min_ranks,
        wait=plan.wait,
        ranks=Ranks(timeout=plan.timeout),
    ) as s:
        for batch in s:
            x = (batch[:, None] * torch.arange(1, 9)) % 17 / 8 - 1
            loss = _loss_of(model, x) if twin is None else twin.loss(lambda m, x=x: _loss_of(m, x))
            if plan.seconds:
                time.sleep(plan.seconds)
            s.backward(loss)
            if s.commit():
                optimizer.step()
                scheduler.step()
                comm = s.communicator
                report((s.steps, s._digest(), comm.size, comm.rank, time.monotonic()))
                if s.steps == plan.steps:
                    break
    return s


def _loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x[:, :4].sin())


def _child(
    plan: Plan, number: int, environment: dict[str, str], pipe: Connection, parent: int
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # the fork server ended
        return
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if plan.gpu:
        simulated.install()
        simulated.compute()
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    try:
        train(plan, number, pipe.send)
        pipe.send("ended")
    except gradwire.Error as error:
        pipe.send(f"{type(error).__name__}: {error}")
        sys.exit(3)
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


@dataclass
class Member:
    """One process."""

    number: int
    process: Any
    pipe: Connection
    steps: int = 0  # the last that it has reported
    rank: int = -1
    size: int = 0
    ended: str = ""  # what it said last
    dead: bool = False  # its pipe is closed
    stopped: bool = False
    first: float = 0.0  # time of its first report


class Team:
    """The processes of one job, and the digests of all steps that they have reported."""

    def __init__(self, ranks: int, plan: Plan = Plan()) -> None:
        job = f"elastic-{secrets.token_hex(4)}"
        secret = secrets.token_hex(16)
        store = Address("unix", f"gradwire-{os.getuid()}-{job}")
        self._server = StoreServer(store, job, secret.encode())
        self._environment = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GRADWIRE_STORE": str(store),
            "GRADWIRE_SECRET": secret,
            "GRADWIRE_JOB": job,
            "GRADWIRE_TRANSPORT": plan.transport,
        }
        self._plan, self._started = plan, 0
        self.members: list[Member] = []
        self.digests: dict[int, str] = {}
        self.problems: list[str] = []
        self._server.start()
        for _ in range(ranks):
            self.start(joins=False)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.members:
            each.process.kill()
            each.process.join()
            each.pipe.close()
        self._server.close("the test is over")

    @property
    def alive(self) -> list[Member]:
        """Those that have not ended, and are not stopped."""
        return [each for each in self.members if not (each.dead or each.stopped)]

    @property
    def steps(self) -> int:
        """The last step that anybody has reported."""
        return max(self.digests, default=0)

    def start(self, *, joins: bool) -> Member:
        """Starts a process: one of the first ranks, or one that joins."""
        number, self._started = self._started, self._started + 1
        ours, theirs = _context.Pipe(duplex=False)
        environment = {**self._environment, "RANK": str(number), "LOCAL_RANK": str(number)}
        if joins:
            environment |= {"GRADWIRE_JOIN": "1", "RANK": "0", "LOCAL_RANK": "0"}
        forkserver.ensure_running()
        parent = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        process = _context.Process(
            target=_child, args=(self._plan, number, environment, theirs, parent)
        )
        process.start()
        theirs.close()
        self.members.append(Member(number, process, ours))
        return self.members[-1]

    def kill(self, member: Member) -> None:
        """Ends a process at once."""
        member.process.kill()

    def stop(self, member: Member) -> None:
        """Stops a process, until `resume`."""
        member.stopped = True
        os.kill(member.process.pid, signal.SIGSTOP)

    def resume(self, member: Member) -> None:
        """Lets a stopped process go on."""
        os.kill(member.process.pid, signal.SIGCONT)

    def forget_dead(self) -> None:
        """Releases what is left of processes that have ended."""
        for each in [each for each in self.members if each.dead]:
            each.process.join()
            each.process.close()
            each.pipe.close()
            self.members.remove(each)

    def __repr__(self) -> str:
        return "; ".join(
            f"process {e.number}: step {e.steps}, rank {e.rank} of {e.size}"
            f"{', stopped' * e.stopped}{', dead' * e.dead} {e.ended}"
            for e in self.members
        )

    def wait(self, ready: Callable[[], bool], seconds: float = LIMIT) -> bool:
        """Takes reports until `ready`; returns whether that was within the time."""
        limit = time.monotonic() + seconds
        while not ready():
            if self.problems or time.monotonic() > limit:
                return False
            self.look(0.05)
        return True

    def look(self, seconds: float) -> None:
        """Takes the reports that come within so many seconds."""
        pipes = {each.pipe: each for each in self.members if not each.dead}
        for pipe in select.select(list(pipes), [], [], seconds)[0]:
            self._read(pipes[pipe])

    def _read(self, member: Member) -> None:
        try:
            while member.pipe.poll():
                self._take(member, member.pipe.recv())
        except (EOFError, ConnectionResetError):
            member.dead = True

    def _take(self, member: Member, said: Any) -> None:
        if isinstance(said, str):
            member.ended = said
            return
        steps, digest, member.size, member.rank, at = said
        member.first = member.first or at
        if member.steps and steps != member.steps + 1:
            self.problems.append(f"process {member.number} made step {steps} after {member.steps}")
        member.steps = steps
        if self.digests.setdefault(steps, digest) != digest:
            self.problems.append(f"step {steps}: process {member.number} has other bits")
