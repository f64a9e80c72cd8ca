"""Failures on a 2-D mesh: every rank names the one at fault, with a group in common or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_faults
import torch_ranks
from small_training import batch, model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss
from torch_faults import FAULTS, Found

FAULTY = 3  # shares no group of its row or column with rank 0
STEP = 3  # of which it does not see the end


def mesh_of(*names: str) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    torch_faults.set_timeout([mesh.get_group(each) for each in names], 5)
    return mesh


def rows_and_columns() -> Callable[[], None]:
    mesh = mesh_of("column", "row")

    def step() -> None:
        for name in ("row", "column"):
            dist.all_reduce(torch.ones(3), group=mesh.get_group(name))

    return step


def hybrid_shards() -> Callable[[], None]:
    """HSDP: shards in rows, gradients averaged in columns."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of("replicate", "shard")
    module = model()
    for each in module:
        if isinstance(each, nn.Linear):
            fully_shard(each, mesh=mesh)
    return training(fully_shard(module, mesh=mesh))


def tensor_and_data_parallel() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh_of("data", "tensor")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(model(), mesh["tensor"], plan)
    return training(fully_shard(module, mesh=mesh["data"]))


def training(module: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step() -> None:
        x, y = batch(0)
        mse_loss(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fail_on_mesh(work: Callable[[], Callable[[], None]], fault: Callable[[], None]) -> Found:
    step = work()

    def steps() -> None:
        for number in range(STEP + 2):
            if dist.get_rank() == FAULTY and number == STEP:
                fault()
            step()

    found = torch_faults.first_error(steps)
    torch_faults.wait_for_all(3)
    return found


def check(work: Callable[[], Callable[[], None]], fault: Callable[[], None]) -> list[Any]:
    ended = torch_ranks.run(4, fail_on_mesh, work, fault, dying=(FAULTY,), backend="gradwire")
    others = ended[:FAULTY]
    assert [each.kind for each in others] == [FAULTS[fault]] * 3, others
    assert [each.job_peer for each in others] == [FAULTY] * 3, others
    return others


@pytest.mark.parametrize("fault", [torch_faults.kill, torch_faults.leave, torch_faults.fail])
def test_all_ranks_of_a_mesh_name_the_one_at_fault(fault: Callable[[], None]) -> None:
    far, *near = check(rows_and_columns, fault)
    assert "another group failed" in far.text
    assert far.peer == -1  # rank 3 is not in its groups
    assert {each.peer for each in near} <= {1, -1}


@pytest.mark.parametrize("work", [hybrid_shards, tensor_and_data_parallel])
@pytest.mark.parametrize("fault", [torch_faults.kill])
def test_training_on_a_mesh_names_the_one_at_fault(
    work: Callable[[], Callable[[], None]], fault: Callable[[], None]
) -> None:
    check(work, fault)
