"""A small training with an optimizer that exchanges in its step, on ranks that are threads."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gradwire import Communicator
from gradwire.torch import OneBitAdam
from local_training import batch, bits, small
from torch import nn
from torch.nn.functional import mse_loss
from trainer_options import grouped


def settings_of(**settings: Any) -> dict[str, Any]:
    """An optimizer's keywords; the codec is onebit beside other settings of a Compression."""
    found = grouped(("warm_up",), **settings)
    if "compression" in found and "codec" not in settings:
        found["compression"] = replace(found["compression"], codec="onebit")
    return found


class Replica:
    """One rank's model and optimizer, on batches of its own."""

    def __init__(
        self,
        comm: Communicator,
        make: Callable[..., Any] = OneBitAdam,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        self.comm = comm
        self.model = small() if model is None else model
        if make is OneBitAdam:
            settings = {"warm_up": 3, "lr": 0.01, "min_elements": 0, **settings}
        self.optimizer = make(self.model.named_parameters(), ranks=comm, **settings_of(**settings))
        self.every = settings.get("every", 1)  # steps an exchange, after which ranks are alike
        self.step_number = 0

    def backward(self, factor: float = 1.0) -> None:
        x, y = batch(self.step_number, self.comm.rank)
        self.step_number += 1
        self.optimizer.zero_grad()
        (mse_loss(self.model(x), y) * factor).backward()

    def train(self, steps: int) -> list[bytes]:
        """The parameters after each step that makes the ranks alike."""
        found = []
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            if self.optimizer.steps % self.every == 0:
                found.append(bits(self.model))
        return found


def own_gradients(model: nn.Module, step: int, ranks: int) -> list[list[torch.Tensor]]:
    """Each rank's gradients, by parameter."""
    every = []
    for rank in range(ranks):
        model.zero_grad()
        x, y = batch(step, rank)
        mse_loss(model(x), y).backward()
        every.append([each.grad.clone() for each in model.parameters()])
    return every


def average_gradients(model: nn.Module, step: int, ranks: int) -> None:
    """Sets gradients to the average of those that the ranks have."""
    every = zip(*own_gradients(model, step, ranks), strict=True)
    for each, found in zip(model.parameters(), every, strict=True):
        each.grad = sum(found) * (1 / ranks)


def saved(what: Any) -> Any:
    """The same after a way through a file."""
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
