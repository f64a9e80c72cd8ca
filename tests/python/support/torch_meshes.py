"""Training of four ranks, on one group or on a 2-D mesh, with moments at which a rank may fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
import torch_faults
from small_training import batch, model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

Moment = Callable[[str], None]  # is told which of MOMENTS has come
Work = Callable[[Moment, float], Callable[[], None]]  # makes one step; takes the timeout of calls
MOMENTS = ("start", "forward", "backward", "end")


def rows_and_columns(moment: Moment, timeout: float) -> Callable[[], None]:
    """Rows first, then columns."""
    mesh = _mesh(timeout, "column", "row")

    def step() -> None:
        moment("start")
        dist.all_reduce(torch.ones(3), group=mesh.get_group("row"))
        moment("forward")
        moment("backward")
        dist.all_reduce(torch.ones(3), group=mesh.get_group("column"))
        moment("end")

    return step


def fully_sharded(moment: Moment, timeout: float) -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (4,))
    torch_faults.set_timeout([mesh.get_group()], timeout)
    return _training(fully_shard(_shard_layers(mesh), mesh=mesh), moment)


def hybrid_shards(moment: Moment, timeout: float) -> Callable[[], None]:
    """HSDP: shards in rows, gradients averaged in columns."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(timeout, "replicate", "shard")
    return _training(fully_shard(_shard_layers(mesh), mesh=mesh), moment)


def tensor_and_data_parallel(moment: Moment, timeout: float) -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = _mesh(timeout, "data", "tensor")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(model(), mesh["tensor"], plan)
    return _training(fully_shard(module, mesh=mesh["data"]), moment)


def rows_and_hooks(moment: Moment, timeout: float) -> Callable[[], None]:
    """Activations are summed in rows, and gradients averaged in columns by DDP with the hook."""
    mesh = _mesh(timeout, "column", "row")
    module = DistributedDataParallel(model(), process_group=mesh.get_group("column"))
    state = gradwire.torch.register(module, ranks=gradwire.torch.Ranks(timeout=timeout))
    step = _training(module, moment, module.module[2])

    def in_rows() -> None:
        dist.all_reduce(torch.ones(3), group=mesh.get_group("row"))
        step()
        assert not state.closed  # and so is kept

    return in_rows


def pipeline(moment: Moment, timeout: float) -> Callable[[], None]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch_faults.set_timeout([dist.group.WORLD], timeout)
    own = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    _tell(own[0], moment)
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=mse_loss)

    def step() -> None:
        moment("start")
        if rank == 0:
            schedule.step(torch.ones(4 * size, 6))
        elif rank == size - 1:
            schedule.step(target=torch.ones(4 * size, 6), losses=[])
        else:
            schedule.step()
        moment("end")

    return step


WORKS: tuple[Work, ...] = (
    rows_and_columns,
    fully_sharded,
    hybrid_shards,
    tensor_and_data_parallel,
    pipeline,
)


def _mesh(timeout: float, *names: str) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch_faults.set_timeout([mesh.get_group(each) for each in names], timeout)
    return mesh


def _shard_layers(mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp import fully_shard

    module: Any = model()
    for each in module:
        if isinstance(each, nn.Linear):
            fully_shard(each, mesh=mesh)
    return module


def _training(module: Any, moment: Moment, middle: nn.Module | None = None) -> Callable[[], None]:
    _tell(middle or module[2], moment)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step() -> None:
        x, y = batch(0)
        moment("start")
        mse_loss(module(x), y).backward()
        moment("end")
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tell(layer: nn.Module, moment: Moment) -> None:
    """Tells of the moments within a step, which are where this layer is."""

    def forward(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        moment("forward")
        if out.requires_grad:
            out.register_hook(lambda _: moment("backward"))

    layer.register_forward_hook(forward)
