"""Blocks of training steps that several ways to train take in turns, and what each sent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Steps = Mapping[str, "Trainee"]


class Trainee(NamedTuple):
    """One way to train."""

    step: Callable[[], None]
    sent: Callable[[], int]  # bytes of this rank so far
    close: Callable[[], None] = lambda: None


class Block(NamedTuple):
    """Some steps, back to back."""

    milliseconds: list[float]  # of each step
    sent: float  # bytes a step


def measure(trainees: Steps, steps: int, block: int) -> dict[str, Any]:
    """Milliseconds and bytes of a step by trainee, of all ranks; the first round is not kept."""
    names = list(trainees)
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    for turn in range(1 + -(-steps // block)):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            blocks[name].append(_block(trainees[name], block))
    for each in trainees.values():
        each.close()
    return {name: _summary(kept[1:]) for name, kept in blocks.items()}


def _block(trainee: Trainee, steps: int) -> Block:
    dist.barrier()
    sent, milliseconds = trainee.sent(), list[float]()
    for _ in range(steps):
        start = time.perf_counter()
        trainee.step()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return Block(milliseconds, (trainee.sent() - sent) / steps)


def _summary(blocks: list[Block]) -> dict[str, Any]:
    own = torch.tensor([each for block in blocks for each in block.milliseconds])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    low, middle, high = statistics.quantiles(torch.cat(every).tolist(), n=4)
    sent = torch.tensor([statistics.median(each.sent for each in blocks)], dtype=torch.float64)
    dist.all_reduce(sent)
    return {
        "ms": middle,
        "middle_half_ms": [low, high],
        "steps": len(own),
        "sent": float(sent) / dist.get_world_size(),
    }
