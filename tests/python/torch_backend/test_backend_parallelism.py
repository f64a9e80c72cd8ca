"""Sharded data, tensors and pipelines of torch over the backend, against one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_training import averaged, batch, model, train
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch_pool import on_ranks
from torch_versions import HYBRID_SHARDS


@on_ranks
def test_fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if HYBRID_SHARDS:
        shape = (2, size // 2)
        meshes.append(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        module = model()
        for each in module:
            if isinstance(each, nn.Linear):
                fully_shard(each, mesh=mesh)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            mse_loss(module(batch(step)[0]), batch(step)[1]).backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 1e6)
            assert norm.full_tensor() > 0
            optimizer.step()
        full = torch.cat([each.full_tensor().detach().reshape(-1) for each in module.parameters()])
        assert torch.allclose(full, averaged(), atol=1e-5)


@on_ranks
def test_fsdp2_in_bfloat16_with_a_divide_factor() -> None:
    """With a factor other than the number of ranks, which torch gives as PREMUL_SUM."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size, (half, whole) = dist.get_world_size(), (model(), model())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(half, mesh=init_device_mesh("cpu", (size,)), mp_policy=policy)
    set_factor = getattr(half, "set_gradient_divide_factor", None)
    (set_factor or half.set_reduce_scatter_divide_factor)(2.0 * size)  # the name in 2.7
    mse_loss(half(batch(0)[0]), batch(0)[1].bfloat16()).backward()
    for rank in range(size):
        (mse_loss(whole(batch(0, rank)[0]), batch(0, rank)[1]) / (2 * size)).backward()
    for ours, theirs in zip(half.parameters(), whole.parameters(), strict=True):
        error = (ours.grad.full_tensor() - theirs.grad).abs().max()
        assert error < 0.05 * theirs.grad.abs().max()


@on_ranks
def test_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0 * size).view(4 * size, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    for placement in (Replicate(), Shard(1), Shard(0)):
        moved = sharded.redistribute(mesh, [placement])
        assert torch.equal(moved.full_tensor(), whole)
    partial = DTensor.from_local(torch.ones(size, 3), mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), torch.full((size, 3), 1.0 * size))
    assert torch.equal(
        partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((1, 3), 1.0 * size)
    )
    product = sharded @ distribute_tensor(torch.ones(6, 2), mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), whole @ torch.ones(6, 2))


@on_ranks
def test_tensor_and_sequence_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import Shard

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    shared = parallelize_module(
        copy.deepcopy(alone), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()}
    )
    x = torch.randn(4, 8)
    assert torch.allclose(shared(x), alone(x), atol=1e-5)
    shared(x).sum().backward()
    alone(x).sum().backward()
    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-5)
    torch.manual_seed(6)
    normed = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(),
    }
    sequence = parallelize_module(copy.deepcopy(normed), mesh, plan)
    x = torch.randn(2, 2 * size, 8)
    rank = dist.get_rank()
    found = sequence(x[:, 2 * rank : 2 * rank + 2])
    assert torch.allclose(found, normed(x), atol=1e-5)


