"""Lin et al. 2018, "Deep Gradient Compression": the hook beside the paper's equations in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import Compression, Stages, register
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import SMALL_BUCKETS, backward, batch, mlp, wrapped

RANKS, STEPS, DENSITY = 2, 6, 0.1
SIZES = (150, 50)
FACTOR = 0.9
CLIP = 0.05  # of what a small model has, far less

Vector = NDArray[np.float32]


def gradients(rank: int, step: int) -> list[Vector]:
    """Every third is large."""
    source = np.random.default_rng(100 * step + rank)
    size = 5 if step % 3 == 1 else 0.1
    return [size * source.standard_normal(n, dtype=np.float32) for n in SIZES]


class Given(nn.Module):
    """Has the gradients that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(n) for n in SIZES)

    def forward(self, wanted: list[Vector]) -> torch.Tensor:
        pairs = zip(self.parts, wanted, strict=True)
        return sum((part * torch.from_numpy(each)).sum() for part, each in pairs)


class Case(NamedTuple):
    """The means of the paper that are in use."""

    clip: float | None = None
    momentum: bool = False
    nesterov: bool = False
    masking: bool = False
    ramp: bool = False

    def density(self, step: int) -> float:
        return max(DENSITY, 0.25 ** (1 + step // 2)) if self.ramp else DENSITY


class Rank:
    """Algorithms 3 and 4 of one node: u is its velocity, v what it has accumulated."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.u = [np.zeros(n, np.float32) for n in SIZES]
        self.v = [np.zeros(n, np.float32) for n in SIZES]

    def sends(self, step: int, its: list[Vector]) -> list[Vector]:
        case = self.case
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in its))
        limit = np.inf if case.clip is None else case.clip * RANKS**-0.5
        clipped = [g * np.float32(min(1, limit / norm)) for g in its]
        return [self.send(i, g, case.density(step)) for i, g in enumerate(clipped)]

    def send(self, i: int, g: Vector, density: float) -> Vector:
        case, m = self.case, np.float32(FACTOR if self.case.momentum else 0)
        if case.nesterov:  # appendix B
            self.u[i] = m * (self.u[i] + g)
            self.v[i] = self.v[i] + self.u[i] + g
        else:
            self.u[i] = m * self.u[i] + g
            self.v[i] = self.v[i] + self.u[i]
        largest = np.argsort(-np.abs(self.v[i]), kind="stable")[: int(density * g.size + 0.5)]
        mask = np.zeros(g.size, bool)
        mask[largest] = True
        sent = np.where(mask, self.v[i], 0)
        self.v[i] = np.where(mask, 0, self.v[i])
        if case.masking:
            self.u[i] = np.where(mask, 0, self.u[i])
        return sent


def furthest(case: Case) -> float:
    """The largest distance of the hook's averages and residuals from those of the equations."""
    ddp = DistributedDataParallel(Given())
    topk = f"topk:density={DENSITY}"
    state = register(
        ddp,
        Compression(
            Stages.sparse(DENSITY, every=2) if case.ramp else topk, min_elements=0, warm_up=0
        ),
        momentum=FACTOR if case.momentum else None,
        nesterov=case.nesterov,
        factor_masking=case.masking,
        clip_norm=case.clip,
    )
    ranks = [Rank(case) for _ in range(RANKS)]
    worst = 0.0
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(gradients(dist.get_rank(), step)).backward()
        sent = [rank.sends(step, gradients(k, step)) for k, rank in enumerate(ranks)]
        for i, part in enumerate(ddp.module.parts):
            average = sum(each[i] for each in sent) / np.float32(RANKS)
            residual = state.feedback.residual(f"parts.{i}")
            worst = max(worst, float(np.abs(part.grad.numpy() - average).max()))
            worst = max(worst, float(np.abs(residual - ranks[dist.get_rank()].v[i]).max()))
    return worst


CASES = {
    "accumulation": Case(),
    "warm-up": Case(ramp=True),
    "correction": Case(momentum=True),
    "masking": Case(momentum=True, masking=True),
    "nesterov": Case(momentum=True, masking=True, nesterov=True),
    "clipping": Case(clip=10),
    "all": Case(clip=10, momentum=True, masking=True, ramp=True),
}


@torch_ranks.on_ranks(RANKS)
def test_the_hook_follows_the_papers_equations() -> None:
    found = {name: furthest(case) for name, case in CASES.items()}
    assert max(found.values()) < 2e-5, found  # of sums of a few tens


def clip_beside_torch(settings: list[dict[str, Any]]) -> list[bool]:
    """Averages of clipped gradients of several buckets and of other types."""
    reference = mlp()
    backward(reference, 0)
    limit = CLIP * dist.get_world_size() ** -0.5
    norm = nn.utils.clip_grad_norm_(reference.parameters(), limit)
    assert norm > 2 * limit
    expected = [each.grad for each in reference.parameters()]
    for each in expected:
        dist.all_reduce(each)
        each /= dist.get_world_size()
    found = []
    for setting in settings:
        ddp, _ = wrapped(mlp(), **SMALL_BUCKETS, **setting)
        register(ddp, clip_norm=CLIP)
        backward(ddp, 0)
        pairs = zip(expected, ddp.parameters(), strict=True)
        found.append(all(torch.allclose(g, each.grad, rtol=1e-4, atol=1e-7) for g, each in pairs))
    return found


def test_clipping_is_of_all_parameters_together() -> None:
    settings: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    assert torch_ranks.run(2, clip_beside_torch, settings) == [[True] * 3] * 2


@torch_ranks.on_ranks(2)
def test_clipping_follows_the_loss_scale_and_hides_no_overflow() -> None:
    """Clips by the norm of unscaled gradients with a loss scale; Inf is left for all to see."""
    gradients = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=64.0)):
        ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
        state = register(ddp, Compression("onebit", warm_up=0), clip_norm=CLIP, scaler=scaler)
        x, y = batch(0)
        loss = nn.functional.mse_loss(ddp(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        gradients.append(torch.cat([each.grad.flatten() for each in ddp.parameters()]))
    kept = state.feedback.residual("2.weight")
    ddp.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y) * (float("inf") if dist.get_rank() == 1 else 1)
    scaler.scale(loss).backward()
    skips = not all(bool(each.grad.isfinite().all()) for each in ddp.parameters())
    unmoved = np.array_equal(kept, state.feedback.residual("2.weight"))
    assert torch.equal(gradients[0] * 64, gradients[1])
    assert skips
    assert unmoved


@pytest.mark.parametrize("norm", [0.0, -1.0, float("inf"), float("nan")])
@torch_ranks.on_ranks(1)
def test_a_norm_that_is_none_is_refused(norm: float) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="clip_norm"):
        register(DistributedDataParallel(mlp()), clip_norm=norm)
