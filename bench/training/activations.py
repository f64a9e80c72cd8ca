"""What codecs for activations cost a training with tensor parallelism: its losses.

    python -m bench.training.activations

Two ranks share a small transformer, attention heads and all, that learns the text of Python's
standard library byte by byte, by AdamW; the learning rate falls to 0. What they exchange, outputs
of layers and gradients of inputs, travels in a codec, without error feedback. The figure is the
final cross-entropy on text that was not trained with: means and standard deviations over seeds, and
of the differences to `none`, seed by seed; and bytes a rank sends in a step. Results have the same
bits whatever else the machine does.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from gradwire.torch import Options, traffic
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from bench.common import spawned
from bench.training.residual_types import CONTEXT, WIDTH, spread, text

RANKS, HEADS, LAYERS = 2, 4, 2
CODECS = ("bf16", "fp16", "int8")


class Block(nn.Module):
    """Attention and two linear layers, each of which is shared by all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what the block finds to its input."""
        given = self.before(x)
        heads = [
            layer(given).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        found = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(128, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.next = nn.Linear(WIDTH, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next byte, by place."""
        return self.next(self.blocks(self.bytes(x) + self.places)).flatten(0, 1)


def share(model: Transformer, mesh: DeviceMesh) -> None:
    """Shares each block's layers between the ranks, by columns and then by rows."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    columns: dict[str, Any] = {
        name: ColwiseParallel() for name in ("queries", "keys", "values", "up")
    }
    rows = {name: RowwiseParallel() for name in ("joined", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh, columns | rows)


def main() -> int:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    return spawned.run(RANKS, _serve, parser.parse_args())


def _serve(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gradwire", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS
    )
    say = print if rank == 0 else lambda *_, **__: None
    say("| codec | cross-entropy | difference | kB a step |\n|---|---:|---:|---:|", flush=True)
    dense: list[float] = []
    for codec in ("none", *options.codecs):
        mesh = _mesh(codec)
        found = [train(mesh, seed, options.steps) for seed in range(1, 1 + options.seeds)]
        losses = [loss for loss, _ in found]
        dense = dense or losses
        change = [b - a for a, b in zip(dense, losses, strict=True)]
        shown = "" if codec == "none" else spread(change, "+")
        say(f"| `{codec}` | {spread(losses)} | {shown} | {found[0][1] / 1e3:.1f} |", flush=True)
    dist.destroy_process_group()


def _mesh(codec: str) -> DeviceMesh:
    name = f"tensor-{codec}"  # DTensor takes meshes of equal names for one, whatever their groups
    return init_device_mesh(
        "cpu",
        (RANKS,),
        mesh_dim_names=(name,),
        backend_override={name: ("gradwire", Options(codec=codec))},
    )


def train(mesh: DeviceMesh, seed: int, steps: int) -> tuple[float, float]:
    """The final cross-entropy on what was not seen, and the bytes that this rank sent in a step."""
    torch.manual_seed(seed)
    model = Transformer()
    share(model, mesh)
    task = text(lambda: 0)  # all ranks see the same
    optimizer = task.optimizer(model.parameters())
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 1e-9))
    before = traffic(mesh.get_group()).bytes_sent
    for x, labels in task.batches(seed, steps):
        optimizer.zero_grad()
        cross_entropy(model(x), labels).backward()
        optimizer.step()
        rate.step()
    sent = (traffic(mesh.get_group()).bytes_sent - before) / steps
    x, labels = task.unseen
    with torch.no_grad():
        loss = float(cross_entropy(model.eval()(x), labels))
    return loss, sent


if __name__ == "__main__":
    sys.exit(main())
