"""A builder of layers that follows the shape of an image from layer to layer."""

from __future__ import annotations

import math

from gradwire.lab.planner.tables.network import CONV, LINEAR, OTHER, Layer

Shape = tuple[int, int, int]  # channels, height, width


class Shapes:
    """Collects layers; `shape` is that of the activations after the last one."""

    def __init__(self, channels: int, side: int) -> None:
        self.shape: Shape = (channels, side, side)
        self.layers: list[Layer] = []

    def conv(
        self,
        name: str,
        filters: int,
        size: int,
        *,
        stride: int = 1,
        pad: int = 0,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        """Adds a convolution with square filters."""
        before, channels = self.shape, self.shape[0] // groups
        self._slide(size, stride, pad, filters, up=False)
        weights = channels * filters * size * size
        self.layers.append(
            Layer(
                name,
                CONV,
                weights,
                weights + (filters if bias else 0),
                math.prod(before),
                math.prod(self.shape),
                2.0 * channels * size * size * math.prod(self.shape),
                ((filters, channels * size * size),),
            )
        )

    def pool(self, size: int, stride: int, *, pad: int = 0, up: bool = False) -> None:
        """Pools; `up` rounds sizes up, as Caffe does."""
        self._slide(size, stride, pad, self.shape[0], up=up)

    def average(self) -> None:
        """Averages each channel over the whole image."""
        self.shape = (self.shape[0], 1, 1)

    def norm(self, name: str) -> None:
        """Adds a batch normalization: scale and shift by channel."""
        elements = math.prod(self.shape)
        parameters = 2 * self.shape[0]
        self.layers.append(Layer(name, OTHER, 0, parameters, elements, elements, 0.0))

    def linear(self, name: str, outputs: int, *, bias: bool = True) -> None:
        """Adds a fully connected layer over all elements."""
        inputs = math.prod(self.shape)
        self.shape = (outputs, 1, 1)
        self.layers.append(dense(name, inputs, outputs, 1, bias=bias))

    def _slide(self, size: int, stride: int, pad: int, channels: int, *, up: bool) -> None:
        _, height, width = self.shape
        self.shape = (
            channels,
            _positions(height, size, stride, pad, up),
            _positions(width, size, stride, pad, up),
        )


def _positions(side: int, size: int, stride: int, pad: int, up: bool) -> int:
    steps = (side + 2 * pad - size) / stride
    return 1 + (math.ceil(steps) if up else math.floor(steps))


def dense(name: str, inputs: int, outputs: int, positions: int, *, bias: bool = True) -> Layer:
    """A fully connected layer that is applied at each of `positions`."""
    weights = inputs * outputs
    return Layer(
        name,
        LINEAR,
        weights,
        weights + (outputs if bias else 0),
        positions * inputs,
        positions * outputs,
        2.0 * positions * weights,
        ((outputs, inputs),),
    )
