"""Collectives of torch.distributed over the backend, against sums that are done by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch_pool import Pool, on_ranks
from torch_versions import WRAPS, endpoint_of

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def each_rank() -> Iterator[int]:
    yield from range(dist.get_world_size())


def of_rank(rank: int, shape: tuple[int, ...] = (3, 4), dtype: torch.dtype = torch.float32) -> Any:
    """Small whole numbers, other ones on each rank, exact in every type."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 3 * rank) % 7 + 1).reshape(shape).to(dtype)


def mine(*args: Any, **options: Any) -> Any:
    return of_rank(dist.get_rank(), *args, **options)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found.contiguous().view(-1).view(torch.uint8), _bytes(wanted)), found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def summed(make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    total = make(0).to(torch.float64)
    for rank in range(1, dist.get_world_size()):
        total = total + make(rank).to(torch.float64)
    return total


@on_ranks
def test_every_type_can_be_summed() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        x = mine(dtype=dtype)
        dist.all_reduce(x)
        equal(x, summed(of_rank).to(dtype))


@on_ranks
def test_other_reductions_of_floats() -> None:
    ranks = [of_rank(rank) for rank in each_rank()]
    stacked = torch.stack(ranks)
    wanted = {
        ReduceOp.AVG: stacked.sum(0) / len(ranks),
        ReduceOp.PRODUCT: stacked.prod(0),
        ReduceOp.MIN: stacked.amin(0),
        ReduceOp.MAX: stacked.amax(0),
    }
    for op, value in wanted.items():
        x = mine()
        dist.all_reduce(x, op)
        equal(x, value)
    x = mine()
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    equal(x, stacked.sum(0) / 2)


@on_ranks
def test_averages_of_integers_are_cut_off() -> None:
    size = dist.get_world_size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        sign = 1 if dtype is torch.uint8 else -1
        own = (sign * torch.arange(1, 2 * size + 1) + dist.get_rank()).to(dtype)
        total = sum(sign * torch.arange(1, 2 * size + 1) + rank for rank in each_rank())
        wanted = total.div(size, rounding_mode="trunc").to(dtype)
        part = wanted.chunk(size)[dist.get_rank()]
        dist.all_reduce(x := own.clone(), ReduceOp.AVG)
        equal(x, wanted)
        work = dist.all_reduce(x := own.repeat(2, 1).t(), ReduceOp.AVG, async_op=True)
        work.wait()
        equal(x[:, 0], wanted)
        dist.reduce(x := own.clone(), 0, ReduceOp.AVG)
        equal(x, wanted if dist.get_rank() == 0 else own)
        dist.reduce_scatter(x := torch.empty_like(part), list(own.chunk(size)), ReduceOp.AVG)
        equal(x, part)
        dist.reduce_scatter_tensor(x := torch.empty_like(part), own, ReduceOp.AVG)
        equal(x, part)
        both = [own.clone(), 2 * own[:1]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced(both, ReduceOp.AVG)
        equal(both[0], wanted)
        with dist._coalescing_manager():
            for _ in range(2):
                dist.reduce_scatter_tensor(x := torch.empty_like(part), own, ReduceOp.AVG)
        equal(x, part)


@on_ranks
def test_bitwise_reductions() -> None:
    for dtype in (torch.int32, torch.uint8):
        wanted = {
            op: of_rank(0, dtype=dtype) for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
        }
        for rank in range(1, dist.get_world_size()):
            other = of_rank(rank, dtype=dtype)
            wanted[ReduceOp.BAND] = wanted[ReduceOp.BAND] & other
            wanted[ReduceOp.BOR] = wanted[ReduceOp.BOR] | other
            wanted[ReduceOp.BXOR] = wanted[ReduceOp.BXOR] ^ other
        for op, value in wanted.items():
            x = mine(dtype=dtype)
            dist.all_reduce(x, op)
            equal(x, value)


@on_ranks
def test_bools_and_complex_numbers() -> None:
    every = torch.tensor([rank > 0 for rank in each_rank()])
    x = every[dist.get_rank()].reshape(1).clone()
    dist.all_reduce(x, ReduceOp.MAX)
    equal(x, torch.tensor([True]))
    x = every[dist.get_rank()].reshape(1).clone()
    dist.all_reduce(x, ReduceOp.BAND)
    equal(x, torch.tensor([False]))
    for call in (dist.all_reduce, lambda z: dist.reduce(z, 0)):
        z = torch.complex(mine(), 2 * mine())
        call(z)
        if dist.get_rank() == 0 or call is dist.all_reduce:
            total = summed(of_rank).to(torch.float32)
            equal(z, torch.complex(total, 2 * total))
    out = [torch.empty(3, dtype=torch.complex64) for _ in each_rank()]
    dist.all_gather(out, torch.full((3,), complex(dist.get_rank(), 1)))
    for rank, each in enumerate(out):
        equal(each, torch.full((3,), complex(rank, 1)))


@on_ranks
def test_strided_and_empty_tensors() -> None:
    total = summed(lambda rank: of_rank(rank, (6, 4))).to(torch.float32)
    views = [lambda x: x.t(), lambda x: x[::2], lambda x: x[:, 1], lambda x: x[1, 2]]
    for view in views:
        whole = mine((6, 4))
        dist.all_reduce(view(whole))
        equal(view(whole), view(total))
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.all_gather([torch.empty(0) for _ in each_rank()], torch.empty(0))
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))
    dist.broadcast(empty, 0)
    parameter = torch.nn.Parameter(mine())
    version = parameter._version
    dist.broadcast(parameter.detach(), 0)
    equal(parameter.detach(), of_rank(0))
    assert parameter._version > version