@on_ranks
def test_pipeline_1f1b() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(size)]
    own = copy.deepcopy(layers[rank])
    stage = PipelineStage(own, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=mse_loss)
    x, y = torch.randn(4 * size, 6), torch.randn(4 * size, 6)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=y, losses=losses)
    else:
        schedule.step()
    mse_loss(nn.Sequential(*layers)(x), y).backward()
    for ours, theirs in zip(own.parameters(), layers[rank].parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


@on_ranks
def test_checkpoints(tmp_path: Path) -> None:
    folder = str(tmp_path)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved, loaded = model(), model()
    for module in (saved, loaded):
        fully_shard(module, mesh=mesh)
    train(saved, 2)
    dcp.save(saved.state_dict(), checkpoint_id=f"{folder}/sync")
    dcp.load(state := loaded.state_dict(), checkpoint_id=f"{folder}/sync")
    loaded.load_state_dict(state)
    for ours, theirs in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


@on_ranks
def test_checkpoints_in_the_background(tmp_path: Path) -> None:
    folder = str(tmp_path)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saved, loaded = fully_shard(model(), mesh=mesh), fully_shard(model(), mesh=mesh)
    train(saved, 1)
    # A group of its own: the thread that saves makes calls while this one does.
    future = dcp.async_save(
        saved.state_dict(), checkpoint_id=f"{folder}/async", process_group=dist.new_group()
    )
    dist.all_reduce(torch.ones(1000))
    future.result()
    dcp.load(state := loaded.state_dict(), checkpoint_id=f"{folder}/async")
    loaded.load_state_dict(state)
    for ours, theirs in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


@on_ranks
def test_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(sharded)
    with FullyShardedDataParallel.summon_full_params(sharded):
        found = torch.cat([each.detach().reshape(-1) for each in sharded.parameters()])
        assert torch.allclose(found, averaged(), atol=1e-5)


def split_net() -> tuple[Any, nn.Module, nn.Module]:
    """A mesh of data and tensor parallelism, a net, and its copy that is split over the second."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(8)
    alone = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 8))
    shared = copy.deepcopy(alone)
    parallelize_module(shared, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return mesh, alone, shared


def compute_gradients(mesh: Any, alone: nn.Module, parallel: nn.Module) -> None:
    """One backward of each: the parallel net on this rank's batch, the other on all batches."""
    own = mesh.get_local_rank("data")
    mse_loss(parallel(batch(0, own)[0]), batch(0, own)[1]).backward()
    ranks = mesh["data"].size()
    for rank in range(ranks):
        (mse_loss(alone(batch(0, rank)[0]), batch(0, rank)[1]) / ranks).backward()


@on_ranks
def test_fsdp2_beside_tensor_parallelism() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh, alone, shared = split_net()
    compute_gradients(mesh, alone, fully_shard(shared, mesh=mesh["data"]))
    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-5)


@on_ranks
def test_ddp_beside_tensor_parallelism() -> None:
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
    from torch.nn.parallel import DistributedDataParallel

    mesh, alone, shared = split_net()
    _pre_dp_module_transform(shared)
    ddp = DistributedDataParallel(shared, process_group=mesh["data"].get_group())
    compute_gradients(mesh, alone, ddp)
    cuts = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    wanted = dict(alone.named_parameters())
    for name, each in shared.named_parameters():
        gradient = wanted[name].grad
        if name in cuts:
            gradient = gradient.chunk(2, dim=cuts[name])[mesh.get_local_rank("tensor")]
        assert torch.allclose(each.grad, gradient, atol=1e-5), name


@on_ranks
def test_loss_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(9)
    logits, labels = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    shards = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        found = cross_entropy(shards, distribute_tensor(labels, mesh, [Replicate()]))
        found.backward()
    wanted = cross_entropy(logits, labels)
    wanted.backward()
    assert torch.allclose(found.full_tensor(), wanted)
    assert torch.allclose(shards.grad.full_tensor(), logits.grad)


compilers = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)


@compilers
@on_ranks
def test_compiled_functional_collectives(backend: str) -> None:
    import torch.distributed._functional_collectives as functional

    group, size = dist.group.WORLD, dist.get_world_size()

    @torch.compile(backend=backend, fullgraph=True)
    def call(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(2 * x, "sum", group)
        blocks = functional.reduce_scatter_tensor(total.repeat(size), "sum", 0, group)
        return functional.all_gather_tensor(blocks + 1, 0, group)

    assert torch.equal(call(torch.ones(3)), torch.full((3 * size,), 2.0 * size * size + 1))


@compilers
@on_ranks
def test_compiled_tensor_parallelism(backend: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    shared = parallelize_module(copy.deepcopy(alone), mesh, plan)
    compiled = torch.compile(shared, backend=backend)
    x = torch.randn(4, 8)
    for _ in range(2):
        for module in (compiled, alone):
            module(x).pow(2).sum().backward()
    for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-4)
