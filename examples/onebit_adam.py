"""Train a small language model with AdamW and with OneBitAdam; compare losses and bytes sent.

Run: gradwire run -n 2 examples/onebit_adam.py

The model predicts the next letter of the standard library's sources from the eight before.
"""

import ast
from pathlib import Path

import gradwire.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, CONTEXT = 200, 8

torch.set_num_threads(1)
texts = sorted(Path(ast.__file__).parent.glob("*.py"))
text = torch.tensor(bytearray(b"".join(each.read_bytes() for each in texts))).long().clamp(max=127)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters and the one that follows each."""
    windows = torch.randint(len(text) - CONTEXT, (size, 1)) + torch.arange(CONTEXT + 1)
    return text[windows[:, :-1]], text[windows[:, -1]]


def train(comm: gradwire.Communicator, *, compressed: bool) -> None:
    """Train the same network on the same letters, and print what that took."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(128, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.GELU()),
        *(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128)),
    )
    # The same class for both: a warm-up that never ends is AdamW.
    warm_up, codec = (STEPS * 29 // 100, "int8") if compressed else (STEPS, "none")
    optimizer = gradwire.torch.OneBitAdam(
        model.named_parameters(), lr=3e-3, warm_up=warm_up, warm_up_codec=codec, ranks=comm
    )
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    before = comm.traffic.bytes_sent
    torch.manual_seed(1 + comm.rank)
    for _ in range(STEPS):
        inputs, labels = batch(32)
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    optimizer.check_agreement()
    torch.manual_seed(0)
    inputs, labels = batch(4096)
    loss = cross_entropy(model(inputs), labels).item()
    sent = (comm.traffic.bytes_sent - before) / 1e6
    if comm.rank == 0:
        name = "OneBitAdam" if compressed else "AdamW"
        print(f"{name:10} loss {loss:.3f}, {sent:.1f} MB sent")


with gradwire.init() as comm:
    train(comm, compressed=False)
    train(comm, compressed=True)
