"""Groups whose floats travel in a codec: what is rounded, what is not, and training with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import InvalidArgument
from gradwire.codec import Int8
from gradwire.torch import Options
from sharded_training import agree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch_pool import on_ranks
from torch_versions import endpoint_of, has_fsdp_hooks

CODECS = {"bf16": 2**-8, "fp16": 2**-10, "int8": 1 / 127, "int8:block=64": 1 / 127}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
N = 4096


def own(rank: int, n: int = N, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    source = torch.Generator().manual_seed(rank)
    return torch.rand(n, generator=source).to(dtype)


def gathered(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [own(rank, N, dtype) for rank in range(dist.get_world_size())]


def group_of(codec: str, **options: Any) -> Any:
    return dist.new_group(backend="gradwire", pg_options=Options(codec=codec, **options))


def sent(group: Any, call: Callable[[Any], object]) -> int:
    communicator = endpoint_of(group).communicator
    before = communicator.traffic.bytes_sent
    call(group)
    return int(communicator.traffic.bytes_sent - before)


@on_ranks
def test_floats_are_rounded_alike_on_all_ranks() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for codec, step in CODECS.items():
        group = group_of(codec)
        for dtype in FLOATS:
            exact = torch.stack([each.double() for each in gathered(dtype)])
            error = 2.0 * size * (step + 2**-8 * (dtype is not torch.float32))
            x = own(rank, N, dtype)
            dist.all_reduce(x, group=group)
            assert agree([x])
            assert (x - exact.sum(0)).abs().max() <= error
            work = dist.all_reduce(y := own(rank, N, dtype), group=group, async_op=True)
            work.wait()
            assert torch.equal(x, y)
            dist.all_reduce(z := own(rank, N, dtype), dist.ReduceOp.AVG, group=group)
            assert (z - exact.mean(0)).abs().max() <= error
            whole = torch.empty(size * N, dtype=dtype)
            dist.all_gather_into_tensor(whole, own(rank, N, dtype), group=group)
            assert agree([whole])
            assert (whole.view(size, N) - exact).abs().max() <= step
            parts = [torch.empty(N, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, own(rank, N, dtype), group=group)
            assert torch.equal(torch.cat(parts), whole)
            block = torch.empty(N // size, dtype=dtype)
            dist.reduce_scatter_tensor(block, own(rank, N, dtype), group=group)
            assert (block - exact.sum(0).view(size, -1)[rank]).abs().max() <= error
            given = list(own(rank, N, dtype).view(size, -1))
            dist.reduce_scatter(listed := torch.empty_like(block), given, group=group)
            assert (listed - block).abs().max() <= error
            target = own(rank, N, dtype)
            dist.reduce(target, 0, group=group)
            if rank == 0:
                assert (target - exact.sum(0)).abs().max() <= error
        dist.destroy_process_group(group)


@on_ranks
def test_uneven_strided_and_coalesced_tensors() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), group_of("int8")
    sizes = [10 if each == 1 else 1024 + 24 * each for each in range(size)]
    parts = [torch.empty(n) for n in sizes]
    dist.all_gather(parts, own(rank, sizes[rank]), group=group)
    for source, part in enumerate(parts):
        wanted = own(source, sizes[source])
        assert torch.equal(part, wanted) == (source == 1)  # small ones travel as they are
        assert (part - wanted).abs().max() <= 1 / 127
    columns = torch.stack(gathered()).view(size, 64, 64).transpose(1, 2)
    dist.all_reduce(x := columns[rank].clone().t(), group=group)  # strided
    assert (x - columns.sum(0).t()).abs().max() <= 2.0 * size / 127
    with dist._coalescing_manager(group, device=torch.device("cpu")):
        blocks = [torch.empty(size * n) for n in (2048, 16)]
        for block, n in zip(blocks, (2048, 16), strict=True):
            dist.all_gather_into_tensor(block, own(rank, n), group=group)
    assert agree(blocks)
    with dist._coalescing_manager(group, device=torch.device("cpu")):
        for n in (2048, 16):
            dist.reduce_scatter_tensor(torch.empty(n), own(rank, size * n), group=group)
    dist.destroy_process_group(group)


@on_ranks
def test_other_types_and_operations_are_exact() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), group_of("int8")
    everything = range(size)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float64):
        dist.all_reduce(x := (torch.arange(N) % 50).to(dtype), group=group)
        assert torch.equal(x, (torch.arange(N) % 50 * size).to(dtype))
    dist.all_reduce(flags := torch.arange(N) % size == rank, group=group)
    assert bool(flags.all())
    dist.all_reduce(most := own(rank), dist.ReduceOp.MAX, group=group)
    assert torch.equal(most, torch.stack(gathered()).amax(0))
    dist.all_reduce(small := own(rank, 1000), group=group)
    wanted = sum(own(each, 1000) for each in everything)
    assert torch.allclose(small, wanted, atol=1e-6)
    dist.broadcast(copied := own(rank), 1, group=group)
    assert torch.equal(copied, own(1))
    dist.all_to_all_single(swapped := torch.empty(N), own(rank), group=group)
    assert torch.equal(swapped.view(size, -1)[1], own(1).view(size, -1)[rank])
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "x": own(rank)}, group=group)
    assert all(torch.equal(each["x"], own(source)) for source, each in enumerate(found))
    dist.barrier(group)
    dist.destroy_process_group(group)


@on_ranks
def test_messages() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), group_of("bf16")
    to, source = (rank + 1) % size, (rank - 1) % size
    for dtype in FLOATS:
        for n in (N, 8):
            work = dist.isend(own(rank, n, dtype), to, group=group, tag=n)
            dist.recv(x := torch.empty(n, dtype=dtype), source, group=group, tag=n)
            work.wait()
            exact = own(source, n, dtype)
            is_rounded = n == N and dtype is torch.float32  # others have 16 bits already
            assert torch.equal(x, exact.bfloat16().float() if is_rounded else exact)
    work = dist.isend(torch.arange(N), to, group=group)
    dist.recv(numbers := torch.empty(N, dtype=torch.int64), source, group=group)
    work.wait()
    assert torch.equal(numbers, torch.arange(N))
    early = own(rank)
    x = torch.empty(N)
    operations = [
        dist.P2POp(dist.isend, early, to, group),
        dist.P2POp(dist.irecv, x, source, group),
    ]
    for each in dist.batch_isend_irecv(operations):
        each.wait()
    assert torch.equal(x, own(source).bfloat16().float())
    dist.destroy_process_group(group)


@on_ranks
def test_bytes_fall() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    n = 65536
    plain, ratios = dist.new_group(), {"bf16": 2.0, "int8": 3.9}
    for codec, ratio in ratios.items():
        group = group_of(codec)
        calls: list[Callable[[Any], object]] = [
            lambda to: dist.all_reduce(own(rank, n), group=to),
            lambda to: dist.all_gather_into_tensor(torch.empty(size * n), own(rank, n), group=to),
            lambda to: dist.reduce_scatter_tensor(torch.empty(n // size), own(rank, n), group=to),
        ]
        for call in calls:
            assert sent(plain, call) / sent(group, call) > 0.95 * ratio
        dist.destroy_process_group(group)


def tensor_parallel_loss(codec: str) -> tuple[float, bool]:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    name = f"tensor-{codec}"  # DTensor takes meshes of equal names for one, whatever their groups
    mesh = init_device_mesh(
        "cpu",
        (dist.get_world_size(),),
        mesh_dim_names=(name,),
        backend_override={name: ("gradwire", Options(codec=codec))},
    )
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    target = copy.deepcopy(module)
    torch.manual_seed(6)
    for each in module.parameters():
        nn.init.normal_(each, std=0.2)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, mesh, plan)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    loss = torch.zeros(())
    for _ in range(60):
        x = torch.randn(128, 16)
        optimizer.zero_grad()
        loss = mse_loss(module(x), target(x).detach())
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    same = agree([loss])
    dist.destroy_process_group(mesh.get_group())
    return float(loss), same


@has_fsdp_hooks  # and no backend_override=
@on_ranks
def test_tensor_parallelism_trains() -> None:
    dense, _ = tensor_parallel_loss("none")
    for codec in ("bf16", "int8"):
        loss, same = tensor_parallel_loss(codec)
        assert same
        assert loss != dense
        assert loss < 1.2 * dense + 1e-3, codec


def pipeline_loss(codec: str) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size, group = dist.get_rank(), dist.get_world_size(), group_of(codec, min_elements=0)
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=size, loss_fn=mse_loss)
    optimizer = torch.optim.SGD(layers[rank].parameters(), 0.5)
    x = torch.randn(16 * size, 32)
    y = x.roll(1, 1).tanh()
    found = []
    for _ in range(12):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (x,) if rank == 0 else ()
        last = {"target": y, "losses": losses} if rank == size - 1 else {}
        schedule.step(*given, **last)
        optimizer.step()
        found.append(sum(each.item() for each in losses))
    dist.destroy_process_group(group)
    return found


@on_ranks
def test_pipelines_train() -> None:
    dense = pipeline_loss("none")
    for codec in ("bf16", "int8"):
        losses = pipeline_loss(codec)
        if dist.get_rank() == dist.get_world_size() - 1:
            assert losses[-1] < losses[0]
            assert losses != dense
            assert losses[-1] < 1.05 * dense[-1]


def test_options_refuse_codecs_for_sums_of_gradients() -> None:
    for codec in ("int4", "onebit", "topk", "lowrank"):
        with pytest.raises(InvalidArgument, match="is for sums of gradients"):
            Options(codec=codec)
    with pytest.raises(InvalidArgument, match="nosuch"):
        Options(codec="nosuch")
    assert repr(Options(Int8())) == "Options(codec='int8', min_elements=1024)"


@torch_ranks.on_ranks(2, backend="gradwire")
def test_options_that_differ_are_told_to_all_ranks() -> None:
    codec = "int8" if dist.get_rank() == 1 else "bf16"
    with pytest.raises(InvalidArgument) as raised:
        group_of(codec)
    with pytest.raises(InvalidArgument, match="pg_options="):
        dist.new_group(backend="gradwire", pg_options={"codec": "int8"})
    text = str(raised.value)
    assert "'bf16'" in text
    assert "'int8'" in text


def test_world_may_have_options(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gradwire", store=store, rank=0, world_size=1, pg_options=Options(codec="int8")
    )
    try:
        dist.all_reduce(x := torch.ones(N))
        assert torch.equal(x, torch.ones(N))
    finally:
        dist.destroy_process_group()
