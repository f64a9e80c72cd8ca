"""Failures over the backend: gradwire's errors, which name a rank, wherever torch waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import _core
from gradwire.torch.backend import rendezvous
from ranks import LIMIT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_versions import has_monitored_barriers

sizes = pytest.mark.parametrize("ranks", [2, 4])


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))


def step(module: nn.Module) -> None:
    module(torch.ones(4, 20)).sum().backward()


def in_backward() -> Callable[[], None]:
    ddp = DistributedDataParallel(
        nn.Linear(20, 10), bucket_cap_mb=1e-4, process_group=dist.new_group()
    )
    step(ddp)
    return lambda: step(ddp)


def in_forward() -> Callable[[], None]:
    ddp = DistributedDataParallel(layers(), process_group=dist.new_group())
    step(ddp)
    return lambda: step(ddp)


def in_fsdp() -> Callable[[], None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(layers(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    step(module)
    return lambda: step(module)


def in_functional() -> Callable[[], None]:
    import torch.distributed._functional_collectives as functional

    group = dist.new_group()
    return lambda: print(functional.all_reduce(torch.ones(3), "sum", group) + 0)


def in_all_reduce() -> Callable[[], None]:
    group = dist.new_group()
    return lambda: dist.all_reduce(torch.ones(3), group=group)


def in_wait() -> Callable[[], None]:
    group = dist.new_group()
    return lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()


def in_recv() -> Callable[[], None]:
    group = dist.new_group()
    return lambda: dist.recv(torch.ones(3), 1, group=group)


def in_recv_from_any() -> Callable[[], None]:
    group = dist.new_group()
    return lambda: dist.irecv(torch.ones(3), group=group).wait()


def in_barrier() -> Callable[[], None]:
    group = dist.new_group()
    return lambda: dist.barrier(group)


PLACES = (
    *(in_backward, in_forward, in_fsdp, in_functional, in_all_reduce),
    *(in_wait, in_recv, in_recv_from_any, in_barrier),
)


def lose_a_rank() -> list[tuple[str, str, int]]:
    """Loses rank 1, and then uses a group of its own for each place where a program can be.

    No place learns of the loss from another one's group.
    """
    calls = []
    for place in PLACES:
        rendezvous._world.family = _core.Family()
        calls.append(place())
    dist.barrier()
    if dist.get_rank() == 1:
        torch_ranks.die()
    found = []
    for place, call in zip(PLACES, calls, strict=True):
        try:
            call()
        except gradwire.Error as error:
            found.append((place.__name__, type(error).__name__, error.peer))
    return found


@sizes
def test_a_killed_rank_is_named_wherever_the_others_wait(ranks: int) -> None:
    ended = torch_ranks.run(ranks, lose_a_rank, dying=(1,), backend="gradwire")
    for each in (found for rank, found in enumerate(ended) if rank != 1):
        assert each == [(place.__name__, "TransportError", 1) for place in PLACES]


@torch_ranks.on_ranks(2, dying=(1,), backend="gradwire")
def test_a_future_tells_of_a_killed_rank() -> None:
    """A plain future, without autograd: torch keeps the text and loses the type."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        torch_ranks.die()
    future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError) as raised:
        future.wait()
    assert "rank 1 is gone" in str(raised.value)


@sizes
@torch_ranks.on_ranks(backend="gradwire")
def test_calls_that_differ_are_an_error_of_all_ranks(ranks: int) -> None:
    rank, found = dist.get_rank(), []
    calls: list[Callable[[Any], Any]] = [
        lambda group: dist.all_reduce(torch.ones(3 + (rank == 1)), group=group),
        lambda group: dist.all_reduce(
            torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32), group=group
        ),
        lambda group: (
            dist.broadcast(torch.ones(3), 0, group=group)
            if rank == 1
            else dist.all_reduce(torch.ones(3), group=group)
        ),
    ]
    for call in calls:
        group = dist.new_group()
        try:
            call(group)
            dist.barrier(group)
        except gradwire.Error as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    assert len(found) == 3
    for text in found:
        assert text.startswith("InvalidArgument")
        assert "rank 1" in text


def come_late() -> str | None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 1:
        store.wait(["late"])
        return None
    with pytest.raises(gradwire.RendezvousError) as raised:
        dist.new_group(timeout=timedelta(seconds=0.5))
    if store.add("ended", 1) == dist.get_world_size() - 1:
        store.set("late", b"")
    return str(raised.value)


@sizes
def test_a_rank_that_does_not_come_to_a_new_group_is_named(ranks: int) -> None:
    ended = torch_ranks.run(ranks, come_late, backend="gradwire")
    for text in (text for rank, text in enumerate(ended) if rank != 1):
        assert re.search(r"ranks? [\d, ]*\b1\b.* did not appear", text), text


@sizes
@torch_ranks.on_ranks(backend="gradwire")
def test_a_receive_in_vain_names_the_rank(ranks: int) -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    group = dist.new_group()
    group.set_timeout(timedelta(seconds=0.5))
    if rank != 0:
        store.wait(["over"])
        return
    other = dist.irecv(torch.ones(1), 1, group=group, tag=7)
    with pytest.raises(gradwire.Timeout) as raised:
        dist.recv(torch.ones(1), 1, group=group, tag=8)
    with pytest.raises(gradwire.Timeout):
        other.wait()
    store.set("over", b"")
    assert (type(raised.value).__name__, raised.value.peer) == ("Timeout", 1)


