"""gradwire's backend of torch.distributed on CUDA tensors: two processes on one GPU.

A torch without CUDA skips it. Results are compared with those of the
same calls on the CPU, and training with plain PyTorch's in one process. NCCL refuses two ranks on
one GPU, so times are compared with gloo's on the same CUDA tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gradwire.torch._ranks.group import endpoint_of
from torch import nn
from torch.nn.functional import mse_loss

from tests.gpu import arrays
from tests.gpu.rows import Row

sys.path.append(str(arrays.SUPPORT))
import torch_ranks

Checks = dict[str, bool]

_RANKS = 2
_STEPS = 4
_CLOSE = 1e-4  # of values near 1, after some steps whose sums have another order
_BUSY_CYCLES = 1_000_000_000  # half a second of a GPU
_SIZES = (4, 1 << 20, 1 << 26)  # bytes
_TIMED_CALLS, _ROUNDS = 5, 5


def main() -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    if parser.parse_args().simulated or not torch.cuda.is_available():
        with Row("backend", "all") as row:
            row.skip("torch has no CUDA")
        return 0
    for case in (collectives, by_the_host, streams, ddp, fsdp2, pipeline):
        with Row("backend", case.__name__) as row:
            for told in torch_ranks.run(_RANKS, case, backend="gradwire"):
                for what, holds in told.items():
                    row.expect(holds, what)
    with Row("backend, times", "beside gloo") as row:
        texts = torch_ranks.run(_RANKS, times, backend="gradwire")
        row.expect(all(texts), "times were measured")
        row.note(texts[0])
    return 0


def _values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return (8 * torch.randn(shape, generator=source)).to(dtype)


def _same(call: Callable[[Callable[[torch.Tensor], torch.Tensor]], list[torch.Tensor]]) -> bool:
    """Whether a call leaves the same bits on the GPU as on the CPU."""
    expected = call(torch.Tensor.clone)
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [each.cpu() for each in call(torch.Tensor.cuda)]
        if not all(map(torch.equal, found, expected)):
            return False
    return True


def _finished(works: list[Any]) -> None:
    for each in works:
        if each is not None:
            each.wait()


def collectives() -> Checks:
    """Calls that run on the GPU, blocking and in the background."""

    def reduced(to: Any, how: dict[str, Any]) -> list[torch.Tensor]:
        x = [to(_values(1000)), to(_values(30, 50)).t(), to(_values(7, dtype=torch.int64))]
        x += [to(_values(4097, dtype=torch.bfloat16))]
        _finished([dist.all_reduce(each, **how) for each in x])
        return x

    def moved(to: Any, how: dict[str, Any]) -> list[torch.Tensor]:
        x, strided = to(_values(1000)), to(_values(30, 50)).t()
        whole, listed = to(torch.zeros(2000)), [to(torch.zeros(30)) for _ in range(_RANKS)]
        _finished(
            [
                dist.broadcast(x, 1, **how),
                dist.broadcast(strided, 0, **how),
                dist.all_gather_into_tensor(whole, to(_values(1000, seed=1)), **how),
                dist.all_gather(listed, to(_values(30)), **how),
            ]
        )
        return [x, strided, whole, *listed]

    def scattered(to: Any, how: dict[str, Any]) -> list[torch.Tensor]:
        part, exchanged = to(torch.zeros(500)), to(torch.zeros(1000))
        works = [
            dist.reduce_scatter_tensor(part, to(_values(1000)), **how),
            dist.all_to_all_single(exchanged, to(_values(1000, seed=2)), **how),
        ]
        _finished(works)
        return [part, exchanged]

    found = {
        f"{call.__name__}, {how or 'blocking'}": _same(lambda to, call=call, how=how: call(to, how))  # type: ignore[misc]
        for call in (reduced, moved, scattered)
        for how in ({}, {"async_op": True})
    }
    gpu = endpoint_of(dist.group.WORLD).communicator._gpu  # type: ignore[arg-type]
    return found | {"they ran on the GPU": gpu is not None and gpu.bytes_sent > 0}


def by_the_host() -> Checks:
    """Messages, and a reduction that GPUs do not have."""
    peer = 1 - dist.get_rank()

    def blocking(to: Any) -> list[torch.Tensor]:
        x, taken = to(_values(1000)), to(torch.zeros(1000))
        if peer == 1:
            dist.send(x, peer)
            dist.recv(taken, peer)
        else:
            dist.recv(taken)
            dist.send(x, peer)
        return [taken]

    def batched(to: Any) -> list[torch.Tensor]:
        taken, strided = to(torch.zeros(1000)), to(torch.zeros(30, 50)).t()
        ops = [
            dist.P2POp(dist.isend, to(_values(1000)), peer),
            dist.P2POp(dist.irecv, taken, peer),
            dist.P2POp(dist.isend, to(_values(50, 30)), peer, tag=1),
            dist.P2POp(dist.irecv, strided, peer, tag=1),
        ]
        _finished(dist.batch_isend_irecv(ops))
        return [taken, strided]

    def prescaled(to: Any) -> list[torch.Tensor]:
        x = to(_values(1000))
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))  # type: ignore[attr-defined]
        return [x]

    return {each.__name__: _same(each) for each in (blocking, batched, prescaled)}


def streams() -> Checks:
    """The host does not wait for a call in the background, and futures order streams."""
    x = torch.ones(1 << 20, device="cuda")
    first: Any = dist.all_reduce(x, async_op=True)
    first.get_future().wait()  # the first one makes torch's streams, and waits for that
    with busy_gpu() as busy:
        work: Any = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        work.wait()
        waited = busy.query()
        with torch.cuda.stream(torch.cuda.Stream()):
            of_future = future.wait()[0].sum()
        total = x.sum()
    expected = 4.0 * x.numel()
    return {
        "the host does not wait": not waited,
        "wait() orders the current stream": total.item() == expected,
        "a future orders another stream": of_future.item() == expected,
    }


@contextlib.contextmanager
def busy_gpu() -> Iterator[torch.cuda.Event]:
    """An event behind half a second of work on the GPU."""
    torch.cuda.synchronize()
    dist.barrier()
    event = torch.cuda.Event()
    torch.cuda._sleep(_BUSY_CYCLES)
    event.record()
    yield event
    torch.cuda.synchronize()


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 10)]
    return nn.Sequential(*layers).cuda()


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 20, generator=source).cuda()
    return x, x[:, :10].clone()


def _train(model: nn.Module, ranks: list[int]) -> nn.Module:
    """Steps of SGD on the batches of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        losses = [mse_loss(model(x), y) for x, y in (_batch(step, rank) for rank in ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model


def _close(ours: Any, theirs: Any) -> bool:
    return all(
        torch.allclose(a.detach(), b.detach(), atol=_CLOSE)
        for a, b in zip(ours, theirs, strict=True)
    )


def ddp() -> Checks:
    """DistributedDataParallel with torch's own averages, in several buckets."""
    alone = _train(_model(), list(range(_RANKS)))
    wrapped = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.1)
    trained = _train(wrapped, [dist.get_rank()])
    return {"parameters are those of one process": _close(trained.parameters(), alone.parameters())}


def fsdp2() -> Checks:
    """fully_shard over a mesh of CUDA devices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = _train(_model(), list(range(_RANKS)))
    mesh, model = init_device_mesh("cuda", (_RANKS,)), _model()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = _train(model, [dist.get_rank()])
    full = [each.full_tensor() for each in trained.parameters()]  # type: ignore[operator]
    return {"parameters are those of one process": _close(full, alone.parameters())}


def pipeline() -> Checks:
    """Two stages, 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, whole = dist.get_rank(), _model()
    parts = [whole[:2], whole[2:]]
    own = copy.deepcopy(parts[rank])
    stage = PipelineStage(own, rank, _RANKS, torch.device("cuda"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=mse_loss)
    x, y = _batch(0, 0)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=[])
    mse_loss(whole(x), y).backward()
    return {
        "gradients are those of one process": _close(
            [each.grad for each in own.parameters()],
            [each.grad for each in parts[rank].parameters()],
        )
    }


def times() -> str:
    """Medians of a blocking call, after which the GPU is waited for, beside gloo's in turns."""
    gloo = dist.new_group(backend="gloo")
    told = []
    for size in _SIZES:
        x = torch.ones(size // 4, device="cuda")
        ours = _turns([lambda x=x: dist.all_reduce(x), lambda x=x: dist.all_reduce(x, group=gloo)])  # type: ignore[misc]
        told.append(f"all_reduce of {size:,} B {ours[0]:.0f} µs (gloo {ours[1]:.0f})")
        (message,) = _turns([lambda x=x: _ping(x)])  # type: ignore[misc]
        told.append(f"send and recv of {size:,} B, there and back, {message:.0f} µs")
    dist.destroy_process_group(gloo)
    return "; ".join(told)


def _ping(x: torch.Tensor) -> None:
    first = dist.get_rank() == 0
    for sends in (first, not first):
        if sends:
            dist.send(x, 1 - dist.get_rank())
        else:
            dist.recv(x, 1 - dist.get_rank())


def _turns(calls: list[Callable[[], object]]) -> list[float]:
    """Microseconds of each, in turns."""
    found: list[list[float]] = [[] for _ in calls]
    for round_ in range(_ROUNDS + 1):
        for times_, call in zip(found, calls, strict=True):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(_TIMED_CALLS):
                call()
            torch.cuda.synchronize()
            if round_:  # the first one makes connections and memory
                times_.append((time.perf_counter() - start) / _TIMED_CALLS * 1e6)
    return [statistics.median(each) for each in found]


if __name__ == "__main__":
    sys.exit(main())
