"""Groups of the backend: how they are made, named and made again, and what is refused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire._base.deadline import Deadline
from gradwire.torch import Options
from gradwire.torch.backend import creation, rendezvous
from ranks import LIMIT, eventually
from torch_pool import on_ranks
from torch_versions import SPLITS, WRAPS, endpoint_of

ROOT = Path(__file__).parents[3]


def summed_over(group: Any) -> int:
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return int(x)


@on_ranks
def test_several_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = list(range(size))
    again, reverse = dist.new_group(), dist.new_group(everyone[::-1])
    alone = [dist.new_group([each]) for each in everyone]
    pairs = [dist.new_group([each, (each + 1) % size]) for each in everyone[: size // 2]]
    assert summed_over(again) == summed_over(reverse) == summed_over(None) == size
    assert summed_over(alone[rank]) == 1
    for first, pair in enumerate(pairs):
        if rank in (first, first + 1):
            assert summed_over(pair) == 2
            assert dist.get_group_rank(pair, rank) == rank - first
        else:
            assert pair is dist.GroupMember.NON_GROUP_MEMBER
    works = [
        dist.all_reduce(torch.ones(1000), group=each, async_op=True)
        for each in (again, None, reverse, again)
    ]
    for work in reversed(works):
        work.wait()
    for each in (again, reverse, alone[rank]):
        dist.destroy_process_group(each)
    for pair in pairs:
        dist.destroy_process_group(pair)
    assert summed_over(None) == size


@on_ranks
def test_names() -> None:
    world = dist.group.WORLD
    assert dist.get_backend() == "gradwire"
    if not WRAPS:
        assert world.name() == "gradwire"
    assert world.group_name in dist.distributed_c10d._world.pg_names.values()
    assert {each.type for each in world._device_types} == {"cpu", "cuda"}
    assert (world.rank(), world.size()) == (dist.get_rank(), dist.get_world_size())
    named = dist.new_group(group_desc="a description")
    assert named.group_desc == "a description"
    for devices in (["cpu"], ["cpu", "cuda"], ["cuda"]):
        made = dist.new_group(backend=",".join(f"{each}:gradwire" for each in devices))
        its = made._get_backend(torch.device(devices[0]))
        assert its._endpoint.communicator.size == world.size()
        assert sorted(each.type for each in made._device_types) == devices


@on_ranks
def test_device_meshes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("rows", "columns"))
    assert summed_over(mesh["rows"].get_group()) == size // 2
    assert summed_over(mesh["columns"].get_group()) == 2
    assert mesh.get_local_rank("columns") == dist.get_rank() % 2


@on_ranks
def test_what_cannot_be_is_refused() -> None:
    if not WRAPS:
        with pytest.raises(gradwire.InvalidArgument, match=r"up to torch 2\.13") as raised:
            dist.new_group(backend="cpu:gloo,cuda:gradwire")
        assert "gloo would be left out" in str(raised.value)
    with pytest.raises(gradwire.InvalidArgument, match="works on cpu, cuda, not on xpu"):
        dist.new_group(backend="xpu:gradwire")
    with pytest.raises(gradwire.InvalidArgument, match="pg_options"):
        dist.new_group(pg_options=object())
    dist.barrier()


@pytest.mark.parametrize("version", ["2.4.1", "2.6.0+cu124", "1.13.1"])
def test_an_old_torch_is_told_of_the_hook(version: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=r"2\.7 or later.*gradwire\.torch\.register"):
        creation.require_version(version)


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cpu", "2.15.0a0+git12", "3.0"])
def test_later_ones_are_taken(version: str) -> None:
    creation.require_version(version)


def entry_point() -> str:
    """The entry point for torch, as pyproject.toml has it."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    return lines[lines.index('[project.entry-points."torch.backends"]') + 1].replace('"', "")


