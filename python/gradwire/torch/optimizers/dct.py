"""Tiles: a tensor cut into tiles, and the discrete cosine transform of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch


class Tiles:
    """Tensors of a shape as matrices, cut into tiles of about one size, at most `most` on a side.

    A tensor of several dimensions is a matrix of ``shape[0]`` rows. Where tiles do not fill it,
    they go beyond its end by elements that are 0.
    """

    def __init__(self, shape: Sequence[int], most: int) -> None:
        self._shape = tuple(shape)
        rows = shape[0] if len(shape) > 1 else 1
        self._sides = rows, math.prod(shape) // max(rows, 1)
        self._counts = tuple(max(1, math.ceil(side / most)) for side in self._sides)
        pairs = zip(self._sides, self._counts, strict=True)
        self._tile = tuple(math.ceil(side / count) for side, count in pairs)

    @property
    def count(self) -> int:
        """The number of tiles."""
        return math.prod(self._counts)

    @property
    def elements(self) -> int:
        """The number of elements of each."""
        return math.prod(self._tile)

    def transform(self, tensor: torch.Tensor) -> torch.Tensor:
        """The orthonormal DCT-II of each tile: (count, elements)."""
        (rows, columns), (down, across), (high, wide) = self._sides, self._counts, self._tile
        padded = tensor.new_zeros(down * high, across * wide)
        padded[:rows, :columns] = tensor.reshape(rows, columns)
        tiles = padded.view(down, high, across, wide).transpose(1, 2)
        found = cosines(high, tensor.device) @ tiles @ cosines(wide, tensor.device).T
        return found.reshape(self.count, self.elements)

    def restore(self, coefficients: torch.Tensor) -> torch.Tensor:
        """The tensor that has these coefficients."""
        (rows, columns), (down, across), (high, wide) = self._sides, self._counts, self._tile
        tiles = coefficients.view(down, across, high, wide)
        found = cosines(high, tiles.device).T @ tiles @ cosines(wide, tiles.device)
        padded = found.transpose(1, 2).reshape(down * high, across * wide)
        return padded[:rows, :columns].reshape(self._shape)


@lru_cache(maxsize=64)
def cosines(size: int, device: torch.device) -> torch.Tensor:
    """The matrix of the orthonormal DCT-II of `size` elements, float32."""
    frequency, place = np.ogrid[:size, :size]
    found = np.cos(np.pi * (2 * place + 1) * frequency / (2 * size)) * math.sqrt(2 / size)
    found[0] = math.sqrt(1 / size)
    return torch.from_numpy(found.astype(np.float32)).to(device)
