"""A training script that saves what it needs after each step, and goes on from there.

    torchrun --max-restarts 1 --nproc-per-node 2 resumed_training.py DIRECTORY

Rank 1 kills itself once, in the middle; torchrun starts all ranks anew. The first ones bring
gradwire's own communicator, the others have it made from torch's process group.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
from pathlib import Path

import gradwire.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, DIES_AT = 8, 4


def train(directory: Path, dies: bool, communicator: gradwire.Communicator | None = None) -> str:
    """Trains to the end, from the last saved step if there is one; a digest of the parameters."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 10)), bucket_cap_mb=0.005
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    gradwire.torch.register(ddp, ranks=communicator)
    for step in range(load(directory, ddp, optimizer), STEPS):
        source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x, y = torch.randn(16, 20, generator=source), torch.randn(16, 10, generator=source)
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), y)
        if dies and step == DIES_AT and dist.get_rank() == 1:
            (directory / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            save(directory, step + 1, ddp, optimizer)
    parameters = [each.detach().numpy().tobytes() for each in ddp.parameters()]
    return hashlib.sha256(b"".join(parameters)).hexdigest()


def save(
    directory: Path, steps: int, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> None:
    state = {"steps": steps, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, directory / "new")
    (directory / "new").rename(directory / "saved")


def load(directory: Path, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    if not (directory / "saved").exists():
        return 0
    state = torch.load(directory / "saved")
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["steps"])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    communicator = gradwire.init() if attempt == 0 else None
    digest = train(Path(sys.argv[1]), attempt == 0, communicator)
    # One write: print() makes two where nothing is buffered, and the ranks share a pipe.
    sys.stdout.write(f"rank {dist.get_rank()} attempt {attempt}: {digest}\n")
    gc.collect()  # gloo must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
