"""Checks of the model and the momentum that `register` is given, on each rank alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback


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


def require_features(module: nn.Module, feedback: ErrorFeedback | bool | None) -> None:
    """Raises InvalidArgument for residuals that need a model on the CPU."""
    if not any(each.is_cuda for each in module.parameters()):
        return
    if isinstance(feedback, ErrorFeedback) and feedback.dtype != "float32":
        raise InvalidArgument(
            f"feedback= keeps residuals in {feedback.dtype}, which is for models on the CPU; this "
            "one is on a GPU: give an ErrorFeedback() of float32"
        )


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