@on_ranks
def test_broadcast_and_all_gather() -> None:
    rank, size, last = dist.get_rank(), dist.get_world_size(), dist.get_world_size() - 1
    for dtype in (*FLOATS, *INTEGERS, *FLOAT8, torch.bool, torch.complex64):
        x = mine(dtype=dtype)
        dist.broadcast(x, last)
        equal(x, of_rank(last, dtype=dtype))
        out = [torch.empty_like(x) for _ in each_rank()]
        dist.all_gather(out, mine(dtype=dtype))
        for other, each in enumerate(out):
            equal(each, of_rank(other, dtype=dtype))
    one = torch.empty(3 * size, 4)
    dist.all_gather_into_tensor(one, mine())
    equal(one, torch.cat([of_rank(other) for other in each_rank()]))
    stacked = torch.empty(size, 3, 4)
    dist.all_gather_into_tensor(stacked, mine())
    equal(stacked.view(-1, 4), one)
    in_place = torch.zeros(3 * size, 4)
    own = in_place[3 * rank : 3 * rank + 3]
    own.copy_(mine())
    dist.all_gather_into_tensor(in_place, own)
    equal(in_place, one)
    scalars = torch.empty(size)
    dist.all_gather_into_tensor(scalars, torch.tensor(float(rank)))
    equal(scalars, torch.arange(size, dtype=torch.float32))
    uneven = [torch.empty(other + 1, 2) for other in each_rank()]
    dist.all_gather(uneven, mine((rank + 1, 2)))
    for other, each in enumerate(uneven):
        equal(each, of_rank(other, (other + 1, 2)))
    strided = [torch.empty(4, 3).t() for _ in each_rank()]
    dist.all_gather(strided, mine((4, 3)).t())
    for other, each in enumerate(strided):
        equal(each, of_rank(other, (4, 3)).t())


@on_ranks
def test_reduce_gather_and_scatter() -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = mine()
    dist.reduce(x, last)
    equal(x, summed(of_rank).to(torch.float32) if rank == last else mine())
    out = [torch.empty(3, 4) for _ in each_rank()] if rank == last else None
    dist.gather(mine(), out, dst=last)
    for other, each in enumerate(out or []):
        equal(each, of_rank(other))
    x = torch.empty(3, 4)
    dist.scatter(x, [of_rank(other) for other in each_rank()] if rank == last else None, src=last)
    equal(x, mine())


@on_ranks
def test_reduce_scatter_even_and_uneven() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = summed(lambda other: of_rank(other, (2 * size, 3))).to(torch.float32)
    x = torch.empty(2, 3)
    dist.reduce_scatter_tensor(x, mine((2 * size, 3)))
    equal(x, total[2 * rank : 2 * rank + 2])
    dist.reduce_scatter(x, list(mine((2 * size, 3)).chunk(size)), op=ReduceOp.AVG)
    equal(x, total[2 * rank : 2 * rank + 2] / size)
    dist.reduce_scatter_tensor(x, mine((2 * size, 3)), op=dist._make_nccl_premul_sum(0.25))
    equal(x, total[2 * rank : 2 * rank + 2] / 4)
    blocks = [mine((other + 1,)) for other in each_rank()]
    x = torch.empty(rank + 1)
    dist.reduce_scatter(x, blocks)
    equal(x, summed(lambda other: of_rank(other, (rank + 1,))).to(torch.float32))


