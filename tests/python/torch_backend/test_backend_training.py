"""Trainings and parallelisms of torch over the backend; where it can be, bit for bit as gloo's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_pool import Pool


def model(*, normalized: bool = False) -> nn.Module:
    torch.manual_seed(3)
    between = nn.BatchNorm1d(32) if normalized else nn.Tanh()
    return nn.Sequential(nn.Linear(20, 32), between, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    own = dist.get_rank() if rank is None else rank
    source = torch.Generator().manual_seed(1000 * step + own)
    return torch.randn(8, 20, generator=source), torch.randn(8, 8, generator=source)


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in module.parameters()])


def train(
    module: nn.Module,
    steps: int = 4,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> None:
    made = (optimizer or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)))(module.parameters())
    for step in range(steps):
        x, y = batch(step)
        made.zero_grad()
        mse_loss(module(x), y).backward()
        made.step()


def agreed(module: nn.Module) -> torch.Tensor:
    """The weights, which are the same on every rank."""
    own = weights(module)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)
    return own


def averaged() -> torch.Tensor:
    """The weights of the same training on one rank, which sees all batches."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            x, y = batch(step, rank)
            (mse_loss(module(x), y) / dist.get_world_size()).backward()
        optimizer.step()
    return weights(module)


SMALL = {"bucket_cap_mb": 0.002}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several buckets": SMALL,
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "views": {**SMALL, "gradient_as_bucket_view": True},
}


@functools.cache  # torch's end of a gloo group can wait for the interpreter's lock for ever
def gloo_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def as_over_gloo() -> None:
    gloo = gloo_group()
    for name, setting in SETTINGS.items():
        for normalized in (False, True):
            ours = DistributedDataParallel(model(normalized=normalized), **setting)
            theirs = DistributedDataParallel(
                model(normalized=normalized), process_group=gloo, **setting
            )
            train(ours)
            train(theirs)
            same = torch.equal(agreed(ours), weights(theirs))
            close = torch.allclose(weights(ours), weights(theirs), atol=1e-6)
            assert same if dist.get_world_size() == 2 else close, (name, normalized)


def test_ddp_has_the_bits_of_ddp_over_gloo(pool: Pool) -> None:
    pool.run(as_over_gloo)


def hooks_of_torch() -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        ddp = DistributedDataParallel(model(), **SMALL)
        ddp.register_comm_hook(None, hook)
        train(ddp)
        assert torch.allclose(agreed(ddp), averaged(), atol=2e-2)
    # One bucket: the hook reduces again in callbacks, whose order among buckets differs by rank.
    ddp = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp)
    agreed(ddp)


def test_torchs_own_hooks(pool: Pool) -> None:
    pool.run(hooks_of_torch)


def our_hook() -> None:
    import gradwire.torch

    plain = DistributedDataParallel(model(), **SMALL)
    hooked = DistributedDataParallel(model(), **SMALL)
    state = gradwire.torch.register(hooked)
    train(plain)
    train(hooked)
    same = torch.equal(agreed(hooked), weights(plain))
    assert same if dist.get_world_size() == 2 else torch.allclose(weights(hooked), weights(plain))
    state.close()


def test_gradwires_hook_over_its_own_group(pool: Pool) -> None:
    pool.run(our_hook)


def uneven_inputs() -> None:
    ddp = DistributedDataParallel(model(), **SMALL)
    with ddp.join():
        train(ddp, 2 + dist.get_rank())
    agreed(ddp)
    with ddp.no_sync():
        mse_loss(ddp(batch(0)[0]), batch(0)[1]).backward()
    mse_loss(ddp(batch(1)[0]), batch(1)[1]).backward()
    gradients = torch.cat([each.grad.reshape(-1) for each in ddp.parameters()])
    first = gradients.clone()
    dist.broadcast(first, 0)
    assert torch.equal(gradients, first)


def test_join_and_no_sync(pool: Pool) -> None:
    pool.run(uneven_inputs)


def embeddings() -> None:
    torch.manual_seed(1)
    sparse = nn.Embedding(50, 6, sparse=True)
    dense = nn.Embedding.from_pretrained(sparse.weight.detach().clone(), freeze=False)
    for module in (sparse, dense):
        ddp = DistributedDataParallel(nn.Sequential(module, nn.Linear(6, 1, bias=False)))
        optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
        nn.init.ones_(ddp.module[1].weight)
        for step in range(3):
            source = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            ddp(torch.randint(50, (7,), generator=source)).pow(2).sum().backward()
            optimizer.step()
    assert torch.allclose(sparse.weight, dense.weight, atol=1e-6)


def test_sparse_embeddings_train_under_ddp(pool: Pool) -> None:
    pool.run(embeddings)


def compiled() -> None:
    ddp = DistributedDataParallel(model())
    train(torch.compile(ddp, backend="aot_eager"))
    assert torch.allclose(agreed(ddp), averaged(), atol=1e-5)


def test_compiled_ddp(pool: Pool) -> None:
    pool.run(compiled)


def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that it is deprecated

    plain, sharded = DistributedDataParallel(model()), DistributedDataParallel(model())
    train(plain)
    train(
        sharded,
        optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1, momentum=0.9),
    )
    assert torch.equal(agreed(plain), agreed(sharded))


def test_zero_redundancy_optimizer(pool: Pool) -> None:
    pool.run(zero)


def fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
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
    half = model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(half, mesh=meshes[0], mp_policy=policy)
    half.set_gradient_divide_factor(2.0 * size)
    mse_loss(half(batch(0)[0]), batch(0)[1].bfloat16()).backward()


def test_fsdp2(pool: Pool) -> None:
    pool.run(fully_sharded)


def distributed_tensors() -> None:
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


def test_dtensor(pool: Pool) -> None:
    pool.run(distributed_tensors)


def tensor_parallel() -> None:
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


def test_tensor_and_sequence_parallel(pool: Pool) -> None:
    pool.run(tensor_parallel)


def pipeline() -> None:
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


def test_pipeline_1f1b(pool: Pool) -> None:
    pool.run(pipeline)


def checkpoint(folder: str) -> None:
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


def test_checkpoints(pool: Pool, tmp_path: Path) -> None:
    pool.run(checkpoint, str(tmp_path))
