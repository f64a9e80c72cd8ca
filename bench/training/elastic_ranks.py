"""One rank of `bench.training.elastic`."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gradwire.torch import elastic, register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_BLOCK, _BLOCKS = 20, 30
_WIDTH = 1000


def report(step: int, ranks: int) -> None:
    """Appends a line to the log of all processes."""
    line = f"{time.monotonic()} {os.getpid()} {step} {ranks}\n"
    with open(os.environ["BENCH_LOG"], "ab", buffering=0) as log:
        log.write(line.encode())


def made(millions: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of so many million parameters, and its optimizer."""
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(millions)]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), 1e-4, foreach=False)


def loss_of(model: nn.Module, rows: int) -> torch.Tensor:
    """The loss of a batch."""
    return model(torch.ones(rows, _WIDTH)).square().mean()


def train(millions: int) -> None:
    """Trains in a session until the process is killed."""
    model, optimizer = made(millions)
    sampler = elastic.Sampler(1 << 30, 4, shuffle=False)
    with elastic.session(model, optimizer, sampler, global_batch="proportional", timeout=60) as s:
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


def cost(scratch: str) -> None:
    """Times blocks of steps in a session and blocks of steps under the hook, in turns."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{scratch}/store", 2),
        rank=int(os.environ["RANK"]),
        world_size=2,
    )
    model, optimizer = made(1)
    module, other = made(1)
    ddp = DistributedDataParallel(module)
    state = register(ddp)
    times: dict[str, list[float]] = {"session": [], "hook": []}

    def hooked() -> None:
        for _ in range(_BLOCK):
            other.zero_grad()
            loss_of(ddp, 64).backward()
            other.step()

    def timed(name: str, began: float) -> float:
        times[name].append((time.perf_counter() - began) / _BLOCK * 1e3)
        return time.perf_counter()

    sampler = elastic.Sampler(1 << 30, 64, shuffle=False)
    with elastic.session(model, optimizer, sampler) as s:
        began = time.perf_counter()
        for batch in s:
            s.backward(loss_of(model, len(batch)))
            if s.commit():
                optimizer.step()
            if s.steps % _BLOCK == 0:
                began = timed("session", began)
                hooked()
                began = timed("hook", began)
            if s.steps == _BLOCK * _BLOCKS:
                break
    state.close()
    if os.environ["RANK"] == "0":
        pairs = list(zip(times["session"], times["hook"], strict=True))[2:]  # the first warm up
        ratio = statistics.median(one / two for one, two in pairs)
        medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
        Path(scratch, "cost").write_text(f"{medians[0]} {medians[1]} {ratio}")
    dist.destroy_process_group()


def main() -> int:
    """Does what the environment says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    scratch = os.environ.get("BENCH_COST")
    if scratch:
        cost(scratch)
        return 0
    _ = made(1)[1].state_dict()  # what torch imports late
    report(0, 0)
    way: Callable[[int], None] = train_ddp if "BENCH_DDP" in os.environ else train
    way(int(os.environ["BENCH_MILLIONS"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
