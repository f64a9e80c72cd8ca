"""What a rank of hybrid.py does: trains each network in each way, in turns."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.torch._plans import checked_plan, pairs_of
from torch import nn
from torch.nn.functional import cross_entropy

from bench.common import job
from bench.torch_backend import networks, turns
from bench.torch_backend.hybrid_report import (
    ALL_DDP,
    ALL_FSDP,
    HYBRID_DDP,
    HYBRID_FSDP,
    HYBRID_INT8,
    LOCAL,
)

_FLOAT = 4  # bytes
_LEAST = 1 << 17  # elements of a weight that is split
_RATE = 0.001


def run(options: argparse.Namespace) -> int:
    """A rank: joins the others, measures, and as rank 0 writes what all found."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{options.meet}/store", ranks)
    dist.init_process_group("gradwire", store=store, rank=rank, world_size=ranks)
    found = {name: _of_network(networks.NETWORKS[name], options) for name in options.networks}
    if rank == 0:
        job.write(options.meet, found)
    dist.destroy_process_group()
    return 0


def _of_network(make: Callable[[], nn.Module], options: argparse.Namespace) -> dict[str, Any]:
    plan = gradwire.torch.hybrid_plan(make(), dist.get_world_size(), min_elements=_LEAST)
    ways: dict[str, Callable[[nn.Module], Any]] = {
        LOCAL: lambda model: model,
        ALL_DDP: lambda model: gradwire.torch.parallelize(model, {}),
        ALL_FSDP: lambda model: gradwire.torch.parallelize(model, {}, data="fsdp"),
        HYBRID_DDP: lambda model: gradwire.torch.parallelize(model, plan),
        HYBRID_FSDP: lambda model: gradwire.torch.parallelize(model, plan, data="fsdp"),
        HYBRID_INT8: lambda model: gradwire.torch.parallelize(model, plan),
    }
    trainees = {name: _trainee(name, make, way, options.batch) for name, way in ways.items()}
    steps = turns.measure(trainees, options.steps, options.block)
    return {"steps": steps, **volumes(make(), plan, options.batch)}


def _trainee(
    name: str, make: Callable[[], nn.Module], way: Callable[[nn.Module], Any], size: int
) -> turns.Trainee:
    torch.manual_seed(1)
    model = way(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    images, labels = networks.batch(size, 0, dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    if name != HYBRID_INT8:
        return turns.Trainee(step, _sent)
    hook = gradwire.torch.register(model, "int8")
    sent = partial(_sent, hook)
    return turns.Trainee(step, sent, hook.close)


def _sent(hook: gradwire.torch.State | None = None) -> int:
    own = gradwire.torch.traffic().bytes_sent
    return own if hook is None else own + hook.communicator.traffic.bytes_sent


def volumes(model: nn.Module, plan: Mapping[str, str], size: int) -> dict[str, Any]:
    """What FireCaffe's formulas say that a rank sends in a step, in bytes, and what is in them.

    Averaging n elements over p ranks sends 2 (p - 1) / p of them: n is Σ|W|, the weights of the
    data-parallel layers, and Σ|D|, the activations of all ranks' batches where a split run of
    layers begins and ends.
    """
    ranks = dist.get_world_size()
    split = checked_plan(model, plan, ranks)
    pairs, layers = pairs_of(model, split), dict[str, Any](model.named_modules())
    begins = sum(layers[name].in_features for name in split if name not in pairs.values())
    ends = sum(layers[name].out_features for name in split if name not in pairs)
    weights = sum(each.numel() for each in model.parameters())
    in_split = sum(each.numel() for name in split for each in layers[name].parameters())
    factor = 2 * (ranks - 1) / ranks * _FLOAT
    return {
        "weights": weights,
        "data_weights": weights - in_split,
        "activations": ranks * size * (begins + ends),
        "formula_ddp": factor * weights,
        "formula_hybrid": factor * (weights - in_split + ranks * size * (begins + ends)),
        "split": split,
    }
