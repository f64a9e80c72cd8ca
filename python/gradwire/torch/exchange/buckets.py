"""Buckets: gradients that travel together, by codec, and their layout by type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from gradwire._errors import Error


class Bucket(NamedTuple):
    """Gradients that travel together: one of DDP's buckets, say, or a repacked one."""

    whole: Sequence[torch.Tensor]  # all elements, end to end: one flat tensor, or the gradients
    names: Sequence[str]  # of the parameters; empty when unknown
    gradients: Sequence[torch.Tensor]  # in the parameters' shapes


def real_view(buffer: torch.Tensor) -> torch.Tensor:
    """A view of the buffer as a flat tensor of real numbers."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def gradient_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of a gradient in real numbers; complex ones add a last dimension of 2."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def gradient_elements(parameter: torch.Tensor) -> int:
    """The number of real numbers in a parameter's gradient."""
    return prod(gradient_shape(parameter))


def compressible(gradient: torch.Tensor) -> bool:
    """Whether codecs apply: to float32, complex64 and, on the CPU, bfloat16 and float16."""
    dtype = gradient.dtype.to_real()
    on_cpu = gradient.device.type == "cpu"
    return dtype is torch.float32 or (dtype in (torch.bfloat16, torch.float16) and on_cpu)


def codec_for_16_bits(dtype: torch.dtype, ranks: int) -> str:
    """A codec that sends as many bytes as the type, and whose sums do not overflow."""
    if dtype is torch.bfloat16:
        return "bf16"
    return f"fp16:scale={2.0 ** -(ranks - 1).bit_length()}" if ranks > 1 else "fp16"


def round_into(gradient: torch.Tensor, average: torch.Tensor) -> None:
    """Rounds an average to the gradient's type; finite values stay finite."""
    if gradient.dtype is torch.float16:
        most = torch.finfo(torch.float16).max
        average = torch.where(average.isfinite(), average.clamp(-most, most), average)
    gradient.copy_(average)


class BucketLayout(NamedTuple):
    """The places of some parameters' gradients, end to end in a flat buffer of real numbers."""

    names: tuple[str, ...]
    shapes: Sequence[tuple[int, ...]]
    sizes: Sequence[int]

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor]) -> BucketLayout:
        """The layout of the gradients of these parameters, by name."""
        shapes = [gradient_shape(each) for each in parameters.values()]
        return cls(tuple(parameters), shapes, [prod(shape) for shape in shapes])

    def bucket(self, buffer: torch.Tensor, what: str) -> Bucket:
        """Cuts a buffer into gradients; `what` names it.

        (DDP's own `GradBucket.gradients()` counts pairs as one, and so leaves half of a bucket of
        complex parameters out.) Raises Error where they would not cover it exactly once.
        """
        if sum(self.sizes) != buffer.numel() or buffer.dim() != 1 or not buffer.is_contiguous():
            raise Error(
                f"{what} is a buffer of shape {tuple(buffer.shape)}, and its parameters, whose "
                f"gradients have shapes {list(self.shapes)}, have {sum(self.sizes)} real numbers: "
                "gradients must lie end to end and fill their bucket; nothing of it was sent"
            )
        parts = map(torch.Tensor.view, buffer.split(self.sizes), self.shapes)
        return Bucket([buffer], self.names, list(parts))
