"""The backend as torch's C++ code uses it: the works and futures that it holds, its calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
from gradwire.torch.backend import cpp_holders
from ranks import LIMIT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_pool import on_ranks
from torch_versions import WRAPS

_c10d = torch._C._distributed_c10d
_functional = torch.ops._c10d_functional


def wait_for(condition: Callable[[], bool]) -> None:
    """Polls as a watchdog does, until the condition holds."""
    ended = threading.Event()
    late = threading.Timer(LIMIT / 2, ended.set)
    late.start()
    while not (held := condition()) and not ended.is_set():
        pass
    late.cancel()
    assert held


def trained(group: Any, prepare: Callable[[DistributedDataParallel], Any]) -> list[torch.Tensor]:
    """The parameters after some steps over a group, of which each rank makes another number."""
    torch.manual_seed(1)
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.randn(5, 6) + rank
    with prepare(ddp) as steps:
        for _ in range(steps):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    return [each.detach() for each in net.parameters()]


def require_as_over_gloo(
    prepare: Callable[[DistributedDataParallel], Any], within: float = 1e-6
) -> None:
    ours = trained(None, prepare)
    theirs = trained(dist.new_group(backend="gloo"), prepare)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=within, atol=within)


class Joined:
    """A training of as many steps as the rank's number and two, within `ddp.join()`."""

    def __init__(self, ddp: DistributedDataParallel, over_all: bool) -> None:
        self._join = ddp.join(divide_by_initial_world_size=over_all)

    def __enter__(self) -> int:
        self._join.__enter__()
        return dist.get_rank() + 2

    def __exit__(self, *given: Any) -> None:
        self._join.__exit__(*given)


@pytest.mark.parametrize("over_all", [True, False], ids=["all", "those that train"])
@on_ranks
def test_join_averages_over(over_all: bool) -> None:
    require_as_over_gloo(lambda ddp: Joined(ddp, over_all))


class BuiltIn:
    """A training of three steps with a hook in C++."""

    def __init__(self, ddp: DistributedDataParallel, name: str) -> None:
        ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))

    def __enter__(self) -> int:
        return 3

    def __exit__(self, *given: Any) -> None:
        pass


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
@on_ranks
def test_built_in_hooks(name: str) -> None:
    # gloo rounds partial sums to float16.
    within = 1e-3 if name == "FP16_COMPRESS" else 1e-6
    require_as_over_gloo(lambda ddp: BuiltIn(ddp, name), within)


@on_ranks
def test_futures_are_complete_after_wait() -> None:
    size = dist.get_world_size()
    for count in range(1, 101):
        work = dist.all_reduce(x := torch.ones(count), async_op=True)
        before = work.get_future()
        work.wait()
        assert before.done()
        assert before.value()[0] is x or torch.equal(before.value()[0], x)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        after = work.get_future()
        assert after.done()
        assert after.value()[0].tolist() == [float(size**2)] * count


def register(tensors: list[torch.Tensor]) -> None:
    """Gives works to torch's registry, where only their C++ halves are."""
    for each in tensors:
        _c10d._register_work(each, dist.all_reduce(each, async_op=True))


@on_ranks
def test_the_registry_of_works_waits_for_those_that_python_has_dropped() -> None:
    size = dist.get_world_size()
    tensors = [torch.ones(3) for _ in range(5)]
    register(tensors)
    gc.collect()
    assert _c10d._get_work_registry_size() == 5
    for each in reversed(tensors):
        assert _functional.wait_tensor(each).tolist() == [float(size)] * 3
    assert _c10d._get_work_registry_size() == 0


@on_ranks
def test_works_end_with_their_last_holder() -> None:
    cpp_holders.release()
    kept = len(cpp_holders._kept)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    dropped = weakref.ref(work)
    del work
    assert dropped() is None
    boxed = dist.all_reduce(x := torch.ones(3), async_op=True).boxed()  # the C++ half alone
    gc.collect()
    assert len(cpp_holders._kept) == kept + (not WRAPS)
    dist.Work.unbox(boxed).wait()
    assert x.tolist() == [float(dist.get_world_size())] * 3
    del boxed
    dist.barrier()
    assert len(cpp_holders._kept) == kept


@pytest.mark.skipif(WRAPS, reason="this torch never parts the halves of a work")
def test_the_owners_of_works_are_known() -> None:
    assert cpp_holders._known


@on_ranks
def test_functional_collectives_wait() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    name = dist.group.WORLD.group_name
    own, by_rank = torch.full((2,), float(rank)), torch.arange(float(size)).repeat_interleave(2)
    wait = _functional.wait_tensor
    total = float(sum(range(size)))
    out = torch.empty(2 * size)
    assert wait(_functional.all_reduce(own, "sum", name)).tolist() == [total] * 2
    assert wait(_functional.broadcast(own, 1, name)).tolist() == [1.0] * 2
    assert torch.equal(wait(_functional.all_gather_into_tensor(own, size, name)), by_rank)
    _functional.all_gather_into_tensor_out(own, size, name, out=out)
    assert torch.equal(wait(out), by_rank)
    part = wait(_functional.reduce_scatter_tensor(by_rank, "sum", size, name))
    assert part.tolist() == [float(size * rank)] * 2
    if hasattr(_functional, "reduce_scatter_tensor_out"):
        _functional.reduce_scatter_tensor_out(by_rank, "sum", size, name, out=part)
        assert wait(part).tolist() == [float(size * rank)] * 2
    blocks = [2] * size
    exchanged = wait(_functional.all_to_all_single(by_rank, blocks, blocks, name))
    assert exchanged.tolist() == [float(rank)] * (2 * size)
    after, before = (rank + 1) % size, (rank - 1) % size
    if hasattr(_functional, "isend"):
        got = torch.zeros(2)
        wait(_functional.isend(own, after, 0, name))
        wait(_functional.irecv(got, before, 0, name))
        assert got.tolist() == [float(before)] * 2
    if hasattr(_functional, "batch_p2p_ops"):
        pair = [own, torch.zeros(2)]
        for each in _functional.batch_p2p_ops(
            ["isend", "irecv"], [after, before], [1, 1], pair, name
        ):
            wait(each)
        assert pair[1].tolist() == [float(before)] * 2
    for each in map(wait, _functional.all_reduce_coalesced([own, 2 * own], "max", name)):
        assert each.max() in (size - 1, 2 * size - 2)


@on_ranks
def test_a_poller_finds_an_operation_over_when_its_results_are_there() -> None:
    work = dist.all_reduce(x := torch.ones(1000)[::2], async_op=True)
    seen = work.get_future()
    wait_for(seen.done if WRAPS else work.is_completed)
    work.wait()
    assert x.tolist() == [float(dist.get_world_size())] * 500


@on_ranks
def test_monitored_barriers() -> None:
    gradwire.torch.monitored_barrier()
    gradwire.torch.monitored_barrier(dist.group.WORLD, timeout=LIMIT)
    with pytest.raises(gradwire.InvalidArgument, match="the group's backend is gloo"):
        gradwire.torch.monitored_barrier(dist.new_group(backend="gloo"))
