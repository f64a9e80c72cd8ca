"""Hugging Face's accelerate: `prepare`, in place of ``accelerator.prepare``."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from gradwire._errors import InvalidArgument
from gradwire.integrations._hook import register_wrapped, restore, save, unwrapped
from gradwire.torch.exchange.compression import CompressionLike


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    codec: CompressionLike,
    steps: int | None = None,
    **options: Any,
) -> Any:
    """Prepares a model and what belongs to it, and registers gradwire's hook for the model.

    `objects` and the result are those of ``accelerator.prepare``; one of them is a model, and
    another its optimizer. `codec` is a codec, or a `gradwire.torch.Compression`. With `steps`, of
    the optimizer in all, a biased codec's warm-up is a fifth of them. `options` are further
    arguments of `gradwire.torch.register`. ``accelerator.save_state`` and ``load_state`` include
    the residuals, for any number of ranks. On one process it only calls ``accelerator.prepare``.
    ``accelerator.clip_grad_norm_`` clips the average, without residuals; ``clip_norm=`` clips
    before they are added. Raises InvalidArgument unless there is one model, and as `register` does.
    """
    prepared = accelerator.prepare(*objects)
    if accelerator.num_processes == 1:
        return prepared
    every = prepared if isinstance(prepared, tuple) else (prepared,)
    model, optimizer = _one_model(every), _optimizer(every)
    state = register_wrapped(
        model, codec, optimizer, steps, **{"scaler": accelerator.scaler, **options}
    )
    if state is not None:
        accelerator.register_save_state_pre_hook(lambda _models, _weights, to: save(state, to))
        accelerator.register_load_state_pre_hook(lambda _models, path: restore(state, path))
    return prepared


def _one_model(objects: tuple[Any, ...]) -> Any:
    models = [each for each in objects if isinstance(unwrapped(each), DistributedDataParallel)]
    if len(models) != 1:
        raise InvalidArgument(
            f"prepare() is for one model that accelerate wraps in DistributedDataParallel, and "
            f"found {len(models)}: call accelerator.prepare(), and gradwire.torch.register() or "
            "register_fsdp() for each model"
        )
    return models[0]


def _optimizer(objects: tuple[Any, ...]) -> torch.optim.Optimizer | None:
    found = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
    return found[0] if len(found) == 1 else None
