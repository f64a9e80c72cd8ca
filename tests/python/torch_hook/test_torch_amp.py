"""Steps with NaN or Inf, and gradients or steps whose scale changes."""

from __future__ import annotations

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, State, register
from gradwire.torch.exchange.gradient_scale import ScaleTracker
from torch import nn
from torch.nn.functional import mse_loss
from torch_training import (
    CODECS,
    LOSSY,
    SMALL_BUCKETS,
    backward,
    batch,
    flat,
    mlp,
    with_each,
    wrapped,
)

ROUNDING = 16.0  # units in the last place of all that was added up
LOST = 1e3  # of them: far more than rounding
OVERFLOW = 3  # the step in which rank 1's loss is infinite


def residuals(state: State) -> torch.Tensor:
    """All of this rank's, one after the other."""
    feedback = state.feedback
    assert feedback is not None
    kept = [torch.from_numpy(feedback.residual(key)) for key in feedback.keys()]  # noqa: SIM118
    return torch.cat(kept) if kept else torch.empty(0)


def train_with_scaler(codec: str, follow: bool = True) -> tuple[float, list[float]]:
    """The scale doubles every other step; an overflow halves it."""
    ddp, books = wrapped(mlp(), **SMALL_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=2)
    followed = scaler if follow else None
    state = register(
        ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0), scaler=followed
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scales = []
    for step in range(7):
        scales.append(scaler.get_scale())
        books.unit = 1 / scales[-1]
        forget, kept, weights = books.mark(), residuals(state), flat(ddp)
        x, y = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(ddp(x), y)
        if step == OVERFLOW and dist.get_rank() == 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == OVERFLOW:
            forget()
            assert residuals(state).equal(kept)
        else:
            books.note()
        scaler.step(optimizer)
        scaler.update()
        assert flat(ddp).equal(weights) == (step == OVERFLOW)  # skipped, on every rank
    assert state.steps == 7
    assert state.stats().total.kept == 6
    return books.missing(state.feedback), scales


def test_an_overflow_on_one_rank_moves_no_residual_on_any() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, train_with_scaler):
        for codec, (missing, scales) in found.items():
            assert missing < ROUNDING, codec
            assert scales == [128, 128, 256, 256, 128, 128, 256], codec


def test_residuals_that_do_not_follow_the_loss_scale_lose_gradients() -> None:
    for found in torch_ranks.run(2, with_each, LOSSY, train_with_scaler, False):
        assert min(missing for missing, _ in found.values()) > LOST, found


class Three(nn.Module):
    """Three parameters: one that is compressed, one that is not, and a half one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.large, self.small = nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(5))
        self.brief = nn.Parameter(torch.randn(5).half())

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        parts = (self.large, self.small, self.brief.float())
        return sum(
            (part * torch.linspace(1, 2, part.numel())).sum() * factor
            for part, factor in zip(parts, factors, strict=True)
        )


def bad_values(codec: str) -> list[tuple[int, str, bool, bool]]:
    """Rank 1 puts NaN or Inf into one of the parameters' gradients by turns."""
    ddp, _ = wrapped(Three())
    state = register(
        ddp, Compression(codec, rules=[("small", "none")], min_elements=0, feedback=True, warm_up=0)
    )
    ddp(torch.full((3,), 0.1)).backward()
    found = []
    for index in range(3):
        for value in ("nan", "inf", "-inf"):
            kept = residuals(state)
            factors = torch.full((3,), 0.1)
            if dist.get_rank() == 1:
                factors[index] = float(value)
            ddp.zero_grad()
            ddp(factors).backward()
            gradient = list(ddp.parameters())[index].grad
            seen = not bool(gradient.isfinite().all())
            found.append((index, value, seen, residuals(state).equal(kept)))
    return found


def test_nan_or_inf_in_any_gradient_moves_no_residual() -> None:
    for by_codec in torch_ranks.run(2, with_each, LOSSY, bad_values):
        for codec, found in by_codec.items():
            for index, value, seen, unmoved in found:
                assert seen, (codec, index, value)
                assert unmoved, (codec, index, value)


