"""Small transformers: one that predicts the next byte, and one that classifies images."""

from __future__ import annotations

import torch
from torch import nn

from bench.training import images
from bench.training.models.text import VOCABULARY

_HEADS = 4
_PATCHES = 4  # along an edge of an image


class LanguageModel(nn.Module):
    """Predicts the next byte; with width 128 and 3 layers it has 636,160 parameters."""

    def __init__(self, width: int, layers: int, context: int, *, norm_first: bool = True) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        self.layers = _encoder(width, layers, norm_first=norm_first)
        self.next = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of shape (windows · context, VOCABULARY) for windows of shape (…, context)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.next(self.layers(self.bytes(x) + self.places, mask)).flatten(0, 1)


class VisionTransformer(nn.Module):
    """Classifies grey images by 4 × 4 patches (Dosovitskiy 2021), whose outputs are averaged.

    With width 96, 4 layers and images of 28 × 28 it has 454,858 parameters.
    """

    def __init__(self, side: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, side // _PATCHES, stride=side // _PATCHES)
        self.places = nn.Parameter(torch.randn(_PATCHES**2, width) * 0.02)
        self.layers = _encoder(width, layers, norm_first=True)
        self.classes = nn.Linear(width, images.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of shape (images, CLASSES) for images of shape (images, 1, side, side)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.classes(self.layers(tokens + self.places).mean(1))


def _encoder(width: int, layers: int, *, norm_first: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, _HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    norm = nn.LayerNorm(width) if norm_first else None
    return nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
