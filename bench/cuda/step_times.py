"""Steps of DistributedDataParallel on two ranks of one GPU: NCCL's averages, and gradwire's hook.

A stage of bench/gpu.py, which is skipped where there is no NCCL. The ways take turns; the figures
are medians of turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import gradwire.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.gpu import arrays
from tests.gpu.ranks import nccl_environment, nccl_version
from tests.gpu.rows import Row, tell

sys.path.append(str(arrays.SUPPORT))
import torch_ranks

CODECS = ("none", "fp16", "onebit")
_RANKS, _TURNS, _STEPS = 2, 3, 2
_WIDTH, _LAYERS, _BATCH = 2048, 6, 64  # 25 million parameters


def main() -> int:
    """Prints the row and times."""
    nccl = nccl_version()
    with Row("times of DDP steps", f"p={_RANKS}") as row:
        if not nccl:
            row.skip("there is no NCCL")
            return 0
        told = torch_ranks.run(_RANKS, _times, nccl, backend="nccl")
        for way, seconds in told[0].items():
            tell(step=way, p=_RANKS, seconds=seconds, parameters=_WIDTH * _WIDTH * _LAYERS)
        row.expect(len(told[0]) == 1 + len(CODECS), "a way was not timed")
    return 0


def _times(nccl: str) -> dict[str, float]:
    """Seconds of a step, by way."""
    os.environ.update(nccl_environment(dist.get_rank(), nccl), GRADWIRE_GPU_LINKS="nccl")
    torch.cuda.set_device(0)
    ways = {"plain DDP over NCCL": _wrapped()}
    for codec in CODECS:
        ddp = ways[f"gradwire's hook, {codec}"] = _wrapped()
        gradwire.torch.register(ddp, gradwire.torch.Compression(codec, warm_up=0))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(1 + _TURNS):
        for way, ddp in ways.items():
            took = _turn(ddp)
            if turn > 0:  # the first one makes plans and buckets
                seconds[way].append(took)
    return {way: statistics.median(each) for way, each in seconds.items()}


def _wrapped() -> DDP:
    torch.manual_seed(7)
    layers = [each for _ in range(_LAYERS) for each in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    return DDP(nn.Sequential(*layers).cuda(), device_ids=[torch.device("cuda:0")])


def _turn(ddp: DDP) -> float:
    x = torch.randn(_BATCH, _WIDTH, device="cuda")
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(_STEPS):
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / _STEPS


if __name__ == "__main__":
    sys.exit(main())
