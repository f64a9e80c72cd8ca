"""What a rank of beside_gloo.py does: calls, collectives or training steps, in turns."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gradwire.torch
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gradwire import Communicator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

from bench.common import job
from bench.torch_backend import networks, turns
from bench.torch_backend.beside_gloo_report import COMMUNICATOR, FUNCTIONAL, GLOO, GRADWIRE, NUMPY
from bench.training import methods

SIZES = (4, 1 << 16, 1 << 20, 1 << 24, 1 << 26)  # bytes
_CALLS = (200, 100, 20, 3, 1)  # of a turn, by size
_CHEAP = 2000  # calls of a turn, on one rank alone
_WIDTH, _BATCH = 1024, 64

# Torch 2.13 has new names for two calls, and warns at each use of the old ones.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Calls = Mapping[str, Callable[[], object]]
Group = dist.ProcessGroup


def run(options: argparse.Namespace) -> int:
    """A rank: joins the others, measures, and as rank 0 writes what all found."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{options.meet}/store", ranks)
    dist.init_process_group("gradwire", store=store, rank=rank, world_size=ranks)
    ours = dist.group.WORLD
    gloo = dist.new_group(backend="gloo") if options.gloo else None
    if options.part == "cost":
        found = _costs(ours, gloo, options.rounds)
    elif options.part == "collectives":
        found = _collectives(ours, gloo, options.rounds, options.most)
    else:
        found = _steps(ours, gloo, options.steps, options.block)
    if rank == 0:
        job.write(options.meet, found)
    dist.barrier()
    sys.stdout.flush()
    # Torch's end of a gloo group can wait for the interpreter's lock for ever.
    os._exit(0)


def _communicator(group: Any) -> Communicator:
    made: Communicator = group._get_backend(torch.device("cpu"))._endpoint.communicator
    return made


