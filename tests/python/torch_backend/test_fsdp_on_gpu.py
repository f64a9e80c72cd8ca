"""FSDP2 in codecs on a simulated GPU: the CPU's bits, and a host that waits for no reduction.

FSDP itself needs a real GPU. So hooks get buffers as FSDP gives them, within a backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import simulated_gpu
import simulated_torch_cuda as simulated
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import Communicator, InvalidArgument
from gradwire.torch import Compression
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.exchange.payloads import Payloads
from gradwire.torch.fsdp.gather import PayloadAllGather
from gradwire.torch.fsdp.hooks import PartReduceScatter, ReplicaAllReduce
from gradwire.torch.fsdp.shards import Shard, ShardedModule
from gradwire.torch.fsdp.state import FSDPState
from simulated_torch_cuda import cpu, cuda

pytestmark = simulated_gpu.needed
RANKS, STEPS = 2, 5
BAD = 2  # the step whose gradients are not finite on one rank
SHAPES = {"weight": (30, 50), "bias": (31,), "last": (1500,)}


def shard(name: str, shape: tuple[int, ...]) -> Shard:
    """A parameter that is cut along its first dimension for two ranks."""
    own = torch.Size((-(-shape[0] // RANKS), *shape[1:]))
    its = SimpleNamespace(
        sharded_param=torch.nn.Parameter(torch.zeros(own)),
        sharded_size=own,
        padded_sharded_param_size=own,
        _orig_size=torch.Size(shape),
        fsdp_placement=SimpleNamespace(dim=0),
    )
    return Shard(name, its)


def sharded_module() -> ShardedModule:
    group = SimpleNamespace(all_reduce_grads=True, gradient_divide_factor=None)
    return ShardedModule("layer", None, group, [shard(*each) for each in SHAPES.items()])


def within_backward(call: Callable[[], None]) -> None:
    """Makes a call where FSDP makes its own."""

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            del ctx
            call()
            return grad

    Calls.apply(torch.zeros((), requires_grad=True)).backward()


def gradients(step: int, elements: int) -> torch.Tensor:
    rank = dist.get_rank()
    found = torch.randn(elements, generator=torch.Generator().manual_seed(100 * step + rank))
    if step == BAD and rank == 1:
        found[0] = torch.inf
    return found


def scatter(module: ShardedModule, state: FSDPState, on_gpu: bool) -> Iterator[torch.Tensor]:
    """This rank's parts of the sums of each step."""
    hook = PartReduceScatter(module, state._steps, state)
    elements = sum(each.padded for each in module.shards)
    for step in range(STEPS):
        given, output = gradients(step, RANKS * elements), torch.zeros(elements)
        if on_gpu:
            given, output = cuda(given), cuda(output)
        call = lambda: hook(output, given, None, dist.ReduceOp.AVG)  # noqa: B023, E731
        yield from stepped(call, output, on_gpu)


def reduce(module: ShardedModule, state: FSDPState, on_gpu: bool) -> Iterator[torch.Tensor]:
    """The averages of each step between replicas."""
    hook = ReplicaAllReduce(module, state._steps, state)
    for step in range(STEPS):
        output = gradients(step, sum(each.padded for each in module.shards))
        output = cuda(output) if on_gpu else output
        yield from stepped(lambda: hook(output), output, on_gpu)  # noqa: B023


def stepped(call: Callable[[], None], output: Any, on_gpu: bool) -> Iterator[torch.Tensor]:
    reads = simulated.reads
    within_backward(call)
    assert simulated.reads == reads, "the host waited"
    yield cpu(output) if on_gpu else output.clone()


def state_of(
    module: ShardedModule, codec: str, on_gpu: bool, replicas: bool, feedback: bool | None = None
) -> FSDPState:
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    return FSDPState(
        communicator_of(dist.group.WORLD),
        Compression(codec, min_elements=0, feedback=feedback),
        module.shards,
        simulated.DEVICE if on_gpu else torch.device("cpu"),
        shard_group=alone if replicas else None,
        algorithm="auto",
        scaler=None,
        optimizer=None,
        owned=[],
    )


def train(on_gpu: bool, replicas: bool, **options: Any) -> list[torch.Tensor]:
    module = sharded_module()
    state = state_of(module, on_gpu=on_gpu, replicas=replicas, **options)
    found = list((reduce if replicas else scatter)(module, state, on_gpu))
    saved = state.state_dict()["feedback"]
    state.close()
    return [*found, *(saved[key]["residual"].float() for key in sorted(saved))]


CASES: dict[str, dict[str, Any]] = {
    "plain, parts": {"codec": "none", "replicas": False},
    "onebit, parts": {"codec": "onebit", "replicas": False},
    "topk, parts": {"codec": "topk:density=0.1", "replicas": False},
    "int8, parts": {"codec": "int8", "replicas": False, "feedback": True},
    "onebit, replicas": {"codec": "onebit", "replicas": True},
    "fp16, replicas": {"codec": "fp16", "replicas": True, "feedback": False},
}


@pytest.mark.parametrize("case", CASES)
@torch_ranks.on_ranks(RANKS)
def test_reductions_and_residuals_have_the_bits_of_the_cpu(case: str) -> None:
    simulated.install()
    simulated.compute()
    expected = train(False, **CASES[case])
    with simulated.on_stream(simulated.Stream()):
        found = train(True, **CASES[case])
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if index != BAD:
            assert torch.equal(one, other), index
            assert torch.isfinite(one).all(), index


@torch_ranks.on_ranks(RANKS)
def test_a_rank_without_a_part_of_any_parameter_ends_its_steps() -> None:
    simulated.install()
    simulated.compute()
    module = sharded_module()
    state = state_of(module, "onebit", on_gpu=True, replicas=True)
    with simulated.on_stream(simulated.Stream()):
        within_backward(state._steps.begin)
    assert (state.steps, state.error) == (1, None)
    state.close()


def gathered(communicator: Communicator, codec: str, on_gpu: bool) -> torch.Tensor:
    module = sharded_module()
    elements = sum(each.padded for each in module.shards)
    steps: Any = SimpleNamespace(closed=False)
    gather = PayloadAllGather(module, communicator, Payloads(codec), 0, steps)
    given, output = gradients(0, elements), torch.zeros(RANKS * elements)
    given[:4] = torch.tensor([65530.0, -1e30, 3.4028e38, math.inf])
    given, output = (cuda(given), cuda(output)) if on_gpu else (given, output)
    gather(output, given, None)
    return cpu(output) if on_gpu else output


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
@torch_ranks.on_ranks(RANKS)
def test_parameters_are_gathered_with_the_bits_of_the_cpu(codec: str) -> None:
    simulated.install()
    simulated.compute()
    communicator = communicator_of(dist.group.WORLD)
    expected = gathered(communicator, codec, False)
    with simulated.on_stream(simulated.Stream()):
        assert torch.equal(gathered(communicator, codec, True), expected)
    communicator.close()


def test_int8_gathers_parameters_on_cpus_only() -> None:
    Payloads("int8").require_device(torch.device("cpu"))
    with pytest.raises(InvalidArgument, match="'bf16' or 'fp16'"):
        Payloads("int8").require_device(simulated.DEVICE)
