"""A rank of `choices --emulated`: steps of a model whose layers sleep, by codec and with "auto"."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from gradwire.torch import Compression, register
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.common import job

LAYERS = 16
CODECS = ("none", "lossless", "fp16", "int8", "int4", "lowrank")
_UNTIMED, _TIMED = 11, 5  # steps; "auto" has chosen after nine


class _Sleep(torch.autograd.Function):
    """Takes a third of a layer's time forward, and the rest backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds / 3)
        return gradients[0], None


class Layer(nn.Linear):
    """A square matrix that takes a while."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, later."""
        slept: torch.Tensor = _Sleep.apply(super().forward(x), self.seconds)
        return slept


def step_of(codec: str, width: int, compute: float) -> tuple[float, str]:
    """The seconds of a step, and the codec that it had."""
    torch.manual_seed(1)
    layers = (Layer(width, compute / LAYERS) for _ in range(LAYERS))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    warm_up = 1 if codec in ("auto", "lowrank") else None
    state = register(model, Compression(codec, warm_up=warm_up), optimizer=optimizer)
    seconds = []
    for _ in range(_UNTIMED + _TIMED):
        begin = time.perf_counter()
        model(torch.randn(1, width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    last = str(getattr(state.codec, "codecs", [state.codec])[-1])
    state.close()
    return statistics.median(seconds[_UNTIMED:]), last


def main() -> None:
    """Times all codecs and "auto"; rank 0 writes what they took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet", required=True)
    parser.add_argument("--parameters", type=float, required=True, help="millions")
    parser.add_argument("--compute", type=float, required=True, help="seconds of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{options.meet}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    width = round(math.sqrt(options.parameters * 1e6 / LAYERS))
    steps = {each: step_of(each, width, options.compute)[0] for each in CODECS}
    auto, chosen = step_of("auto", width, options.compute)
    if rank == 0:
        job.write(options.meet, {"steps": steps, "auto": auto, "chosen": chosen})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
