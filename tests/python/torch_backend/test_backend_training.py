"""Trainings and parallelisms of torch over the backend; where it can be, bit for bit as gloo's."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from small_training import agreed, averaged, batch, model, train, weights
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_pool import on_ranks

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


@on_ranks
def test_ddp_has_the_bits_of_ddp_over_gloo() -> None:
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


@on_ranks
def test_torchs_own_hooks() -> None:
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


@on_ranks
def test_gradwires_hook_over_its_own_group() -> None:
    import gradwire.torch

    plain = DistributedDataParallel(model(), **SMALL)
    hooked = DistributedDataParallel(model(), **SMALL)
    state = gradwire.torch.register(hooked)
    train(plain)
    train(hooked)
    same = torch.equal(agreed(hooked), weights(plain))
    assert same if dist.get_world_size() == 2 else torch.allclose(weights(hooked), weights(plain))
    state.close()


@on_ranks
def test_join_and_no_sync() -> None:
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


@on_ranks
def test_sparse_embeddings_train_under_ddp() -> None:
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


@on_ranks
def test_torchs_detailed_checks() -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, from 2.14 on torch checks each call over gloo first."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        ddp = DistributedDataParallel(model(), process_group=group, **SMALL)
        train(ddp)
        assert torch.allclose(agreed(ddp), averaged(), atol=1e-5)
        blocks = torch.empty(3 * dist.get_world_size())
        dist.all_gather_into_tensor(blocks, torch.ones(3), group=group)
        assert blocks.tolist() == [1.0] * len(blocks)
        dist.barrier(group)
        dist.destroy_process_group(group)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@on_ranks
def test_compiled_ddp() -> None:
    ddp = DistributedDataParallel(model())
    train(torch.compile(ddp, backend="aot_eager"))
    assert torch.allclose(agreed(ddp), averaged(), atol=1e-5)


@on_ranks
def test_zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that it is deprecated

    plain, sharded = DistributedDataParallel(model()), DistributedDataParallel(model())
    train(plain)
    train(
        sharded,
        optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1, momentum=0.9),
    )
    assert torch.equal(agreed(plain), agreed(sharded))
