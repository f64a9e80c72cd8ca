"""The hook beside torch's ways to save time and memory: compiling, recomputing, fused steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_ranks
from gradwire.torch import register
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch_training import SMALL_BUCKETS, backward, flat, mlp, same_everywhere
from trainer_options import grouped

SGD: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
HOOKS: list[dict[str, Any]] = [{}, {"codec": "int8"}, {"codec": "onebit", "warm_up": 1}]


class Recomputed(nn.Module):
    """Keeps no activations of its layers."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = mlp(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.layers) - 1, 2):
            part = self.layers[first : first + 2]
            x = checkpoint(part, x.requires_grad_(), use_reentrant=self.reentrant)
        return self.layers[-1](x)


def trained(
    hook: dict[str, Any],
    module: nn.Module,
    *,
    compiled: str | None = None,
    make: Callable[..., torch.optim.Optimizer] = SGD,
    setting: dict[str, Any] = SMALL_BUCKETS,
    **options: Any,
) -> torch.Tensor:
    """The weights after some steps; checks that each went through the hook, and ranks agree."""
    ddp = DistributedDataParallel(module, **setting)
    state = register(ddp, **grouped(min_elements=0, **hook))
    model = torch.compile(ddp, backend=compiled) if compiled else ddp
    optimizer = make(ddp.parameters(), lr=0.01, **options)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert state.steps == 4
    assert same_everywhere(iter(ddp.parameters()))
    state.close()
    return flat(ddp)


@torch_ranks.on_ranks(2)
def test_recomputed_activations_change_no_bit() -> None:
    found = []
    for hook in HOOKS:
        kept = trained(hook, mlp())
        for setting in (SMALL_BUCKETS, {**SMALL_BUCKETS, "static_graph": True}):
            for reentrant in (False, True):
                again = trained(hook, Recomputed(reentrant), setting=setting)
                found.append(kept.equal(again))
    assert found == [True] * 4 * len(HOOKS)


@torch_ranks.on_ranks(2)
def test_fused_optimizers_step_what_the_hook_averaged() -> None:
    found = []
    for hook in HOOKS:
        for make, options in ((SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
            ends = [
                trained(hook, mlp(), make=make, fused=each, **options) for each in (False, True)
            ]
            found.append(float((ends[0] - ends[1]).abs().max()))
    assert max(found) < 1e-5


def distances_when_compiled(backend: str) -> list[float]:
    found = []
    for hook in HOOKS:
        eager, compiled = (
            trained(hook, mlp(), compiled=each, setting={}) for each in (None, backend)
        )
        found.append(float((eager - compiled).abs().max()))
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_with_codecs(backend: str) -> None:
    for found in torch_ranks.run(2, distances_when_compiled, backend):
        assert found[0] < 1e-6
        assert max(found) < 1e-3  # a rounding can change a code