def train_with_rates(codec: str, follow: bool = True) -> float:
    """Two groups of parameters, whose learning rates change together."""
    ddp, books = wrapped(mlp(), **SMALL_BUCKETS)
    first, *others = ddp.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)
    followed = optimizer if follow else None
    state = register(
        ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0), optimizer=followed
    )
    for step, factor in enumerate([1.0, 1.0, 0.3, 0.3, 2.0]):
        for group, rate in zip(optimizer.param_groups, (0.1, 0.2), strict=True):
            group["lr"] = rate * factor
        books.unit = factor
        backward(ddp, step)
        books.deliver()
    return books.missing(state.feedback)


def test_residuals_follow_the_learning_rate_if_asked() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, train_with_rates):
        assert max(found.values()) < ROUNDING, found
    for found in torch_ranks.run(2, with_each, LOSSY, train_with_rates, False):
        assert min(found.values()) > LOST, found


def wrap_anew(codec: str) -> float:
    """Makes DDP anew just after the scale has doubled and the learning rate changed."""
    module = mlp()
    _, books = wrapped(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    feedback: gradwire.ErrorFeedback | bool = True
    for step in range(6):
        rate = optimizer.param_groups[0]["lr"] = 0.1 * 0.3 ** (step // 2)
        if step % 2 == 0:
            module[2].requires_grad_(step != 2)
            ddp, _ = wrapped(module, **SMALL_BUCKETS)
            follow = {"scaler": scaler, "optimizer": optimizer}
            state = register(
                ddp, Compression(codec, min_elements=0, feedback=feedback, warm_up=0), **follow
            )
            assert state.feedback is not None
            feedback = state.feedback
        books.unit = rate / scaler.get_scale()
        backward(ddp, step, scaler)
        books.note()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return books.missing(state.feedback)


def test_residuals_follow_scale_and_rate_where_a_model_is_wrapped_anew() -> None:
    for found in torch_ranks.run(2, with_each, CODECS, wrap_anew):
        assert max(found.values()) < ROUNDING, found


def scale_by_hand(codec: str) -> bool:
    ddp, _ = wrapped(mlp())
    state = register(ddp, Compression(codec, min_elements=0, feedback=True, warm_up=0))
    backward(ddp, 0)
    kept = residuals(state)
    state.scale_residuals(0.5)
    return residuals(state).equal(kept * 0.5)


def test_residuals_can_be_scaled_by_hand() -> None:
    for found in torch_ranks.run(2, with_each, LOSSY, scale_by_hand):
        assert all(found.values()), found


@torch_ranks.on_ranks(2)
def test_learning_rates_that_change_by_different_factors_are_refused() -> None:
    ddp, _ = wrapped(mlp())
    first, *others = ddp.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1)
    register(ddp, Compression(LOSSY[0], feedback=True), optimizer=optimizer)
    backward(ddp, 0)
    optimizer.param_groups[0]["lr"] = 0.0  # passed over
    backward(ddp, 1)
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(gradwire.InvalidArgument) as raised:
        backward(ddp, 2)
    message = str(raised.value)
    assert "from [0.1, 0.1] to [0.05, 0.1]" in message
    assert "scale_residuals" in message


class _OnGpu(torch.Tensor):
    """A tensor that says that a GPU has it."""

    is_cuda = True  # type: ignore[assignment]


def test_a_loss_scale_on_a_gpu_is_left_there() -> None:
    """Reading it would make the host wait for the device, in each step."""
    held = torch.tensor(128.0).as_subclass(_OnGpu)

    class Held:
        reads = 0

        def _get_scale_async(self) -> torch.Tensor:
            return held

        def get_scale(self) -> float:
            self.reads += 1
            return 128.0

    scaler = Held()
    tracker = ScaleTracker(scaler, None)
    assert tracker.on_gpu() is held
    assert tracker.read().loss_scale == 0
    assert scaler.reads == 0
    assert tracker.read(on_host=True).loss_scale == 128  # as ranks agree on it within join()
    assert ScaleTracker(torch.amp.GradScaler("cpu"), None).on_gpu() is None
