"""Checks of arguments, of `register` above all: on each rank alone, and that all gave the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._base.arguments import instance, wrong
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch._ranks.settings import require_alike, require_feedback
from gradwire.torch._step.hook_state import HookState
from gradwire.torch._step.momentum import Momentum

_State = TypeVar("_State", bound=HookState)


def require_model(ddp: Any) -> None:
    """Raises InvalidArgument unless this is a DDP model without a hook, with dense gradients."""
    if isinstance(getattr(ddp, "_orig_mod", None), DistributedDataParallel):
        raise InvalidArgument(
            "the model is compiled: call register() for the DistributedDataParallel model, before "
            "torch.compile()"
        )
    if not isinstance(ddp, DistributedDataParallel):
        raise InvalidArgument(
            f"register() takes a DistributedDataParallel model, and this is {_kind(ddp)}: wrap it "
            "in DistributedDataParallel, or, in a program of one process that does without, call "
            "register() only if isinstance(model, DistributedDataParallel)"
        )
    hooks = getattr(ddp, "_comm_hooks", ())  # torch has no public way to it
    if hooks:
        raise InvalidArgument(
            f"the model has a communication hook already, {hooks[0][0].__qualname__}, and DDP "
            "takes one: wrap the module in DistributedDataParallel anew"
        )
    _require_dense(ddp)


def require_settings(momentum: Any, scaler: Any, optimizer: Any, feedback: Any, rules: Any) -> None:
    """Raises InvalidArgument for settings of a wrong type."""
    if momentum is not None:
        instance(momentum, "momentum", Momentum, "gradwire.torch.Momentum(0.9)")
    if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "get_scale")):
        raise wrong(scaler, "scaler", "the GradScaler that scales the loss")
    groups = None if isinstance(optimizer, type) else getattr(optimizer, "param_groups", None)
    if optimizer is not None and groups is None:
        raise wrong(optimizer, "optimizer", "the optimizer that steps the model's parameters")
    require_feedback(feedback, rules)


def require_features(module: nn.Module, feedback: ErrorFeedback | bool | None) -> None:
    """Raises InvalidArgument for residuals that need a model on the CPU."""
    if not any(each.is_cuda for each in module.parameters()):
        return
    if isinstance(feedback, ErrorFeedback) and feedback.dtype != "float32":
        raise InvalidArgument(
            f"feedback= keeps residuals in {feedback.dtype}, which is for models on the CPU; this "
            "one is on a GPU: give an ErrorFeedback() of float32"
        )


def made_alike(
    make: Callable[[], _State],
    communicator: Communicator,
    *,
    owns_communicator: bool,
    group: dist.ProcessGroup | None = None,
    **settings: object,
) -> _State:
    """Calls `make` and returns its state if every rank has made its own with the same settings.

    Otherwise raises on all ranks, the error of `make` or InvalidArgument, and closes the state, or
    the communicator that it was to own. With a `group`, the ranks of a mesh of two dimensions call
    it, and this is the dimension that the communicator is not of.
    """
    state: _State | None = None
    failure: Exception | None = None
    try:
        state = make()
    except Exception as error:
        failure = error
    kept = state is not None and state.feedback is not None
    try:
        require_alike(communicator, "register()", {**settings, "feedback": kept}, failure, group)
    except BaseException:
        if state is not None:
            state.close()
        elif owns_communicator:
            communicator.close()
        raise
    assert state is not None
    return state


def _require_dense(ddp: DistributedDataParallel) -> None:
    """Raises InvalidArgument for embeddings with sparse gradients, which DDP would accept."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    for name, module in ddp.module.named_modules():
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if f"{name}.weight".lstrip(".") in ignored:
            continue
        if embeds and module.sparse and module.weight.requires_grad:
            shape = tuple(module.weight.shape)
            raise InvalidArgument(
                f"the {type(module).__name__} {name!r} of shape {shape} has sparse gradients, and "
                "gradwire averages dense ones: build it with sparse=False"
            )


def _kind(model: Any) -> str:
    if isinstance(model, type):
        return f"the class {model.__name__}"
    kind = type(model).__name__
    return f"a {kind}" if isinstance(model, torch.nn.Module) else f"of type {kind}"
