"""One rank of `bench.training.elastic`."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradwire import Communicator
from gradwire.torch import Ranks, elastic, register
from gradwire.torch.elastic.averaging import Averager, Averaging
from gradwire.torch.elastic.model_buffers import ModelBuffers
from gradwire.torch.exchange.rules import Rules
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WIDTH, _ROWS = 1000, 32


def report(step: int, ranks: int) -> None:
    """Appends a line to the log of all processes."""
    line = f"{time.monotonic()} {os.getpid()} {step} {ranks}\n"
    with open(os.environ["BENCH_LOG"], "ab", buffering=0) as log:
        log.write(line.encode())


def made(millions: int, *, norms: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of so many million parameters, perhaps with normalised batches, and its optimizer."""
    layers: list[nn.Module] = []
    for _ in range(millions):
        layers.append(nn.Linear(_WIDTH, _WIDTH, bias=False))
        if norms:
            layers.append(nn.BatchNorm1d(_WIDTH))
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), 1e-4, foreach=False)


def loss_of(model: nn.Module, rows: int) -> torch.Tensor:
    """The loss of a batch."""
    return model(torch.ones(rows, _WIDTH)).square().mean()


def train(millions: int) -> None:
    """Trains in a session until the process is killed."""
    model, optimizer = made(millions)
    sampler = elastic.Sampler(1 << 30, 4, shuffle=False)
    codec = os.environ.get("BENCH_CODEC", "none")
    with elastic.session(
        model,
        optimizer,
        sampler,
        compression=codec,
        global_batch="proportional",
        ranks=Ranks(timeout=60),
    ) as s:
        for batch in s:
            s.backward(loss_of(model, len(batch)))
            if s.commit():
                optimizer.step()
                report(s.steps, s.communicator.size)


def train_ddp(millions: int) -> None:
    """Trains under DistributedDataParallel over gloo."""
    dist.init_process_group("gloo")
    module, optimizer = made(millions)
    model = DistributedDataParallel(module)
    for step in range(1, 1 << 30):
        optimizer.zero_grad()
        loss_of(model, 4).backward()
        optimizer.step()
        report(step, dist.get_world_size())


def torchft_average(manager: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket; if that fails, the manager knows it, and does not commit the step."""
    manager.allreduce(bucket.buffer()).wait()
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


def train_torchft(millions: int) -> None:
    """Trains by torchft: each process is a replica group of its own."""
    import torchft

    model, inner = made(millions)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    address = os.environ.get("BENCH_ADDRESS")
    if address is not None:  # all namespaces have this machine's name; checkpoints are served there
        socket.gethostname = lambda: address
    address = address or "127.0.0.1"
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),  # as its train_ddp.py
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=f"bench{os.getpid()}",
        hostname=address,
    )

    class Replica(torchft.DistributedDataParallel):
        # The hook of 0.2.0 raises AssertionError when a call fails, which ends the survivors.
        _comm_hook = staticmethod(lambda manager, bucket: torchft_average(manager, bucket))

    ddp, optimizer = Replica(manager, model), torchft.Optimizer(manager, inner)
    done = 0
    while True:
        optimizer.zero_grad()
        loss_of(ddp, 4).backward()
        optimizer.step()
        if manager.current_step() > done:
            done = manager.current_step()
            report(done, manager.num_participants())


class Turns:
    """Blocks of steps, each way in its turn, and how long they took on this rank."""

    def __init__(self, communicator: Communicator, steps: int) -> None:
        """Takes the ranks, which begin and end each block together, and the steps of a block."""
        self.times: dict[str, list[float]] = {}  # milliseconds of a step
        self._communicator, self._steps = communicator, steps
        self._began = 0.0

    def begin(self) -> None:
        """Begins a block on all ranks."""
        self._communicator.barrier()
        self._began = time.perf_counter()

    def end(self, way: str) -> None:
        """Ends a block on all ranks."""
        self._communicator.barrier()
        took = (time.perf_counter() - self._began) / self._steps * 1e3
        self.times.setdefault(way, []).append(took)

    def block(self, way: str, step: Callable[[], None]) -> None:
        """Makes and times a block of steps."""
        self.begin()
        for _ in range(self._steps):
            step()
        self.end(way)


def bare_step(millions: int, communicator: Communicator) -> Callable[[], None]:
    """A step with the session's averages and nothing else of a session.

    No barrier, no copies of buffers, no sampler, no look for who wants to join.
    """
    model, optimizer = made(millions, norms=True)
    rules = Rules("none")
    averager = Averager(
        dict(model.named_parameters()), ModelBuffers(model), Averaging("auto", rules, None, None)
    )
    averager.adopt(communicator)
    count = itertools.count()

    def step() -> None:
        averager.begin(next(count))
        loss = loss_of(model, _ROWS)
        with averager.sending():
            loss.backward()
        averager.finish(confirms=False)
        averager.end(committed=True)
        optimizer.step()

    return step


def hooked_step(millions: int) -> Callable[[], None]:
    """A step of DistributedDataParallel with gradwire's hook."""
    module, optimizer = made(millions, norms=True)
    ddp = DistributedDataParallel(module)
    register(ddp)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(ddp, _ROWS).backward()
        optimizer.step()

    return step


def cost(millions: int, steps: int, rounds: int, path: Path) -> None:
    """Times blocks of so many steps: in a session, with its averages alone, and under the hook.

    Rank 0 writes the milliseconds of a step of all blocks, by way. The first round warms up.
    """
    store = dist.FileStore(f"{path}.store", 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    model, optimizer = made(millions, norms=True)
    sampler = elastic.Sampler(1 << 30, _ROWS, shuffle=False)
    with elastic.session(model, optimizer, sampler) as s:
        turns = Turns(s.communicator, steps)
        bare, hooked = bare_step(millions, s.communicator), hooked_step(millions)
        turns.begin()
        for batch in s:
            s.backward(loss_of(model, len(batch)))
            if s.commit():
                optimizer.step()
            if s.steps % steps == 0:
                turns.end("session")
                turns.block("bare", bare)
                turns.block("hook", hooked)
                turns.begin()
            if s.steps == steps * (rounds + 1):
                break
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps({way: all_[1:] for way, all_ in turns.times.items()}))
    dist.destroy_process_group()


def main() -> int:
    """Does what the environment says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "BENCH_COST" in os.environ:
        millions, steps, rounds, path = os.environ["BENCH_COST"].split(maxsplit=3)
        cost(int(millions), int(steps), int(rounds), Path(path))
        return 0
    _ = made(1)[1].state_dict()  # what torch imports late
    report(0, 0)
    way: Callable[[int], None] = train_ddp if "BENCH_DDP" in os.environ else train
    if "BENCH_TORCHFT" in os.environ:
        way = train_torchft
    way(int(os.environ["BENCH_MILLIONS"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