@on_ranks
def test_all_to_all_even_and_uneven() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def block(source: int, target: int) -> torch.Tensor:
        return of_rank(source * size + target, (source + target, 2))

    out = [torch.empty(other + rank, 2) for other in each_rank()]
    dist.all_to_all(out, [block(rank, other) for other in each_rank()])
    for other, each in enumerate(out):
        equal(each, block(other, rank))
    one = torch.empty(sum(other + rank for other in each_rank()), 2)
    sizes = [other + rank for other in each_rank()]
    given = torch.cat([block(rank, other) for other in each_rank()])
    dist.all_to_all_single(one, given, sizes, sizes)
    equal(one, torch.cat([block(other, rank) for other in each_rank()]))
    even = torch.empty(size)
    dist.all_to_all_single(even, torch.arange(size) + 10.0 * rank)
    equal(even, torch.arange(size) * 10.0 + rank)


def traffic() -> int:
    frames = endpoint_of(dist.group.WORLD).communicator.traffic.frames_sent
    return int(frames)


@on_ranks
def test_coalesced_calls() -> None:
    size = dist.get_world_size()
    shapes, dtypes = [(3, 4), (5,), ()], [torch.float32, torch.float64, torch.float32]

    def given() -> list[torch.Tensor]:
        return [mine(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def wanted(i: int) -> torch.Tensor:
        return summed(lambda rank: of_rank(rank, shapes[i])).to(dtypes[i])

    before = traffic()
    tensors = given()
    with dist._coalescing_manager():
        for each in tensors:
            dist.all_reduce(each)
    for i, each in enumerate(tensors):
        equal(each, wanted(i))
    outs = [each.new_empty(size, *each.shape) for each in given()]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, each in zip(outs, given(), strict=True):
            dist.all_gather_into_tensor(out, each)
    manager.wait()
    for i, out in enumerate(outs):
        equal(out, torch.stack([of_rank(rank, shapes[i], dtypes[i]) for rank in each_rank()]))
    sums = [each.clone() for each in given()]
    with dist._coalescing_manager():
        for each in sums:
            dist.reduce_scatter_tensor(each, torch.stack([each] * size))
    for i, each in enumerate(sums):
        equal(each, wanted(i))
    assert traffic() > before
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(tensors[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        tensors = [mine(), mine((5,))]
        dist.all_reduce_coalesced(tensors, async_op=True).wait()
        for i, each in enumerate(tensors):
            equal(each, wanted(i).to(torch.float32))
        lists = [[torch.empty(3, 4), torch.empty(5)] for _ in each_rank()]
        dist.all_gather_coalesced(lists, [mine(), mine((5,))])
    for rank, (one, other) in enumerate(lists):
        equal(one, of_rank(rank))
        equal(other, of_rank(rank, (5,)))


@on_ranks
def test_a_coalesced_call_is_one_operation() -> None:
    size = dist.get_world_size()

    def gather(count: int) -> int:
        before = traffic()
        with dist._coalescing_manager():
            for _ in range(count):
                dist.all_gather_into_tensor(torch.empty(size), torch.ones(1))
        return traffic() - before

    assert gather(1) == gather(5)


@on_ranks
def test_names_of_all_versions() -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    total, out = summed(of_rank).to(torch.float32), torch.empty(3 * size, 4)
    for name in ("all_gather_single", "_allgather_base"):
        getattr(group, name)(out.zero_(), mine()).wait()
        equal(out[:3], of_rank(0))
    for name in ("reduce_scatter_single", "_reduce_scatter_base"):
        x = torch.empty(3, 4)
        getattr(group, name)(x, torch.cat([mine()] * size)).wait()
        equal(x, total)
    for name in ("all_to_all_single", "alltoall_base"):
        x = torch.empty(size)
        getattr(group, name)(x, torch.full((size,), 1.0 * dist.get_rank()), [], []).wait()
        equal(x, torch.arange(size, dtype=torch.float32))
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        getattr(group, name)([out.zero_()], [mine()]).wait()
        equal(out[:3], of_rank(0))
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        x = torch.empty(3, 4)
        getattr(group, name)([x], [torch.cat([mine()] * size)]).wait()
        equal(x, total)
    x = mine()
    group.allreduce(x).wait()
    equal(x, total)
    group.broadcast(x := mine(), 1).wait()
    equal(x, of_rank(1))
    group.allreduce([x := mine()], ReduceOp.MAX).wait()
    equal(x, torch.stack([of_rank(rank) for rank in each_rank()]).amax(0))


@on_ranks
def test_works_and_futures() -> None:
    total = summed(of_rank).to(torch.float32)
    tensors = [mine() for _ in range(20)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    futures = [work.get_future() for work in works[::2]]
    for future in futures:
        (found,) = future.wait()
        equal(found, total)
    for work, each in zip(works, tensors, strict=True):
        assert work.wait()
        if not WRAPS:
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
            equal(work.result()[0], total)
        equal(each, total)
    doubled = dist.all_reduce(mine(), async_op=True).get_future().then(lambda f: 2 * f.value()[0])
    equal(doubled.wait(), 2 * total)
    whole = mine((4, 3))
    dist.all_reduce(whole.t(), async_op=True).wait()
    equal(whole, summed(lambda rank: of_rank(rank, (4, 3))).to(torch.float32))
    dist.barrier(async_op=True).wait()
    dist.barrier()


@on_ranks
def test_object_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": other, "text": "x" * other} for other in each_rank()]
    given = ["a", (1, 2), None] if rank == 0 else [None] * 3
    dist.broadcast_object_list(given, src=0)
    assert given == ["a", (1, 2), None]
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, dst=1)
    assert gathered == (list(each_rank()) if rank == 1 else None)
    own: list[Any] = [None]
    dist.scatter_object_list(own, list(range(10, 10 + size)) if rank == 0 else None, src=0)
    assert own == [10 + rank]


@on_ranks
def test_sparse_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows(other: int) -> torch.Tensor:
        x = torch.zeros(9, 2)
        x[other] = 1 + other
        x[8] = 10
        return x if other else torch.zeros(9, 2)

    for op in (ReduceOp.SUM, ReduceOp.AVG):
        x = rows(rank).to_sparse(1)
        dist.all_reduce(x, op)
        total = summed(rows).to(torch.float32)
        equal(x.to_dense(), total / size if op == ReduceOp.AVG else total)
    with pytest.raises(gradwire.InvalidArgument, match="sparse"):
        dist.all_reduce(rows(rank).to_sparse(), ReduceOp.MAX)
    for x in (rows(rank).to(torch.uint32), rows(rank).long().to_sparse()):
        with pytest.raises(gradwire.InvalidArgument, match=r"'avg' of .*int.* divide the sum"):
            dist.all_reduce(x, ReduceOp.AVG)


def functional() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    total = summed(of_rank).to(torch.float32)
    equal(functional.all_reduce(mine(), "sum", group) + 0, total)
    equal(functional.all_reduce_coalesced([mine()], "avg", group)[0] + 0, total / size)
    gathered = torch.cat([of_rank(other) for other in each_rank()])
    equal(torch.ops._c10d_functional.wait_tensor(single_gather(mine(), size)), gathered)
    equal(functional.broadcast(mine(), 1, group) + 0, of_rank(1))
    scattered = functional.reduce_scatter_tensor_coalesced(
        [torch.cat([mine()] * size)], "sum", [0], group
    )
    equal(scattered[0] + 0, total)
    exchanged = functional.all_to_all_single(
        torch.full((size,), 1.0 * rank), [1] * size, [1] * size, group
    )
    equal(exchanged + 0, torch.arange(size, dtype=torch.float32))

    # A result that may not be there yet, as the input of another call.
    pending = functional.all_reduce(mine(), "sum", group)
    assert type(pending) is functional.AsyncCollectiveTensor
    dist.all_reduce(pending)
    equal(pending + 0, total * size)


def single_gather(x: torch.Tensor, size: int) -> torch.Tensor:
    name = dist.group.WORLD.group_name
    return torch.ops._c10d_functional.all_gather_into_tensor(x, size, name)


def test_functional_collectives(pool: Pool) -> None:
    pool.run(functional)


@on_ranks
def test_wrong_arguments_leave_the_group_usable() -> None:
    size = dist.get_world_size()
    with pytest.raises(gradwire.InvalidArgument, match="split_sizes"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * size, [7] * size)
    with pytest.raises(gradwire.InvalidArgument, match="cannot be cut into"):
        dist.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(gradwire.InvalidArgument, match="float8"):
        dist.all_reduce(torch.zeros(2).to(FLOAT8[0]))
    if not WRAPS:  # its dispatcher takes them
        with pytest.raises(gradwire.InvalidArgument, match="meta"):
            dist.all_reduce(torch.empty(2, device="meta"))
    dist.barrier()  # the group is as good as before


@on_ranks
def test_the_profiler_shows_calls() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size()), torch.ones(1))
        dist.barrier()
    names = {each.key for each in profile.key_averages() if each.key.startswith("gradwire:")}
    assert names == {"gradwire:all_reduce", "gradwire:all_gather", "gradwire:barrier"}
