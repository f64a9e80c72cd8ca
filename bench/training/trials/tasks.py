"""What networks learn: images by a CNN, an MLP or a vision transformer, text by a transformer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from bench.training import images
from bench.training.models import text
from bench.training.models.transformers import LanguageModel, VisionTransformer

_CONTEXT = 64  # bytes
_UNSEEN = 512  # windows

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and labels


class Task(NamedTuple):
    """A network, and examples of what it learns."""

    data: str
    model: Callable[[], nn.Module]
    count: int  # examples to train with
    examples: Callable[[torch.Tensor], Batch]  # by their indices, of shape (batch,)
    unseen: Batch


def language(_: Path | None) -> Task:
    """The next byte of the standard library's text, by 636,160 parameters."""
    data = text.standard_library()

    def at(source: torch.Tensor, starts: torch.Tensor) -> Batch:
        found = text.windows(source, starts, _CONTEXT)
        return found[:, :-1], found[:, 1:].contiguous()

    stride = (len(data.unseen) - _CONTEXT - 1) // _UNSEEN
    return Task(
        data.name,
        lambda: LanguageModel(128, 3, _CONTEXT),
        (len(data.seen) - 1) // _CONTEXT,
        lambda chosen: at(data.seen, chosen * _CONTEXT),
        at(data.unseen, torch.arange(_UNSEEN) * stride),
    )


def _of_images(network: Callable[[int], nn.Module]) -> Callable[[Path | None], Task]:
    def task(directory: Path | None) -> Task:
        data = images.load(directory)
        return Task(
            data.name,
            lambda: network(data.side),
            len(data.train_labels),
            lambda chosen: (data.train_images[chosen], data.train_labels[chosen]),
            (data.test_images, data.test_labels),
        )

    return task


def _mlp(side: int) -> nn.Module:
    layers = [nn.Linear(side * side, 256), nn.ReLU(), nn.Linear(256, images.CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


# By name; each is made of the directory of IDX files, None for the usual ones.
TASKS: dict[str, Callable[[Path | None], Task]] = {
    "lm": language,
    "vit": _of_images(lambda side: VisionTransformer(side, 96, 4)),
    "cnn": _of_images(lambda side: images.small_cnn(side, 128)),
    "mlp": _of_images(_mlp),
}