@sizes
@torch_ranks.on_ranks(backend="gradwire")
def test_an_abort_ends_the_calls_of_all_ranks(ranks: int) -> None:
    group = dist.new_group()
    if dist.get_rank() == 1:
        group.abort()
    with pytest.raises(gradwire.Aborted) as raised:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()  # WORLD is another group
    dist.destroy_process_group(group)
    found = (type(raised.value).__name__, raised.value.peer)
    assert found[0] == "Aborted"
    assert found[1] == 1 or dist.get_rank() == 1


@torch_ranks.on_ranks(2, backend="gradwire")
def test_a_program_that_leaves_operations_ends() -> None:
    """Ends with operations in flight, whose futures threads wait for."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        dist.irecv(torch.ones(1), 1).get_future()
        dist.all_reduce(torch.ones(1), async_op=True).get_future()
        store.set("begun", "")
    store.wait(["begun"])  # a rank that had left already would fail the other's calls


@sizes
@torch_ranks.on_ranks(dying=(1,), backend="gradwire")
def test_all_groups_end_and_a_new_one_goes_on(ranks: int) -> None:
    """A rank dies, and the others go on in a new group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone, others = dist.new_group(), dist.new_group([each for each in range(size) if each != 1])
    dist.barrier()
    if rank == 1:
        torch_ranks.die()
    found = []
    for group in (everyone, None, others):
        with pytest.raises(gradwire.TransportError) as raised:
            dist.all_reduce(torch.ones(1), group=group)
        found.append((type(raised.value).__name__, raised.value.peer, raised.value.job_peer))
    survivors = [each for each in range(size) if each != 1]
    group = dist.new_group(survivors, use_local_synchronization=True)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x == size - 1
    dist.destroy_process_group()
    assert found == [("TransportError", 1, 1)] * 2 + [("TransportError", -1, 1)]


def no_rendezvous(store: str) -> str | None:
    """Rank 1 never calls init_process_group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    waiting = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    if rank == 1:
        waiting.wait(["late"])
        return None
    with pytest.raises(gradwire.RendezvousError) as raised:
        dist.init_process_group(
            "gradwire",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=0.5),
        )
    assert not dist.is_initialized()
    if waiting.add("ended", 1) == size - 1:
        waiting.set("late", b"")
    return str(raised.value)


@sizes
def test_a_rank_that_does_not_come_to_the_first_group_is_named(ranks: int, tmp_path: Path) -> None:
    ended = torch_ranks.run(ranks, no_rendezvous, str(tmp_path / "store"), backend="gradwire")
    for text in (text for rank, text in enumerate(ended) if rank != 1):
        assert re.search(r"ranks? [\d, ]*\b1\b.* did not appear", text), text


def fail_in_fsdp() -> list[tuple[str, int]]:
    """Fails in other ways than by a death, each in a group of its own, while FSDP2 waits."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    store, rank, found = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
    for kind in ("another call", "abort", "late"):
        group = dist.new_group()
        torch.manual_seed(3)
        width = 30 if kind == "another call" and rank == 1 else 10
        module = fully_shard(nn.Linear(20, width), mesh=DeviceMesh.from_group(group, "cpu"))
        if kind != "another call":
            step(module)
        group.set_timeout(timedelta(seconds=3 if kind == "late" else LIMIT))
        dist.barrier()
        if rank == 1 and kind == "abort":
            group.abort()
        if rank == 1 and kind == "late":
            store.wait([f"late/{each}" for each in range(dist.get_world_size()) if each != 1])
        with pytest.raises(gradwire.Error) as raised:
            step(module)
        store.set(f"{kind}/{rank}", b"")
        found.append((type(raised.value).__name__, getattr(raised.value, "peer", -1)))
        if kind != "late":  # which ends all groups
            dist.barrier()
    return found


@sizes
def test_failures_of_all_kinds_reach_fsdp(ranks: int) -> None:
    ended = torch_ranks.run(ranks, fail_in_fsdp, backend="gradwire")
    for found in (found for rank, found in enumerate(ended) if rank != 1):
        assert [name for name, _ in found] == ["InvalidArgument", "Aborted", "Timeout"]
        assert [peer for _, peer in found[1:]] == [1, 1]


def miss_a_monitored_barrier() -> tuple[str, int]:
    """Rank 1 comes only when the others have given up."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 1:
        store.wait([f"missed/{each}" for each in range(dist.get_world_size()) if each != 1])
    with pytest.raises(gradwire.Error) as raised:
        dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=True)
    store.set(f"missed/{rank}", b"")
    return type(raised.value).__name__, getattr(raised.value, "peer", -1)


@has_monitored_barriers
@sizes
def test_a_rank_that_misses_a_monitored_barrier_is_named(ranks: int) -> None:
    ended = torch_ranks.run(ranks, miss_a_monitored_barrier, backend="gradwire")
    for found in (found for rank, found in enumerate(ended) if rank != 1):
        assert found == ("Timeout", 1)


@sizes
@torch_ranks.on_ranks(dying=(1,), backend="gradwire")
def test_a_rank_that_dies_within_backward_is_named(ranks: int) -> None:
    """Rank 1 dies while its gradients are computed, when others have begun to send theirs."""
    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)), bucket_cap_mb=1e-4
    )
    step(ddp)
    if dist.get_rank() == 1:
        next(ddp.parameters()).register_hook(lambda _: torch_ranks.die())
    with pytest.raises(gradwire.TransportError) as raised:
        step(ddp)
    assert (type(raised.value).__name__, raised.value.peer) == ("TransportError", 1)
