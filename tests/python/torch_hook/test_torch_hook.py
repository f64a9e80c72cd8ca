"""The DDP hook: what it averages, how, and what it does when it cannot."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Stages, State, register
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.ddp.hook import comm_hook
from torch import nn
from torch.futures import Future
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import batch, mlp
from trainer_options import grouped

SMALL_BUCKETS = {"bucket_cap_mb": 0.01}


class Branches(nn.Module):
    """Two branches; a batch asks for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.left(x) if left else self.right(x)


class MixedTypes(nn.Module):
    """A float32 layer between float64 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 10).double(), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.double()).float())


def train(
    model: nn.Module, setting: dict[str, Any], hook: dict[str, Any] | None, steps: int = 4
) -> tuple[DistributedDataParallel, State | None]:
    ddp = DistributedDataParallel(model, **setting)
    state = None if hook is None else register(ddp, **grouped(**hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()
    return ddp, state


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in model.parameters()])


def same_everywhere(model: nn.Module) -> bool:
    """Whether the parameters have the same bits on all ranks."""
    own = hashlib.sha256(
        b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    ).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return len(set(found)) == 1


def distance_from_plain(hook: dict[str, Any]) -> tuple[float, bool]:
    plain, _ = train(mlp(), SMALL_BUCKETS, None)
    hooked, state = train(mlp(), SMALL_BUCKETS, hook)
    assert state is not None
    assert state.error is None
    assert state.steps == 4
    assert state.buckets > state.steps
    assert state.bytes == 4 * 4 * flat(hooked).numel()
    return float((flat(hooked) - flat(plain)).abs().max()), same_everywhere(hooked)


def test_two_ranks_equal_plain_ddp_bit_for_bit() -> None:
    assert torch_ranks.run(2, distance_from_plain, {}) == [(0.0, True)] * 2


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_equal_plain_ddp_to_rounding(ranks: int) -> None:
    for distance, same in torch_ranks.run(ranks, distance_from_plain, {}):
        assert distance < 1e-6
        assert same


@pytest.mark.parametrize(("codec", "bound"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_half_width_codecs_stay_near_plain_ddp(codec: str, bound: float) -> None:
    for distance, same in torch_ranks.run(3, distance_from_plain, {"codec": codec}):
        assert 0 < distance < bound
        assert same


def test_one_rank_alone() -> None:
    assert torch_ranks.run(1, distance_from_plain, {}) == [(0.0, True)]


def traffic_and_distance(codec: str) -> tuple[int, float]:
    plain, _ = train(MixedTypes(), {}, None, steps=1)
    torch.manual_seed(3)
    plain, _ = train(MixedTypes(), {}, None)
    torch.manual_seed(3)
    hooked, state = train(MixedTypes(), {}, {"codec": codec, "algorithm": "direct"})
    assert state is not None
    first = float((flat(hooked.module.first) - flat(plain.module.first)).abs().max())
    return state.communicator.traffic.bytes_sent, first


def test_codec_leaves_other_float_types_as_they_are() -> None:
    (full, exact), _ = torch_ranks.run(2, traffic_and_distance, "none")
    (half, near), _ = torch_ranks.run(2, traffic_and_distance, "fp16")
    assert exact == 0
    assert near < 1e-2
    saved = 4 * 110 * 2  # steps × float32 elements × bytes; the float64 ones save nothing
    assert full - half == saved


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "many buckets": SMALL_BUCKETS,
    "bucket views": {**SMALL_BUCKETS, "gradient_as_bucket_view": True},
    "static graph": {**SMALL_BUCKETS, "static_graph": True},
    "unused": {**SMALL_BUCKETS, "find_unused_parameters": True},
}


# Codecs that lose nothing, and residuals that stay empty.
HOOKS: list[dict[str, Any]] = [
    {},
    {"feedback": True},
    {"codec": Stages((0, "none"), (100, "onebit"))},
]


@torch_ranks.on_ranks(2)
def test_every_way_of_ddp_equals_plain_ddp() -> None:
    found = {}
    for name, setting in SETTINGS.items():
        plain = flat(train(mlp(), setting, None, steps=6)[0])
        hooked = [flat(train(mlp(), setting, hook, steps=6)[0]) for hook in HOOKS]
        found[name] = [float((each - plain).abs().max()) for each in hooked]
    expected = dict.fromkeys(SETTINGS, [0.0] * len(HOOKS))
    assert found == expected


def branch_gradients(hook: dict[str, Any] | None) -> list[torch.Tensor | None]:
    """Rank 0 uses the left branch only, rank 1 both by turns, so `right` is unused at first."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
    if hook is not None:
        register(ddp, **grouped(**hook))
    for step in range(3):
        x, y = batch(step)
        mse_loss(ddp(x, dist.get_rank() == 0 or step % 2 == 0), y).backward()
    return [each.grad for each in ddp.parameters()]


