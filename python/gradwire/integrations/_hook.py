"""What all trainers need: a hook for the model that they have wrapped, its checkpoints, a group."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire._errors import InvalidArgument
from gradwire.torch import State, gather_state_dict, register, scatter_state_dict
from gradwire.torch.ddp.register import state_of
from gradwire.torch.exchange.compression import Compression, CompressionLike, compression_of

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
    return replace(given, warm_up=int(steps * WARM_UP))


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


def save(model: torch.nn.Module | State | None, folder: str | os.PathLike[str]) -> None:
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


def restore(model: torch.nn.Module | State | None, folder: str | os.PathLike[str]) -> None:
    """Goes on from what `save` added to a checkpoint, on any number of ranks.

    Every rank calls it before a step; rank 0 reads the file. Does nothing on one process. Raises
    InvalidArgument on all ranks where the checkpoint has none, or another model's.
    """
    if (state := _state(model)) is None:
        return
    saved = None
    if state.communicator.rank == 0 and (Path(folder) / FILE).exists():
        saved = torch.load(Path(folder) / FILE, weights_only=True)
    scatter_state_dict(state, saved)


def _state(model: Any) -> State | None:
    if model is None or (not isinstance(model, State) and not dist.is_initialized()):
        return None
    if not isinstance(model, State) and dist.get_world_size() == 1:
        return None
    found = state_of(model)
    assert isinstance(found, State)
    return found
