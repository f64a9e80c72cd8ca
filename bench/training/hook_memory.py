"""How much memory training takes with gradwire's DDP hook, beside DDP over torch's gloo.

    python -m bench.training.hook_memory

Two ranks in fresh processes train layers of 16 M parameters for a few steps. Of rank 0's resident
memory (VmRSS, VmHWM of /proc/self/status) it prints the peak and what stays, in bytes a parameter,
above that of the DDP model and its buckets before the first step; so gradients without buckets
count, which take 4 bytes. Nothing of it depends on time or load.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

LAYERS, WIDTH, STEPS = 16, 1000, 6
PARAMETERS = LAYERS * WIDTH * WIDTH
HOOKS: dict[str, dict[str, Any] | None] = {
    "gloo": None,
    "none": {"codec": "none"},
    "fp16": {"codec": "fp16"},
    "int8": {"codec": "int8"},
    "onebit": {"codec": "onebit", "warm_up": 0},
    "topk": {"codec": "topk", "warm_up": 0},
    "onebit, bfloat16": {"codec": "onebit", "warm_up": 0, "feedback": "bfloat16"},
    "topk, bfloat16": {"codec": "topk", "warm_up": 0, "feedback": "bfloat16"},
}


class Memory(NamedTuple):
    """In bytes a parameter, above what there was before the first step."""

    peak: float
    after: float  # the last step, with its gradients


def main() -> None:
    """Prints the table."""
    print(f"{'hook':<20}{'peak':>8}{'after':>8}  bytes a parameter")
    for name, hook in HOOKS.items():
        found = measure(hook)
        print(f"{name:<20}{found.peak:>8.2f}{found.after:>8.2f}")


def measure(hook: dict[str, Any] | None) -> Memory:
    """`hook` are arguments of Compression, of feedback the dtype of residuals; None for none."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_train, args=(rank, f"{scratch}/store", hook, theirs))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            found: Memory = ours.recv()
        finally:
            for rank in ranks:
                rank.join()
    return found


def _train(rank: int, store: str, hook: dict[str, Any] | None, found: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers))
    if hook is not None:
        import gradwire.torch

        if "feedback" in hook:
            hook = {**hook, "feedback": gradwire.ErrorFeedback(hook["feedback"])}
        state = gradwire.torch.register(ddp, gradwire.torch.Compression(**hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    before = _status("VmRSS")
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    figures = ((_status(name) - before) / PARAMETERS for name in ("VmHWM", "VmRSS"))
    if rank == 0:
        found.send(Memory(*figures))
    dist.barrier()
    if hook is not None:
        state.close()
    dist.destroy_process_group()


def _status(name: str) -> int:
    """Of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