@torch_ranks.on_ranks(2)
def test_parameters_that_some_ranks_do_not_use() -> None:
    pairs = zip(branch_gradients(None), branch_gradients({}), strict=True)
    assert all(one is not None and other is not None and one.equal(other) for one, other in pairs)


def accumulate(hook: dict[str, Any] | None, views: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients of three batches at a time, of which two are not averaged on their own."""
    ddp = DistributedDataParallel(mlp(), **SMALL_BUCKETS, gradient_as_bucket_view=views)
    state = None if hook is None else register(ddp, **grouped(**hook))
    found = []
    for step in range(9):
        with contextlib.nullcontext() if step % 3 == 2 else ddp.no_sync():
            x, y = batch(step)
            mse_loss(ddp(x), y).backward()
        if step % 3 == 2:
            found.append(torch.cat([each.grad.flatten() for each in ddp.parameters()]))
            ddp.zero_grad()
    return found, 0 if state is None else state.steps


@pytest.mark.parametrize("views", [False, True])
@torch_ranks.on_ranks(2)
def test_no_sync_averages_the_accumulated_gradients_once(views: bool) -> None:
    (plain, _), (hooked, steps) = accumulate(None, views), accumulate({}, views)
    assert all(one.equal(other) for one, other in zip(plain, hooked, strict=True))
    assert steps == 3


def scaled(hook: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """Mixed precision; rank 1's second batch overflows, so every rank must skip it."""
    ddp = DistributedDataParallel(mlp(), **SMALL_BUCKETS)
    if hook is not None:
        register(ddp, **grouped(**hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(ddp(x), y)
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return flat(ddp), scaler.get_scale()


def scaled_distances(codecs: Sequence[str]) -> dict[str, tuple[float, float]]:
    plain, _ = scaled(None)
    found = {codec: scaled({"codec": codec}) for codec in codecs}
    return {codec: (float((flat - plain).abs().max()), s) for codec, (flat, s) in found.items()}


def test_grad_scaler_skips_an_overflow_on_every_rank() -> None:
    for found in torch_ranks.run(2, scaled_distances, ["none", "fp16", "bf16"]):
        assert found["none"] == (0.0, 64.0)
        for codec in ("fp16", "bf16"):
            distance, scale = found[codec]
            assert distance < 1e-2
            assert scale == 64.0


@torch_ranks.on_ranks(3)
def test_divides_by_the_number_of_ranks_exactly_once() -> None:
    """The gradient of rank r is r + 1."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    register(ddp)
    ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    assert float(ddp.module.weight.grad) == 2.0


@torch_ranks.on_ranks(2)
def test_models_can_share_a_given_communicator() -> None:
    reference = DistributedDataParallel(mlp())
    first = register(reference)
    algorithm = "ring"
    ddp = DistributedDataParallel(mlp())
    second = register(ddp, "fp16", algorithm=algorithm, ranks=first.communicator)
    assert second.communicator is first.communicator
    x, y = batch(0)
    mse_loss(ddp(x), y).backward()
    second.close()
    assert not first.communicator.closed
    dist.barrier()
    first.close()
    assert first.communicator.closed
    found = (second.steps, second.algorithm, repr(second).split(",")[0])
    assert found == (1, "ring", f"State(rank {dist.get_rank()} of 2")


@torch_ranks.on_ranks(2)
def test_a_communicator_of_other_ranks_is_refused() -> None:
    whole = communicator_of(dist.group.WORLD)
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(DistributedDataParallel(mlp()), ranks=whole.split(dist.get_rank()))
    messages = torch_ranks.gathered(str(raised.value))
    assert "says rank 0 of 1" in messages[1]
    assert "rank 1 of 2" in messages[1]


def watched(watch: Callable[[Any, Any, Any], None]) -> tuple[DistributedDataParallel, State]:
    """A model whose hook is gradwire's, with `watch(state, bucket, future)` after each call."""
    ddp = DistributedDataParallel(mlp(), find_unused_parameters=True, **SMALL_BUCKETS)
    state = State(communicator_of(dist.group.WORLD))

    def hook(state, bucket):  # DDP refuses annotations that are strings
        future = comm_hook(state, bucket)
        watch(state, bucket, future)
        return future

    ddp.register_comm_hook(state, hook)
    return ddp, state


@torch_ranks.on_ranks(2)
def test_result_is_the_buckets_own_buffer() -> None:
    seen = []
    ddp, _ = watched(lambda _, bucket, future: seen.append((bucket.buffer(), future)))
    x, y = batch(0)
    mse_loss(ddp(x), y).backward()
    assert len(seen) > 1
    assert all(future.value().data_ptr() == buffer.data_ptr() for buffer, future in seen)


@torch_ranks.on_ranks(2)
def test_backward_goes_on_while_buckets_travel() -> None:
    """Rank 1 begins its backward only when rank 0 has handed over all its buckets."""
    store = dist.distributed_c10d._get_default_store()
    calls = []

    def tell(state: State, bucket: Any, future: Any) -> None:
        calls.append(future.done())
        if bucket.is_last():
            store.set("all handed over", "yes")

    ddp, _ = watched(tell)
    x, y = batch(0)
    loss = mse_loss(ddp(x), y)
    if dist.get_rank() == 1:
        store.wait(["all handed over"])
    loss.backward()
    if dist.get_rank() == 0:
        assert len(calls) > 1
        assert not any(calls)


@torch_ranks.on_ranks(2)
def test_callbacks_may_block_on_later_operations() -> None:
    """A hook whose callback waits for a second operation, as torch's PowerSGD's does."""
    ddp = DistributedDataParallel(mlp(), find_unused_parameters=True)
    state = State(communicator_of(dist.group.WORLD))

    def average_again(future: Any) -> torch.Tensor:
        averaged = future.value()
        again: Future[torch.Tensor] = Future()
        work = state.communicator.all_reduce(averaged, op="avg", async_op=True)
        state._steps.completions.submit(work.wait, lambda _: again.set_result(averaged))
        return again.wait()

    def hook(state, bucket):  # DDP refuses annotations that are strings
        return comm_hook(state, bucket).then(average_again)

    ddp.register_comm_hook(state, hook)
    for step in range(3):
        x, y = batch(step)
        mse_loss(ddp(x), y).backward()
    assert state.error is None
    assert state.steps == 3


@torch_ranks.on_ranks(2)
def test_a_closed_state_refuses_and_leaves_a_given_communicator_open() -> None:
    ddp = DistributedDataParallel(mlp(), find_unused_parameters=True)
    with_communicator = communicator_of(dist.group.WORLD)
    state = register(ddp, ranks=with_communicator)
    x, y = batch(0)
    mse_loss(ddp(x), y).backward()
    state.close()
    with pytest.raises(gradwire.Aborted, match="State is closed"):
        mse_loss(ddp(x), y).backward()
    closed = with_communicator.closed
    dist.barrier()
    assert type(state.error).__name__ == "Aborted"
    assert not closed


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x)


@torch_ranks.on_ranks(2)
def test_sparse_gradients_are_refused_with_a_remedy() -> None:
    module = Words()
    ddp = DistributedDataParallel(module)
    module.words.sparse = False  # as register() sees it
    state = register(ddp)
    module.words.sparse = True
    with pytest.raises(gradwire.InvalidArgument) as raised:
        ddp(torch.tensor([1, 2])).sum().backward()
    assert repr(raised.value) == repr(state.error)
    message = str(state.error)
    assert "(50, 4)" in message
    assert "sparse=False" in message


class WithBuffers(nn.Module):
    """Buffers of two types, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 10))
        self.register_buffer("across", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train_with_buffers(hook: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ddp, _ = train(WithBuffers(), {}, hook, steps=3)
    ddp.module.across += dist.get_rank()
    ddp(batch(3)[0])
    assert ddp.module.across.stride() == (1, 3)
    return ddp.module.state_dict()


@torch_ranks.on_ranks(2)
def test_buffers_are_those_of_plain_ddp() -> None:
    plain, hooked = train_with_buffers(None), train_with_buffers({})
    different = [name for name in plain if not torch.equal(plain[name], hooked[name])]
    assert different == []
    assert hooked["across"].sum().item() == 15.0


@torch_ranks.on_ranks(2)
def test_a_closed_state_leaves_buffers_to_ddp() -> None:
    ddp = DistributedDataParallel(WithBuffers())
    register(ddp).close()
    ddp.module.across += dist.get_rank()
    with torch.no_grad():
        ddp(batch(0)[0])
    assert ddp.module.across.sum().item() == 15.0


def train_unevenly(hook: dict[str, Any] | None, by_all: bool) -> dict[str, torch.Tensor]:
    """Rank 1 has two batches more, so in the end its buffers count."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(WithBuffers(), **SMALL_BUCKETS)
    if hook is not None:
        register(ddp, **grouped(**hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(2 + 2 * dist.get_rank()):
            x, target = batch(step)
            optimizer.zero_grad()
            mse_loss(ddp(x), target).backward()
            optimizer.step()
    return ddp.module.state_dict()


@torch_ranks.on_ranks(2)
def test_uneven_inputs_end_as_with_plain_ddp() -> None:
    """Averages over all ranks, or over those that still train; buffers of the last of these."""
    different, ends = [], []
    for by_all in (True, False):
        plain, hooked = train_unevenly(None, by_all), train_unevenly({}, by_all)
        different += [name for name in plain if not torch.equal(plain[name], hooked[name])]
        ends.append(hooked)
    assert not torch.equal(*(each["layers.0.weight"] for each in ends))
    assert different == []


def freeze_and_thaw(hook: dict[str, Any] | None) -> torch.Tensor:
    """DDP must be made anew for each change, here with buckets of another size."""
    module = mlp()
    for trainable, size in ((True, 0.01), (False, 0.001), (True, 25)):
        module[2].requires_grad_(trainable)
        train(module, {"bucket_cap_mb": size}, hook, steps=2)
    return flat(module)


@torch_ranks.on_ranks(2)
def test_frozen_and_thawed_parameters_end_as_with_plain_ddp() -> None:
    plain = freeze_and_thaw(None)
    assert all(plain.equal(freeze_and_thaw(hook)) for hook in HOOKS)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"codec": "fp17"}, "fp17"),
        ({"algorithm": "rings"}, "'rings'.* ring"),
        ({"algorithm": "hierarchical(ring,rung)"}, "rung"),
        ({"codec": "fp16", "algorithm": "recursive_doubling"}, "recursive_doubling.*fp16.*auto"),
    ],
    ids=["codec", "algorithm", "part of an algorithm", "algorithm for the codec"],
)
@torch_ranks.on_ranks(2)
def test_what_cannot_run_is_refused_at_once(setting: dict[str, str], words: str) -> None:
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(gradwire.InvalidArgument) as raised:
        register(ddp, **grouped(**setting))
    message = str(raised.value)
    assert re.search(words, message), message


