"""What models, optimizers and programs may do, tried with each way to train over a group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, elastic
from gradwire.torch._ranks.group import communicator_of
from ranks import eventually, state_of
from stopwatch import once_it_waits, own_time
from torch import nn
from torch.nn.functional import mse_loss
from torch_steps import Training, every_way, training
from torch_training import batch, mlp, same_everywhere


def values(module: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters, whole where they are sharded."""
    for each in module.parameters():
        yield getattr(each, "full_tensor", lambda each=each: each)().detach().clone()


# ---- Learning rates of zero --------------------------------------------------------------------


def options_of(way: str) -> dict[str, object]:
    """What makes those that have codecs keep residuals."""
    lossy = {"codec": "onebit", "min_elements": 0}
    return {
        "the hook": {**lossy, "warm_up": 0},
        "FSDP2": {**lossy, "warm_up": 0},
        "DiLoCo": lossy,
    }.get(way, {})


def begin_at_zero(way: str) -> tuple[bool, bool, bool]:
    """Whether parameters stay at a rate of 0, move at another, and are the same on all ranks."""
    its = training(way, mlp(), lr=0.0, **options_of(way))
    before = list(values(its.module))
    for step in range(3):
        its.finish(its.forward(*batch(step)))
    stay = all(map(torch.equal, before, values(its.module)))
    for group in its.optimizer.param_groups:
        group["lr"] = 0.01
    for step in range(3, 6):
        its.finish(its.forward(*batch(step)))
    after = list(values(its.module))
    move = all(each.isfinite().all() for each in after) and not all(map(torch.equal, before, after))
    return stay, move, same_everywhere(iter(after))


@torch_ranks.on_ranks(2)
def test_an_elastic_schedule_may_begin_with_a_rate_of_zero() -> None:
    module, rates = mlp(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    before = list(values(module))
    x, y = batch(0)
    with elastic.session(
        module,
        optimizer,
        elastic.Sampler(16, batch=2),
        compression=Compression("onebit", min_elements=0, warm_up=0),
        global_batch="proportional",
        ranks=communicator_of(dist.group.WORLD),
    ) as s:
        for _ in s:
            s.backward(mse_loss(module(x), y))
            if s.commit():
                optimizer.step()
            if s.steps == 2:
                rates.append(all(map(torch.equal, before, values(module))))
                optimizer.param_groups[0]["lr"] = 0.01
    after = list(values(module))
    assert rates[0]
    assert not all(map(torch.equal, before, after))
    assert same_everywhere(iter(after))


# ---- Memory formats ----------------------------------------------------------------------------


def net(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(5)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    return made.to(memory_format=memory_format)


def convolve(way: str) -> tuple[bool, bool]:
    """Whether channels_last trains like the usual format, and the same on all ranks."""
    trained = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        its = training(way, net(memory_format), lr=0.01)
        for step in range(4):
            source = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(2, 3, 8, 8, generator=source).to(memory_format=memory_format)
            y = torch.randn(2, 64, generator=source)
            its.finish(its.forward(x, y))
        trained.append([each.contiguous() for each in values(its.module)])
    pairs = zip(*trained, strict=True)
    # Signs of values near zero may differ, and then one element moves the other way.
    near = sum(float((a - b).abs().gt(1e-4).sum()) for a, b in pairs)
    return near <= 4, same_everywhere(iter(trained[1]))


# ---- torch's detailed checks -------------------------------------------------------------------


def in_detail(way: str) -> tuple[bool, bool]:
    """Whether TORCH_DISTRIBUTED_DEBUG=DETAIL changes no bit, and ranks are the same."""
    trained = []
    for level in (dist.DebugLevel.OFF, dist.DebugLevel.DETAIL):
        dist.set_debug_level(level)
        # torch 2.13 itself crashes where DistributedDataParallel is made over gloo in detail.
        group = dist.new_group(backend="gradwire" if way == "the hook" else None)
        its = training(way, mlp(), group=group, lr=0.01)
        for step in range(3):
            its.finish(its.forward(*batch(step)))
        trained.append(list(values(its.module)))
    dist.set_debug_level(dist.DebugLevel.OFF)
    return all(map(torch.equal, *trained)), same_everywhere(iter(trained[1]))


# ---- All of these, since processes take longer than their steps --------------------------------

KINDS: dict[str, Callable[[str], tuple[bool, ...]]] = {
    "a rate of zero at first": begin_at_zero,
    "channels_last": convolve,
    "torch's detailed checks": in_detail,
}


def kinds_of(way: str) -> list[str]:
    """FSDP2 itself refuses parameters that are not contiguous."""
    return [kind for kind in KINDS if (way, kind) != ("FSDP2", "channels_last")]


@every_way
@torch_ranks.on_ranks(2)
def test_trainings_of_these_kinds_are_like_others(way: str) -> None:
    assert {kind: all(KINDS[kind](way)) for kind in kinds_of(way)} == dict.fromkeys(
        kinds_of(way), True
    )


# ---- Signals -----------------------------------------------------------------------------------


def prepared(way: str, group: dist.ProcessGroup | None = None) -> tuple[Training, torch.Tensor]:
    """A training whose ranks are before the exchange of their third step."""
    its = training(way, mlp(), group=group)
    for step in range(2):  # in the second forward DDP itself communicates
        its.finish(its.forward(*batch(step)))
    return its, its.forward(*batch(2))


def train_on(its: Training, loss: torch.Tensor) -> None:
    """Three steps: what a rank sent in its last one may suffice for another rank's first."""
    for step in (3, 4, 5):
        its.finish(loss)
        loss = its.forward(*batch(step))


def interrupt(way: str) -> tuple[str, int, float]:
    """Rank 0 gets SIGINT while it waits for rank 1, which hears of it in one of its steps."""
    its, loss = prepared(way)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["interrupted"])
        with pytest.raises((gradwire.Aborted, gradwire.TransportError)) as heard:
            train_on(its, loss)
        return type(heard.value).__name__, heard.value.peer, 0.0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    once_it_waits(lambda: os.kill(os.getpid(), signal.SIGALRM))
    began = own_time()
    with pytest.raises(KeyboardInterrupt):
        its.finish(loss)
    store.set("interrupted", b"")
    return "", -1, own_time() - began


@every_way
def test_ctrl_c_ends_a_step_that_waits_and_the_others_hear_of_it(way: str) -> None:
    (_, _, seconds), (kind, peer, _) = torch_ranks.run(2, interrupt, way)
    assert seconds < 3
    assert (kind, peer) == ("Aborted", 0)


def is_gone(process: int) -> bool:
    try:
        return state_of(process) == "Z"
    except FileNotFoundError:
        return True


def terminate(way: str) -> int:
    """Rank 0 gets SIGTERM while it waits, which ends its process as ever; rank 1 names it."""
    its, loss = prepared(way, dist.new_group(backend="gradwire"))  # gloo names nobody
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("process", str(os.getpid()))
        once_it_waits(lambda: os.kill(os.getpid(), signal.SIGTERM))
        its.finish(loss)
    process = int(store.get("process"))
    eventually(lambda: is_gone(process))

    with pytest.raises(gradwire.TransportError) as raised:
        train_on(its, loss)
    return raised.value.peer


@every_way
def test_sigterm_ends_a_step_that_waits_and_the_others_name_the_rank(way: str) -> None:
    assert torch_ranks.run(2, terminate, way, dying=(0,)) == [None, 0]
