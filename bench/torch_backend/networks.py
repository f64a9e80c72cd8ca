"""Networks whose weights are mostly in linear layers, as AlexNet's and VGG's are, and smaller."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

SIDE, CHANNELS, CLASSES = 32, 3, 100


def alexnet_like() -> nn.Module:
    """Five convolutions and three linear layers."""
    return nn.Sequential(
        nn.Sequential(
            *_convolution(CHANNELS, 32, 5),
            nn.MaxPool2d(2),
            *_convolution(32, 64, 5),
            nn.MaxPool2d(2),
            *_convolution(64, 96, 3),
            *_convolution(96, 64, 3),
            *_convolution(64, 64, 3),
            nn.MaxPool2d(2),
        ),
        nn.Flatten(),
        _classifier(64 * 4 * 4, 1536),
    )


def vgg_like() -> nn.Module:
    """Stages of 3 × 3 convolutions, each at half the side, and three linear layers."""
    stages: list[nn.Module] = []
    widths = (CHANNELS, 16, 32, 64, 64)
    for entering, leaving in itertools.pairwise(widths):
        stages += [*_convolution(entering, leaving, 3), *_convolution(leaving, leaving, 3)]
        stages.append(nn.MaxPool2d(2))
    return nn.Sequential(nn.Sequential(*stages), nn.Flatten(), _classifier(64 * 2 * 2, 2048))


def perceptron(width: int = 1024, layers: int = 4) -> nn.Module:
    """Linear layers of equal width, for what shards or splits all of them."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


NETWORKS: dict[str, Callable[[], nn.Module]] = {"AlexNet": alexnet_like, "VGG": vgg_like}


def batch(size: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and labels for it."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(size, CHANNELS, SIDE, SIDE, generator=source)
    return images, torch.randint(CLASSES, (size,), generator=source)


def _convolution(entering: int, leaving: int, size: int) -> Sequence[nn.Module]:
    return nn.Conv2d(entering, leaving, size, padding=size // 2), nn.ReLU(inplace=True)


def _classifier(features: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, CLASSES),
    )
