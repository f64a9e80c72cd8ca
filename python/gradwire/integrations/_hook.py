"""What all trainers need: a hook for the model that they have wrapped, its checkpoints, a group."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire._errors import InvalidArgument
from gradwire.torch import State, gather_state_dict, register, scatter_state_dict
from gradwire.torch.ddp.register import state_of
from gradwire.torch.exchange.compression import Compression, CompressionLike, compression_of
from gradwire.torch.exchange.hook_state import HookState

_log = logging.getLogger("gradwire")

FILE = "gradwire.pt"  # in a trainer's checkpoint
WARM_UP = 0.2  # of all steps: what docs/compression.md measured


def register_wrapped(
    model: torch.nn.Module,
    codec: CompressionLike,
    optimizer: torch.optim.Optimizer | None,
    steps: float | None = None,
    **options: Any,
) -> State | None:
    """Registers the hook for what a trainer made of a model; returns None on one process.

    `steps`, of the optimizer in all, gives a biased codec a fifth of them as its warm-up, unless
    `codec` says another. Raises InvalidArgument as `register` does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    compression = with_warm_up(compression_of(codec, auto=True), steps)
    return register(unwrapped(model), compression, optimizer=optimizer, **options)


def with_warm_up(given: Compression, steps: float | None) -> Compression:
    """Adds the warm-up of a training whose number of steps is known."""
    if steps is None or not 0 < steps < math.inf or not given.can_warm_up:
        return given
    if given.warm_up is not None:
        return given
    return replace(given, warm_up=max(1, int(steps * WARM_UP)))


def unwrapped(model: Any) -> Any:
    """The model without what torch.compile() puts around it."""
    return getattr(model, "_orig_mod", model)


def use_backend(**options: Any) -> None:
    """Makes gradwire the backend of torch.distributed, before a trainer takes another.

    Call it before `TrainingArguments`, `Accelerator` or `Trainer`, and leave their own choice of a
    backend out: on CPUs they only know gloo, but take the group that is there. `options` are those
    of `torch.distributed.init_process_group`. Does nothing in a process that no launcher started.
    Raises InvalidArgument where there is a group with another backend.
    """
    if dist.is_initialized():
        if (found := str(dist.get_backend())) != "gradwire":
            raise InvalidArgument(
                f"torch.distributed has the backend {found!r} already: call use_backend() first, "
                "before TrainingArguments, Accelerator or Trainer"
            )
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gradwire", **options)


def save(model: torch.nn.Module | HookState | None, folder: str | os.PathLike[str]) -> None:
    """Adds what the hook keeps of all ranks to a checkpoint: rank 0 writes ``gradwire.pt``.

    `model` is the wrapped model, or what `register` returned. Every rank calls it between steps.
    Does nothing on one process. Raises InvalidArgument for a model without a hook, and OSError.
    """
    if (state := _state(model)) is None:
        return
    gathered = gather_state_dict(state)
    if gathered is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(gathered, path / FILE)


def restore(model: torch.nn.Module | HookState | None, folder: str | os.PathLike[str]) -> None:
    """Goes on from what `save` added to a checkpoint, on any number of ranks.

    Every rank calls it before a step; rank 0 reads the file. Where the checkpoint has none, as one
    of a single process, residuals begin empty, and the log says so. Does nothing on one process.
    Raises InvalidArgument for another model's, and on all ranks where rank 0 cannot read the file.
    """
    if (state := _state(model)) is not None:
        path = Path(folder) / FILE
        go_on(state, lambda: torch.load(path, weights_only=True) if path.exists() else None)


def go_on(state: HookState, read: Callable[[], Mapping[str, Any] | None]) -> None:
    """Loads on each rank its share of the states that rank 0 reads; of none, begins anew."""
    saved, error, is_first = None, None, state.communicator.rank == 0
    if is_first:
        try:
            saved = read()
        except Exception as found:
            error = found
    exists = np.array([saved is not None or error is not None], np.uint8)
    state.communicator.broadcast(exists)
    if not exists[0]:
        if is_first and state.feedback is not None:
            _log.warning("the checkpoint has no residuals of gradwire's: they begin empty")
        return
    try:
        scatter_state_dict(state, saved)
    except InvalidArgument:
        if error is not None:
            raise error from None
        raise


def _state(model: Any) -> HookState | None:
    if isinstance(model, HookState):
        return model
    if model is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return state_of(model)