def test_torch_finds_the_backend_without_an_import(tmp_path: Path) -> None:
    info = tmp_path / "found-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: found\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{entry_point()}\n")
    code = """
import sys, torch, torch.distributed as dist
assert not [name for name in sys.modules if name.startswith("gradwire.torch")]
dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
print(x.tolist(), dist.get_backend())
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout == "[1.0, 1.0, 1.0] gradwire\n", done.stderr


@pytest.mark.parametrize("ranks", [2, 4])
@torch_ranks.on_ranks(backend="gradwire")
def test_an_end_and_a_new_beginning_over_the_same_store(ranks: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank < 2:
        for _ in range(2):  # torch gives them the same name
            pair = dist.new_group([0, 1], use_local_synchronization=True)
            assert summed_over(pair) == 2
            dist.destroy_process_group(pair)
    for _ in range(2):
        pair = dist.new_group([0, 1])
        assert summed_over(None) == size
        if rank < 2:
            assert summed_over(pair) == 2
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group(
            "gradwire", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
    dist.barrier()


@torch_ranks.on_ranks(2, backend="gradwire")
def test_ranks_that_made_other_groups_before(tmp_path: Path) -> None:
    """Meets after each rank has made another number of groups, as one started anew has."""
    store = str(tmp_path / "store")
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(rank):
        dist.destroy_process_group()
        dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
    for turn in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            "gradwire",
            # Another file each time: torch removes one when its last user goes, perhaps a late one.
            store=dist.FileStore(f"{store}-{turn}", size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=LIMIT / 4),
        )
        assert summed_over(None) == size


@on_ranks
def test_timeouts_are_those_of_torch() -> None:
    group = dist.new_group(timeout=timedelta(seconds=33))
    endpoint = endpoint_of(group)
    assert endpoint.communicator._timeout == 33
    group.set_timeout(timedelta(seconds=44))
    assert endpoint.seconds(None) == 44
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=55), group)
    assert endpoint.seconds(None) == 55
    assert summed_over(group) == dist.get_world_size()


def descriptors_and_threads() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def make_and_destroy() -> None:
    """Uses everything of a group that has threads: futures, and receives of both kinds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().wait()
    work = dist.isend(torch.ones(1), (rank + 1) % size, group=group)
    dist.recv(torch.ones(1), (rank - 1) % size, group=group)
    work.wait()
    dist.isend(torch.ones(1), (rank + 1) % size, group=group).get_future()
    dist.irecv(torch.ones(1), group=group).get_future().wait()
    dist.barrier(group)
    dist.destroy_process_group(group)


@on_ranks
def test_groups_leave_nothing_behind() -> None:
    make_and_destroy()
    before = descriptors_and_threads()
    for _ in range(5):
        make_and_destroy()
    eventually(lambda: descriptors_and_threads() <= before)


@on_ranks
def test_groups_are_split_where_torch_lets_them() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [[first + 1, first] for first in range(0, size, 2)]
    if not SPLITS:
        with pytest.raises(RuntimeError, match=r"No device associated|does not support splitting"):
            dist.split_group(split_ranks=pairs)
        return
    pair = dist.split_group(split_ranks=pairs, timeout=timedelta(seconds=33))
    assert (pair.rank(), pair.size()) == (1 - rank % 2, 2)
    assert endpoint_of(pair).communicator._timeout == 33
    dist.broadcast(x := torch.tensor([rank]), pairs[rank // 2][0], group=pair)
    assert int(x) == pairs[rank // 2][0]
    alone = dist.split_group(parent_pg=pair, split_ranks=[[0], [1]])
    assert summed_over(alone) == 1
    for each in (alone, pair):
        dist.destroy_process_group(each)
    rounding = dist.new_group(pg_options=Options(codec="bf16", min_elements=1))
    whole = dist.split_group(parent_pg=rounding, split_ranks=[list(range(size))])
    dist.all_reduce(x := torch.full((5,), 1 + 2**-10), group=whole)
    assert x.tolist() == [size] * 5
    if rank == 0:
        assert summed_over(dist.split_group(split_ranks=[[0]])) == 1
    else:
        with pytest.raises(
            gradwire.InvalidArgument, match=f"rank {rank} is in none of split_ranks"
        ):
            dist.split_group(split_ranks=[[0]])
    assert summed_over(None) == size


@on_ranks
def test_monitored_barriers_where_torch_lets_them() -> None:
    if not WRAPS:
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()
        return
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=LIMIT), wait_all_ranks=True)


def test_a_rank_that_waits_for_another_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    first = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    second = dist.TCPStore("127.0.0.1", first.port, 2, is_master=False)
    early, late = (
        rendezvous._StoreExchange(store, rank, 2, Deadline(LIMIT))
        for rank, store in enumerate((first, second))
    )
    found: list[list[bytes]] = []
    waiting = threading.Thread(target=lambda: found.append(early.all_gather(b"0")))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert late.all_gather(b"1") == [b"0", b"1"]
    waiting.join(LIMIT)
    assert found == [[b"0", b"1"]]
    assert capfd.readouterr().err == ""


def test_a_rank_given_twice_is_told_to_all_that_wait() -> None:
    """A third process has rank 1 too, in the place of rank 2."""
    store, limit = dist.HashStore(), Deadline(LIMIT)

    def meet(rank: int) -> BaseException | None:
        return pool.submit(
            lambda: rendezvous._StoreExchange(store, rank, 3, limit).all_gather(b"")
        ).exception()

    with ThreadPoolExecutor(6) as pool:
        told = [str(each) for each in pool.map(meet, (0, 1, 1))]
    assert all("rank 1 of 3 was given twice" in each for each in told), told
