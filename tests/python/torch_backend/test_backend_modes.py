"""Torch's dispatch modes see the calls of a group, as they see those of gloo's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch_pool import on_ranks


def make_calls(group: Any) -> list[torch.Tensor]:
    """The results of one call of each kind that modes can count."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.full((2,), float(rank))
    whole, parts = torch.zeros(2 * size), [torch.zeros(2) for _ in range(size)]
    summed, got, part = own.clone(), torch.zeros(2), torch.zeros(2)
    turned, blocks = torch.zeros(2 * size), [torch.zeros(2) for _ in range(size)]
    dist.all_reduce(summed, group=group)
    dist.broadcast(own.clone(), 0, group=group)
    dist.all_gather(parts, own, group=group)
    dist.all_gather_into_tensor(whole, own, group=group)
    dist.reduce(own.clone(), 0, group=group)
    dist.gather(own, blocks if rank == 0 else None, 0, group=group)
    dist.scatter(got, parts if rank == 0 else None, 0, group=group)
    dist.reduce_scatter(part, [each.clone() for each in parts], group=group)
    dist.reduce_scatter_tensor(part, whole.clone(), group=group)
    dist.all_to_all_single(turned, whole, group=group)
    with dist._coalescing_manager(group):
        dist.all_reduce(summed, group=group)
        dist.all_reduce(own, group=group)
    return [summed, own, whole, got, part, turned]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks
def test_calls_are_counted() -> None:
    found = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        with CommDebugMode() as mode:
            results = make_calls(group)
        found.append((results, dict(mode.get_comm_counts())))
    (ours, our_counts), (theirs, their_counts) = found
    assert our_counts == their_counts
    assert sum(our_counts.values()) == 11
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks
def test_calls_without_memory_exchange_nothing() -> None:
    with FakeTensorMode():
        x = torch.ones(3)
        if dist.get_rank() == 0:  # nothing is exchanged, so no other rank need come
            dist.all_reduce(x)
            work = dist.all_gather_into_tensor(
                torch.empty(3 * dist.get_world_size()), x, async_op=True
            )
            work.wait()
    dist.all_reduce(y := torch.ones(1))
    assert y.item() == dist.get_world_size()
