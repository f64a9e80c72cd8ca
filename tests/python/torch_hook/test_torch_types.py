"""The hook with parameters that are not float32: each element is averaged, whatever the type."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import gradwire
import pytest
import ranks
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, Stages, State, register
from gradwire.torch.ddp.hook import comm_hook
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch_training import CODECS, batch, mlp, same_everywhere, with_each
from torch_versions import gloo_has_complex
from trainer_options import grouped

COMPLEX = {"complex64": torch.complex64, "complex128": torch.complex128}
VIEWS: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}]


class Waves(nn.Module):
    """A Linear and complex parameters, whose gradients are averaged in buckets of real numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(20, 60)
        self.mix = nn.Parameter(torch.randn(60, 40, dtype=dtype))
        self.phase = nn.Parameter(torch.randn(40, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x).to(self.mix.dtype) @ self.mix * self.phase).abs().mean()


def gradients(
    codec: str | None, dtype: str, steps: int, setting: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], State | None]:
    """The sum over the steps of what DDP delivered; the weights stay as they are."""
    ddp = DistributedDataParallel(Waves(COMPLEX[dtype]), **setting)
    state = None if codec is None else register(ddp, Compression(codec, min_elements=0, warm_up=0))
    total = {name: torch.zeros_like(p) for name, p in ddp.module.named_parameters()}
    for step in range(steps):
        ddp.zero_grad()
        source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        ddp(torch.randn(16, 20, generator=source)).backward()
        assert same_everywhere(each.grad for each in ddp.parameters())
        for name, parameter in ddp.module.named_parameters():
            total[name] += parameter.grad
    return total, state


def residual_mean(state: State, name: str, like: torch.Tensor) -> torch.Tensor:
    """The average of all ranks' residuals of a parameter; complex numbers as pairs."""
    real = torch.view_as_real(like) if like.is_complex() else like
    kept = torch.zeros_like(real, dtype=torch.float64).flatten()
    if state.feedback is not None and state.feedback.residual(name).size:
        kept += torch.from_numpy(state.feedback.residual(name))
    dist.all_reduce(kept)
    kept = (kept / dist.get_world_size()).view(real.shape)
    return torch.view_as_complex(kept) if like.is_complex() else kept


def distance_from_gloo(codec: str, dtype: str, setting: dict[str, Any]) -> dict[str, float]:
    """The distance of averages plus residuals from gloo's averages, by parameter."""
    plain, _ = gradients(None, dtype, 4, setting)
    hooked, state = gradients(codec, dtype, 4, setting)
    assert state is not None
    found = {}
    for name, each in hooked.items():
        all_of_it = each + residual_mean(state, name, each)
        found[name] = float((all_of_it - plain[name]).abs().max() / plain[name].abs().max())
    return found


@gloo_has_complex
@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("setting", VIEWS)
def test_complex_parameters_are_averaged(dtype: str, setting: dict[str, Any]) -> None:
    # Of codecs that keep no feedback.
    rounding = {"fp16": 1e-3, "bf16": 1e-2, "int8": 0.1, "int4": 0.2}
    for found in torch_ranks.run(2, with_each, CODECS, distance_from_gloo, dtype, setting):
        for codec, distances in found.items():
            for name, distance in distances.items():
                assert distance < rounding.get(codec, 1e-5), (codec, name)


class Bucket:
    """One that DDP might hand over; of `parameters`, with so many real numbers."""

    def __init__(self, parameters: list[torch.Tensor], elements: int) -> None:
        self._parameters, self._buffer = parameters, torch.ones(elements)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return list(self._buffer.split([each.numel() for each in self._parameters]))

    def index(self) -> int:
        return 7

    def is_last(self) -> bool:
        return True


@pytest.mark.parametrize("elements", [11, 13])
@pytest.mark.parametrize("codec", ["none", "onebit"])
@ranks.on_ranks(2)
def test_pieces_that_do_not_cover_their_bucket_are_an_error(
    comm: gradwire.Communicator, codec: str, elements: int
) -> None:
    real, pair = torch.zeros(2, 3), torch.zeros(3, dtype=torch.complex64)
    state = State(comm, codec, parameters=[("real", real), ("pair", pair)])
    before = comm.traffic.bytes_sent
    with pytest.raises(RuntimeError):
        comm_hook(state, Bucket([real, pair], elements)).wait()  # type: ignore[arg-type]
    state.close()
    message = str(state.error)
    assert "bucket 7" in message
    assert f"({elements},)" in message
    assert "nothing of it was sent" in message
    assert comm.traffic.bytes_sent - before == 0


@gloo_has_complex
@torch_ranks.on_ranks(2)
def test_states_with_complex_parameters_are_saved_and_loaded() -> None:
    sparse = "topk:density=0.05"
    saved: dict[str, Any] = {}
    for step in range(2):
        ddp = DistributedDataParallel(Waves(torch.complex64))
        state = register(ddp, Compression(sparse, min_elements=0, warm_up=0), momentum=0.9)
        if step == 0:
            ddp(torch.ones(16, 20)).backward()
            saved = state.state_dict()
    state.load_state_dict(saved)
    now = state.state_dict()
    assert now["feedback"]["mix"]["residual"].numel() == 2 * ddp.module.mix.numel()
    assert state.stats().codecs[sparse].elements == 20 * 60 + 60 + 2 * 61 * 40
    assert len(saved["velocities"]) == 4
    for name, each in saved["velocities"].items():
        assert torch.equal(each, now["velocities"][name])


HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def delivered(module: nn.Module, hook: dict[str, Any] | None) -> tuple[Any, State | None, int]:
    """The sum of what DDP delivered over some steps by parameter, and the bytes sent."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.01)
    state = None if hook is None else register(ddp, **grouped(**hook))
    total = {name: torch.zeros_like(p).float() for name, p in module.named_parameters()}
    dtype = next(module.parameters()).dtype
    for step in range(6):
        ddp.zero_grad()
        x, y = batch(step)
        mse_loss(ddp(x.to(dtype)), y.to(dtype)).backward()
        assert same_everywhere(each.grad for each in ddp.parameters())
        for name, parameter in module.named_parameters():
            total[name] += parameter.grad
    return total, state, 0 if state is None else state.communicator.traffic.bytes_sent


def half_model(codec: Any, dtype: str, momentum: bool = False) -> tuple[float, int]:
    """The relative distance of averages plus residuals from plain DDP's; and bytes sent."""
    plain, _, _ = delivered(mlp().to(HALVES[dtype]), None)
    hook = {"codec": codec, "min_elements": 100, "warm_up": 0}
    if momentum:
        hook["momentum"] = 0.0
    hooked, state, sent = delivered(mlp().to(HALVES[dtype]), hook)
    assert state is not None
    worst = 0.0
    for name, each in hooked.items():
        gone = (each + residual_mean(state, name, each) - plain[name]).abs().max()
        worst = max(worst, float(gone / plain[name].abs().max()))
    return worst, sent


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_of_16_bits_are_compressed(dtype: str) -> None:
    """Nothing is lost but the rounding of each step's average to their type, as plain DDP does."""
    for found in torch_ranks.run(2, with_each, CODECS, half_model, dtype):
        dense = found["none"][1]
        for codec, (worst, sent) in found.items():
            assert worst < {"int8": 0.1, "int4": 0.2}.get(codec, 0.03), codec
            if codec not in ("none", "lossless", "fp16", "bf16"):
                assert sent < 0.7 * dense, codec


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_of_16_bits_with_a_schedule_and_momentum(dtype: str) -> None:
    """Stages without a codec deliver the residuals, in as many bytes."""
    stages = Stages((0, "topk:density=0.05"), (2, "none"))
    for worst, _ in torch_ranks.run(2, half_model, stages, dtype):
        assert worst < 0.03
    for worst, _ in torch_ranks.run(2, half_model, "topk:density=0.05", dtype, True):
        assert worst < 0.03


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0), ("float16", 1)])
@torch_ranks.on_ranks(2)
def test_a_paused_step_averages_gradients_of_16_bits(dtype: str, most: int) -> None:
    """Plain DDP divides before it adds, which rounds where a half of a float16 is denormal."""
    found = []
    for hook in (False, True):
        ddp = DistributedDataParallel(mlp().to(HALVES[dtype]))
        state = register(ddp, Compression("onebit", min_elements=0, warm_up=0)) if hook else None
        x, y = batch(0)
        with contextlib.nullcontext() if state is None else state.paused():
            mse_loss(ddp(x.to(HALVES[dtype])), y.to(HALVES[dtype])).backward()
        found.append(torch.cat([each.grad.flatten() for each in ddp.parameters()]))
    plain, hooked = (each.double() for each in found)
    found = float(((plain - hooked).abs() / (plain.abs() * 2 ** (-10) + 2 ** (-24))).max())
    assert found <= most


class Large(nn.Module):
    """A float16 parameter whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.half()).sum()


def large_gradients(codec: str, waiting: float, given: float) -> list[float]:
    ddp = DistributedDataParallel(Large())
    state = register(ddp, Compression(Stages((0, codec)), min_elements=0, warm_up=0))
    assert state.feedback is not None
    state.feedback.add("weight", torch.full((4,), waiting).numpy())
    ddp(torch.full((4,), given)).backward()
    gradient = ddp.module.weight.grad
    assert gradient is not None
    return list(gradient.tolist())


@pytest.mark.parametrize("codec", ["none", "int8", "topk:density=1.0"])
def test_float16_averages_of_finite_gradients_are_finite(codec: str) -> None:
    """The sum, or the residual, may be beyond float16; Inf stays for the scaler."""
    for found in torch_ranks.run(3, large_gradients, codec, 0.0, 60000.0):
        assert found == pytest.approx([60000.0] * 4, rel=1e-3)
    for found in torch_ranks.run(2, large_gradients, codec, 50000.0, 60000.0):
        assert found == pytest.approx([65504.0] * 4, rel=1e-3)
    for found in torch_ranks.run(2, large_gradients, codec, 0.0, float("inf")):
        assert not any(map(math.isfinite, found))