@pytest.mark.parametrize("ranks", [1, 3])
@torch_ranks.on_ranks()
def test_every_algorithm_is_accepted(ranks: int) -> None:
    communicator = communicator_of(dist.group.WORLD)
    for algorithm in ("auto", *gradwire.algorithms(), "hierarchical(ring,direct)"):
        State(communicator, algorithm=algorithm).close()
    assert not communicator.closed


@torch_ranks.on_ranks(2, dying=(1,))
def test_a_dead_rank_is_a_typed_error_now_and_later() -> None:
    ddp = DistributedDataParallel(mlp(), **SMALL_BUCKETS)
    state = register(ddp)
    for step in range(4):
        x, y = batch(step)
        loss = mse_loss(ddp(x), y)
        if step == 3 and dist.get_rank() == 1:
            torch_ranks.die()
        if step < 3:
            loss.backward()
    with pytest.raises(gradwire.TransportError, match="rank 1"):
        loss.backward()
    first = state.error
    x, y = batch(4)
    with pytest.raises(gradwire.TransportError, match="rank 1"):
        mse_loss(ddp(x), y).backward()
    assert isinstance(first, gradwire.TransportError)
    survivor = (
        type(first).__name__,
        first.peer,
        repr(state.error) == repr(first),
        state.steps == 3,
    )
    assert survivor == ("TransportError", 1, True, True)


@torch_ranks.on_ranks(2)
def test_the_profiler_shows_communication() -> None:
    ddp = DistributedDataParallel(mlp(), **SMALL_BUCKETS)
    state = register(ddp)
    for step in range(3):
        x, y = batch(step)
        mse_loss(ddp(x), y).backward()
    before = state.buckets
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x, y = batch(3)
        mse_loss(ddp(x), y).backward()
    ours = [each for each in profile.events() if each.name.startswith("gradwire:")]
    names = [each.name for each in ours]
    timed = all(each.time_range.elapsed_us() > 0 for each in ours)
    buckets = state.buckets - before
    assert {name: names.count(name) for name in names} == {
        "gradwire:all_reduce": buckets,
        "gradwire:wait": 1,
    }
    assert buckets > 1
    assert timed
