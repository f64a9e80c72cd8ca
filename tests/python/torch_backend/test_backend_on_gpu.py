"""CUDA tensors over the backend, on a simulated GPU: what runs there, and what goes by the host.

Streams run in a random order, as far as events let them, so a missing wait gives wrong results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import simulated_gpu
import simulated_torch_cuda as simulated
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Options
from gradwire.torch.backend import devices
from simulated_torch_cuda import Stream, cpu, cuda, on_stream
from torch_versions import WRAPS, endpoint_of

pytestmark = [
    simulated_gpu.needed,
    pytest.mark.skipif(WRAPS, reason="torch's C++ half wants a GPU of its own for CUDA tensors"),
]

Case = Callable[[int, Callable[[torch.Tensor], Any], dict[str, Any]], Any]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(8).to(dtype)


def reduced(rank: int, to: Any, how: dict[str, Any]) -> Any:
    tensors = [to(values(rank, 5, 4)), to(values(rank, 5, 4)).t(), to(values(rank, 0))]
    tensors += [to(values(rank, 9, dtype=each)) for each in (torch.int64, torch.bfloat16)]
    return tensors, [dist.all_reduce(each, dist.ReduceOp.MAX, **how) for each in tensors]


def summed(rank: int, to: Any, how: dict[str, Any]) -> Any:
    x, whole = to(values(rank, 6, 2)), to(values(rank, 2, 6))
    works = [dist.all_reduce(x, **how), dist.reduce(whole.t(), 1, **how)]
    return ([x, whole] if rank == 1 else [x]), works


def moved(rank: int, to: Any, how: dict[str, Any]) -> Any:
    x, y = to(values(rank, 4)), to(values(rank, 3, 2)).t()
    float8 = to(values(rank, 8).to(torch.float8_e5m2).view(torch.uint8)).view(torch.float8_e5m2)
    works = [dist.broadcast(x, 1, **how), dist.broadcast(y, 0, **how)]
    works += [dist.broadcast(float8, 0, **how)]
    return [x, y, float8.view(torch.uint8)], works


def gathered(rank: int, to: Any, how: dict[str, Any]) -> Any:
    x = to(values(rank, 2 + rank))
    uneven = [to(torch.zeros(2)), to(torch.zeros(3))]
    even = to(torch.zeros(8))
    at_root = [to(torch.zeros(3, 2)).t() for _ in range(2)] if rank == 0 else None
    works = [
        dist.all_gather(uneven, x, **how),
        dist.all_gather_into_tensor(even, to(values(rank, 4)), **how),
        dist.gather(to(values(rank, 2, 3)), at_root, 0, **how),
    ]
    return [*uneven, even, *(at_root or [])], works


def scattered(rank: int, to: Any, how: dict[str, Any]) -> Any:
    blocks = [to(values(rank, 2, 3)).t(), to(values(rank + 5, 2))]
    mine, half = to(torch.zeros(blocks[rank].shape)), to(torch.zeros(4))
    part = to(torch.zeros(2, 3)).t()
    given = [to(values(8, 3, 2)), to(values(9, 3, 2))] if rank == 1 else None
    works = [
        dist.reduce_scatter(mine, blocks, **how),
        dist.reduce_scatter_tensor(half, to(values(rank, 8)), **how),
        dist.scatter(part, given, 1, **how),
    ]
    return [mine, half, part], works


def exchanged(rank: int, to: Any, how: dict[str, Any]) -> Any:
    given = [to(values(rank, 1 + rank)), to(values(rank, 3 + rank))]
    taken = [to(torch.zeros(1 + 2 * rank)), to(torch.zeros(2 + 2 * rank))]
    whole = to(torch.zeros(2, 3))
    works = [
        dist.all_to_all(taken, given, **how),
        dist.all_to_all_single(whole, to(values(rank, 3, 2)).t(), **how),
    ]
    return [*taken, whole], works


def coalesced(rank: int, to: Any, how: dict[str, Any]) -> Any:
    sums = [to(values(rank, 3)), to(values(rank, 2, 2, dtype=torch.float64)), to(values(rank, 5))]
    outs = [to(torch.zeros(2)), to(torch.zeros(6))]
    parts = [to(torch.zeros(2)), to(torch.zeros(1, dtype=torch.int32))]
    with dist._coalescing_manager(async_ops=bool(how)) as reducing:
        for each in sums:
            dist.all_reduce(each)
    with dist._coalescing_manager(async_ops=bool(how)) as gathering:
        for out in outs:
            dist.all_gather_into_tensor(out, to(values(rank, len(out) // 2)))
    with dist._coalescing_manager(async_ops=bool(how)) as scattering:
        for out in parts:
            dist.reduce_scatter_tensor(out, to(values(rank, 2 * len(out), dtype=out.dtype)))
    by_rank = [[to(torch.zeros(2)), to(torch.zeros(3))] for _ in range(2)]
    own = [to(values(rank, 2)), to(values(rank, 3))]
    listed = dist.group.WORLD.allgather_coalesced(by_rank, own)
    return [*sums, *outs, *parts, *by_rank[0], *by_rank[1]], [
        *((reducing, gathering, scattering) if how else ()),
        listed,
    ]


def prescaled(rank: int, to: Any, how: dict[str, Any]) -> Any:
    x, half = to(values(rank, 5, 4)).t(), to(torch.zeros(3))
    op = dist._make_nccl_premul_sum(0.5)
    works = [
        dist.all_reduce(x, op, **how),
        dist.reduce_scatter_tensor(half, to(values(rank, 6)), op, **how),
    ]
    return [x, half], works


def messages(rank: int, to: Any, how: dict[str, Any]) -> Any:
    """Tags in another order, any source, a strided tensor, a batch, and from a GPU to the CPU."""
    x, late, early = to(values(rank, 3)), to(torch.zeros(3)), to(torch.zeros(2, 3)).t()
    taken, from_gpu = to(torch.zeros(4)), torch.zeros(3)
    if not how:
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(late)
        return [x, late], []
    peer = 1 - rank
    works = [
        dist.isend(x, peer, tag=1),
        dist.isend(to(values(rank, 3, 2)), peer, tag=2),
        dist.isend(x, peer, tag=3),
        dist.irecv(early, peer, tag=2),
        dist.irecv(late, tag=1),
        dist.irecv(from_gpu, peer, tag=3),
    ]
    ops = [
        dist.P2POp(dist.irecv, taken, peer, tag=4),
        dist.P2POp(dist.isend, to(values(rank, 4)), peer, tag=4),
    ]
    return [late, early, taken, from_gpu], [*works, *dist.batch_isend_irecv(ops)]


ON_GPU: tuple[Case, ...] = (reduced, summed, moved, gathered, scattered, exchanged, coalesced)
BY_HOST: tuple[Case, ...] = (prescaled, messages)


def on_cpu(tensor: Any) -> torch.Tensor:
    return cpu(tensor) if isinstance(tensor, simulated.CudaTensor) else tensor.clone()


def results(case: Case, to: Callable[[torch.Tensor], Any], how: dict[str, Any]) -> list[Any]:
    """What a case leaves, on the CPU; read on the stream that waited."""
    tensors, works = case(dist.get_rank(), to, how)
    for each in works:
        if each is not None:
            each.wait()
    return list(map(on_cpu, tensors))


def compare(cases: tuple[Case, ...]) -> None:
    """Blocking and in the background, on two streams."""
    for case in cases:
        for how in ({}, {"async_op": True}):
            expected = results(case, torch.Tensor.clone, how)
            for _ in range(2):
                with on_stream(Stream()):
                    found = results(case, cuda, how)
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a, b), (case.__name__, how, a, b)


@torch_ranks.on_ranks(2, backend="gradwire")
def test_results_are_those_of_the_cpu() -> None:
    simulated.install()
    compare(ON_GPU)
    assert not simulated._pinned  # nothing of it went through the host's memory
    gpu = endpoint_of(dist.group.WORLD).communicator._gpu
    assert gpu.links == "host"
    compare(BY_HOST)
    assert simulated._pinned


def read_back(work: Any) -> Any:
    work.wait()
    return work.results[0]


READERS: tuple[Callable[[Any], Any], ...] = (
    read_back,
    lambda work: work.result()[0],
    lambda work: work.get_future().wait()[0],
    lambda work: work.get_future().then(lambda future: future.value()[0]).wait(),
)


@torch_ranks.on_ranks(2, backend="gradwire")
def test_waits_order_streams_and_futures() -> None:
    """Reads results on another stream than the caller's, then on the caller's."""
    simulated.install()
    rank = dist.get_rank()
    total, theirs = values(0, 4, 3) + values(1, 4, 3), values(1 - rank, 3, 2)
    dist.all_reduce(cuda(values(rank, 3)), async_op=True).wait()
    own = endpoint_of(dist.group.WORLD).communicator._gpu.stream
    dist.barrier()
    library = simulated_gpu.library()
    waits = library.simulated_cuda_waits()
    works = [dist.all_reduce(cuda(values(rank, 4, 3).t()).t(), async_op=True) for _ in range(3)]
    for each in works:
        each.get_future()
        each.wait()
    assert library.simulated_cuda_waits() == waits  # the host does not wait
    for read in READERS * 4:
        whole = cuda(values(rank, 4, 3).t()).t()
        reducing = dist.all_reduce(whole, async_op=True)
        assert (whole.data_ptr(), own) in simulated.recorded  # of the copy into it
        sending = dist.isend(cuda(values(rank, 3, 2)), 1 - rank)
        receiving = dist.irecv(cuda(torch.zeros(2, 3)).t(), 1 - rank)
        for work, expected in ((receiving, theirs), (reducing, total)):
            with on_stream(Stream()):
                assert torch.equal(cpu(read(work)), expected)
            work.wait()
            assert torch.equal(cpu(work.results[0]), expected)
            assert work.is_completed()
            assert work.exception() is None
        assert receiving._source_rank() == 1 - rank
        sending.get_future().wait()


def encoded(rank: int, to: Any, group: Any) -> list[torch.Tensor]:
    """What calls of a group with a codec leave, on the CPU."""
    x, gathered, taken = to(values(rank, 500)), to(torch.zeros(1000)), to(torch.zeros(500))
    dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(gathered, to(values(rank, 500)), group=group)
    sending = dist.isend(to(values(rank, 500)), 1 - rank, group=group)
    dist.recv(taken, 1 - rank, group=group)
    sending.wait()
    return [on_cpu(each) for each in (x, gathered, taken)]


@torch_ranks.on_ranks(2, backend="gradwire")
def test_codecs_and_ranks_without_gpus_go_by_the_host() -> None:
    simulated.install()
    rank, logged = dist.get_rank(), torch_ranks.logged()
    with pytest.raises(gradwire.InvalidArgument, match=r"on cuda:0, and another.*the CPU"):
        dist.all_gather([torch.zeros(2), cuda(torch.zeros(2))], torch.zeros(2))
    with pytest.raises(gradwire.InvalidArgument, match=r"on cpu, and another.*cuda:0"):
        dist.all_gather([cuda(torch.zeros(2)), torch.zeros(2)], cuda(torch.zeros(2)))
    with pytest.raises(gradwire.InvalidArgument, match="a tensor is on meta"):
        dist.all_reduce(torch.zeros(2, device="meta"))
    coded = dist.new_group(backend="gradwire", pg_options=Options(codec="int8", min_elements=1))
    expected, found = (encoded(rank, to, coded) for to in (torch.Tensor.clone, cuda))
    assert all(map(torch.equal, found, expected))
    # A group of which one rank cannot use GPUs.
    if rank == 1:
        devices.cuda.devices = lambda: (False, "because this test says so")
    without = dist.new_group()
    for how in ({}, {"async_op": True}):
        x = cuda(values(rank, 4))
        work = dist.all_reduce(x, group=without, **how)
        if work is not None:
            work.wait()
        assert torch.equal(cpu(x), values(0, 4) + values(1, 4))
    assert endpoint_of(without).communicator._gpu is None
    first, second = torch_ranks.gathered(logged)
    assert len(first) == len(second) == 1
    assert "because rank 1 cannot use GPUs" in first[0]
    assert "by way of the host, because this test says so" in second[0]


def reduce_until_it_fails(x: torch.Tensor) -> None:
    while True:
        dist.all_reduce(x, async_op=True).wait()
        time.sleep(0.01)


@torch_ranks.on_ranks(2, backend="gradwire", dying=(1,))
def test_a_rank_that_dies_is_named() -> None:
    simulated.install()
    x = cuda(torch.ones(3))
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        torch_ranks.die()
    with pytest.raises(gradwire.TransportError) as raised:
        reduce_until_it_fails(x)
    assert (raised.value.peer, raised.value.job_peer) == (1, 1)
    for call in (lambda: dist.recv(x, 1), lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(gradwire.TransportError) as raised:
            call()
        assert raised.value.peer == 1
