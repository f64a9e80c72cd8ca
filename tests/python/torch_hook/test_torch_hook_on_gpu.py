"""Momentum and clipping of the hook on a simulated GPU: the CPU's bits, without waiting.

DDP itself needs a real GPU. So the steps of a hook get buckets as DDP gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradwire
import pytest
import simulated_gpu
import simulated_torch_cuda as simulated
import torch
import torch_ranks
from gradwire.torch import Compression
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.ddp.checks import require_features
from gradwire.torch.ddp.double_counting import AccumulationCheck
from gradwire.torch.ddp.state import State
from simulated_torch_cuda import cpu, cuda

pytestmark = simulated_gpu.needed
SHAPES = {"embedding": (30, 50), "weight": (40, 30), "bias": (30,), "last": (1500,)}
BUCKETS = (("last", "bias"), ("weight", "embedding"))
STEPS = 7
BAD = 3  # the step whose gradients are not finite
UNUSED = "last"  # by no rank, where the hook looks for unused parameters


class Bucket:
    """One of DDP's."""

    def __init__(self, index: int, parameters: Sequence[torch.Tensor], buffer: Any) -> None:
        self._index, self._parameters, self._buffer = index, parameters, buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == len(BUCKETS) - 1

    def parameters(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def buffer(self) -> Any:
        return self._buffer


class Scaler:
    """Halves its scale after a step that was not finite, as torch's does."""

    def __init__(self, on_gpu: bool) -> None:
        self._scale = 2.0**12
        self._on_gpu = cuda(torch.tensor([self._scale])) if on_gpu else None

    def get_scale(self) -> float:
        return self._scale

    def _get_scale_async(self) -> Any:
        return self._on_gpu

    def update(self, step: int) -> None:
        self._scale *= 0.5 if step == BAD else 2.0
        if self._on_gpu is not None:
            self._on_gpu.copy_(cuda(torch.tensor([self._scale])))


def draw(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(step: int, names: Sequence[str], scale: float) -> torch.Tensor:
    """The gradients of a bucket, end to end; one is infinite in the bad step on one rank."""
    rank = torch.distributed.get_rank()
    seeds = [1000 * step + 10 * rank + list(SHAPES).index(name) for name in names]
    parts = [draw(SHAPES[name], seed).view(-1) for name, seed in zip(names, seeds, strict=True)]
    found = torch.cat(parts) * scale
    if step == BAD and rank == 1 and "bias" in names:
        found[-1] = torch.inf
    return found


def averages(state: State, step: int, on_gpu: bool, scale: float) -> Iterator[torch.Tensor]:
    """The averages of a step's gradients, by bucket."""
    parameters = {name: parameter for parameter, name in state._names.items()}
    unused = state._training.unused
    if unused is not None:
        for name in parameters.keys() - {UNUSED}:
            unused.mark(name)
    waiting = []
    for index, names in enumerate(BUCKETS):
        given = drawn(step, names, scale)
        buffer = cuda(given) if on_gpu else given
        future: Any = simulated.Future(devices=[simulated.DEVICE]) if on_gpu else None
        future = future or torch.futures.Future()
        own = [parameters[name] for name in names]
        state._steps.submit_bucket(Bucket(index, own, buffer), future)  # type: ignore[arg-type]
        waiting.append(future)
    for each in waiting:
        each.wait()
        yield each.value()


def train(
    on_gpu: bool, codec: str, scaled: bool, feedback: bool | None = None, **options: Any
) -> list[torch.Tensor]:
    """All averages of all steps that were finite; velocities and residuals at the end."""
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    parameters = {name: cuda(each) if on_gpu else each for name, each in zeros.items()}
    scaler = Scaler(on_gpu) if scaled else None
    state = State(
        communicator_of(torch.distributed.group.WORLD),
        Compression(codec, min_elements=0, feedback=feedback),
        parameters=parameters.items(),
        scaler=scaler,
        **options,
    )
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        reads = simulated.reads
        step_averages = list(averages(state, step, on_gpu, scaler.get_scale() if scaler else 1.0))
        # What was sent for unused parameters goes back by way of the host.
        assert simulated.reads == reads or "find_unused" in options, "the host waited"
        if step != BAD:
            found += [cpu(each) if on_gpu else each.clone() for each in step_averages]
        if scaler is not None:
            scaler.update(step)
    saved = state.state_dict()
    state.close()
    kept = [saved["velocities"], {k: v["residual"] for k, v in saved["feedback"].items()}]
    return found + [torch.as_tensor(each[name]) for each in kept for name in sorted(each)]


CASES: dict[str, dict[str, Any]] = {
    "onebit": {"codec": "onebit", "momentum": 0.9},
    "sparse, clipped, scaled": {
        "codec": "topk:density=0.1",
        "momentum": 0.9,
        "nesterov": True,
        "clip_norm": 30.0,
        "scaled": True,
    },
    "no feedback, scaled": {
        "codec": "none",
        "feedback": False,
        "momentum": 0.9,
        "clip_norm": 30.0,
        "scaled": True,
    },
    "clipped": {"codec": "int8", "clip_norm": 1e-3},
    "unused": {"codec": "onebit", "find_unused": True},
    "unused, sparse": {
        "codec": "topk:density=0.1",
        "momentum": 0.9,
        "find_unused": True,
    },
}


@pytest.mark.parametrize("case", CASES)
@torch_ranks.on_ranks(2)
def test_momentum_and_clipping_have_the_bits_of_the_cpu(case: str) -> None:
    simulated.install()
    simulated.compute()
    settings = {"scaled": False, **CASES[case]}
    expected = train(False, **settings)
    with simulated.on_stream(simulated.Stream()):
        found = train(True, **settings)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()
    one, other = torch_ranks.gathered([each.numpy().tobytes() for each in found[: 2 * (STEPS - 1)]])
    assert one == other


class Weights(torch.nn.Module):
    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        del recurse
        yield cuda(torch.zeros(4))


@torch_ranks.on_ranks(1)
def test_register_refuses_only_short_residuals_on_a_gpu() -> None:
    simulated.install()
    require_features(Weights(), True)
    require_features(Weights(), gradwire.ErrorFeedback())
    with pytest.raises(gradwire.InvalidArgument, match="this one is on a GPU"):
        require_features(Weights(), gradwire.ErrorFeedback("bfloat16"))


@torch_ranks.on_ranks(1)
def test_gradients_that_were_not_cleared_are_found_without_waiting() -> None:
    simulated.install()
    simulated.compute()
    parameter = cuda(torch.zeros(4))
    check = AccumulationCheck({parameter: "weight"})

    def steps(*each: Sequence[torch.Tensor | None]) -> None:
        for before in each:
            step(*before)
            simulated.current_stream().synchronize()

    def step(*before: torch.Tensor | None) -> None:
        """A step of micro-batches that found these gradients."""
        reads = simulated.reads
        for each in before:
            check.note_gradient("weight", each)
        parameter.grad = cuda(torch.ones(4))
        check.require_none(["weight"])
        check.deliver(["weight"])
        assert simulated.reads == reads

    with simulated.on_stream(simulated.Stream()):
        zeros, ones = cuda(torch.zeros(4)), cuda(torch.ones(4))
        steps((None, ones), (zeros, ones), (zeros, ones, ones), (None, ones))
        simulated.capturing = True  # no question about an event may end the capture
        steps((ones,), (None,))  # an average, which was not cleared
        simulated.capturing = False
        with pytest.raises(gradwire.InvalidArgument, match="weight"):
            steps((None,))
