"""Optimizers of trials that average gradients before they step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.training.train_runs import MOMENTUM


def _library(name: str, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of the package pytorch_optimizer, which takes long to import."""

    def make(parameters: Any, **more: Any) -> torch.optim.Optimizer:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)(parameters, **options, **more)

    return make


# By name; each takes parameters, `lr` and `weight_decay`.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "lion": _library("Lion"),
    # With 0.02 rates are near SGD's, which vectors have: they are not scaled.
    "lars": _library("LARS", momentum=MOMENTUM, trust_coefficient=0.02),
    "lamb": _library("Lamb"),
}


def optimizer_of(
    name: str,
    model: nn.Module,
    rate: float,
    weight_decay: float | None = None,
    momentum: float = MOMENTUM,
) -> torch.optim.Optimizer:
    """An optimizer of a model's parameters; None is its own decay, `momentum` is SGD's."""
    options: dict[str, float] = {} if weight_decay is None else {"weight_decay": weight_decay}
    if name == "sgd":
        options["momentum"] = momentum
    return OPTIMIZERS[name](model.parameters(), lr=rate, **options)