def _costs(ours: Any, gloo: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of processor time of one call of 4 bytes."""
    x, out, array = torch.ones(1), torch.ones(1), np.ones(1, np.float32)
    comm = _communicator(ours)
    kinds: dict[str, Calls] = {
        "all_reduce": {
            NUMPY: lambda: comm.all_reduce(array),
            COMMUNICATOR: lambda: comm.all_reduce(x),
            **_both(lambda group: dist.all_reduce(x, group=group), ours, gloo),
        },
        "all_reduce, async_op": _both(
            lambda group: _waited(dist.all_reduce(x, group=group, async_op=True)), ours, gloo
        ),
        "broadcast": _both(lambda group: dist.broadcast(x, 0, group=group), ours, gloo),
        "all_gather": _both(lambda group: _ALL_GATHER(out, x, group=group), ours, gloo),
        "reduce_scatter": _both(lambda group: _REDUCE_SCATTER(out, x, group=group), ours, gloo),
        FUNCTIONAL: _both(lambda group: functional.all_reduce(x, "sum", group) + 0, ours, gloo),
    }
    return {kind: _processor(calls, rounds) for kind, calls in kinds.items()}


def _both(call: Callable[[Any], object], ours: Any, gloo: Any) -> Calls:
    return {GRADWIRE: partial(call, ours), GLOO: partial(call, gloo)}


def _waited(work: Any) -> None:
    work.wait()


def _processor(calls: Calls, rounds: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            before = time.process_time()
            for _ in range(_CHEAP):
                call()
            spent[name].append((time.process_time() - before) / _CHEAP)
    return {name: 1e6 * statistics.median(each) for name, each in spent.items()}


def _collectives(ours: Any, gloo: Any, rounds: int, most: int) -> dict[str, Any]:
    """Seconds of a call on the slowest rank: by operation, bytes and library, one for each turn."""
    return {
        name: {
            str(nbytes): _times(make(nbytes, ours, gloo), calls, rounds, _communicator(ours))
            for nbytes, calls in zip(SIZES, _CALLS, strict=True)
            if nbytes <= most
        }
        for name, make in _OPERATIONS.items()
    }


def _all_reduce(nbytes: int, ours: Any, gloo: Any) -> Calls:
    x, comm = torch.zeros(nbytes // 4), _communicator(ours)
    return {
        COMMUNICATOR: lambda: comm.all_reduce(x),
        **_both(lambda group: dist.all_reduce(x, group=group), ours, gloo),
    }


def _all_gather(nbytes: int, ours: Any, gloo: Any) -> Calls:
    x = torch.zeros(max(nbytes // 4 // dist.get_world_size(), 1))
    whole = torch.zeros(dist.get_world_size() * len(x))
    return _both(lambda group: _ALL_GATHER(whole, x, group=group), ours, gloo)


def _reduce_scatter(nbytes: int, ours: Any, gloo: Any) -> Calls:
    x = torch.zeros(max(nbytes // 4 // dist.get_world_size(), 1))
    whole = torch.zeros(dist.get_world_size() * len(x))
    return _both(lambda group: _REDUCE_SCATTER(x, whole, group=group), ours, gloo)


def _broadcast(nbytes: int, ours: Any, gloo: Any) -> Calls:
    x = torch.zeros(nbytes // 4)
    return _both(lambda group: dist.broadcast(x, 0, group=group), ours, gloo)


_OPERATIONS: dict[str, Callable[[int, Any, Any], Calls]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}


def _times(calls: Calls, count: int, rounds: int, comm: Communicator) -> dict[str, list[float]]:
    names, found = list(calls), {name: list[float]() for name in calls}
    for turn in range(1 + rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            seconds = _turn(calls[name], count, comm)
            if turn:  # the first one warms up
                found[name].append(seconds)
    return found


def _turn(call: Callable[[], object], count: int, comm: Communicator) -> float:
    call()
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    own = np.array([(time.perf_counter() - start) / count])
    return float(comm.all_reduce(own, op="max")[0])


def _steps(ours: Any, gloo: Any, steps: int, block: int) -> dict[str, Any]:
    """Milliseconds and bytes of a training step, by way."""
    made = {
        f"FSDP2, {GRADWIRE}": _fsdp(ours),
        f"FSDP2, {GRADWIRE} int8, bf16 gathered": _fsdp(
            ours, compression="int8", gather_codec="bf16"
        ),
        f"split, {GRADWIRE}": _split(ours),
        f"split, {GRADWIRE} bf16": _split(_in("bf16")),
        f"split, {GRADWIRE} int8": _split(_in("int8")),
    }
    if gloo is not None:
        made |= {f"FSDP2, {GLOO}": _fsdp(gloo), f"split, {GLOO}": _split(gloo)}
    return turns.measure(made, steps, block)


def _in(codec: str) -> Group:
    """A group whose tensors travel in a codec."""
    options = gradwire.torch.Options(codec=codec)
    return dist.new_group(backend="gradwire", pg_options=options)


def _fsdp(group: Group, **codecs: str) -> turns.Trainee:
    """Each linear layer's parameters gathered when they are needed."""
    from torch.distributed.fsdp import fully_shard

    mesh, model = _mesh(group), _network()
    for each in model:
        if isinstance(each, nn.Linear):
            fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not codecs:
        return _trainee(model, group, dist.get_rank())
    state = gradwire.torch.register_fsdp(model, **codecs)
    return _trainee(model, group, dist.get_rank(), state.close)


def _split(group: Group) -> turns.Trainee:
    """Pairs of linear layers split over the ranks, which all have the same batch."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh, model = _mesh(group), _network()
    linear = [name for name, each in model.named_children() if isinstance(each, nn.Linear)]
    styles: Sequence[Any] = (ColwiseParallel(), RowwiseParallel())
    plan = {name: styles[place % 2] for place, name in enumerate(linear)}
    return _trainee(parallelize_module(model, mesh, plan), group, 0)


def _mesh(group: Group) -> DeviceMesh:
    """A mesh with a name of its own: torch's caches take meshes of the same ranks for one."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"of {group.group_name}",))


def _network() -> nn.Module:
    torch.manual_seed(1)
    return networks.perceptron(_WIDTH)


def _trainee(
    model: nn.Module, group: Group, seed: int, close: Callable[[], None] = lambda: None
) -> turns.Trainee:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    source = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, _BATCH, _WIDTH, generator=source)

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()

    return turns.Trainee(step, _sent_over(group), close)


def _sent_over(group: Group) -> Callable[[], int]:
    if dist.get_backend(group) == "gloo":
        return lambda: methods.tcp_bytes_sent() or 0
    return lambda: gradwire.torch.traffic(group).bytes_sent
