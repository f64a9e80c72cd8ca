"""Ray Train: `prepare_model`, in place of ``ray.train.torch.prepare_model``."""

from __future__ import annotations

from typing import Any

import ray.train.torch
import torch

from gradwire.integrations._hook import register_wrapped, restore, save
from gradwire.torch.exchange.compression import CompressionLike

__all__ = ["prepare_model", "restore", "save"]


def prepare_model(
    model: torch.nn.Module,
    codec: CompressionLike = "none",
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int | None = None,
    prepare: dict[str, Any] | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Wraps a model as Ray Train does, and registers gradwire's hook; every worker calls it.

    `codec` is a codec, or a `gradwire.torch.Compression`. With `steps`, of the optimizer in all, a
    biased codec's warm-up is a fifth of them. `prepare` are arguments of
    ``ray.train.torch.prepare_model``, and `options` further ones of `gradwire.torch.register`. On
    one worker it only calls Ray's. Write the residuals into a checkpoint with `save`, and go on
    from them with `restore`, with any number of workers.
    """
    prepared = ray.train.torch.prepare_model(model, **(prepare or {}))
    register_wrapped(prepared, codec, optimizer, steps, **options)
    return prepared
