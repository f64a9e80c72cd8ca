"""Payloads: floats as a codec's bytes, where they are moved and not summed."""

from __future__ import annotations

import torch

from gradwire._calls.requests import native
from gradwire._errors import InvalidArgument
from gradwire.codec import NativeCodec

MOVABLE = ("bf16", "fp16", "int8")
EXACT = "lossless"
_FLOATS_OF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # codecs, which GPUs have, too
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Payloads:
    """A codec whose payloads have a size that follows from the number of elements.

    Every rank decodes the same bytes to the same values.
    """

    def __init__(self, codec: str | NativeCodec, *, or_exact: bool = False) -> None:
        """Takes a codec; raises InvalidArgument for one that is for sums of gradients alone.

        With `or_exact` also "lossless", which has no payloads of a known size: collectives of
        plain arrays take it.
        """
        self._codec = native(codec)
        self.name = self._codec.name
        self.are_exact = self.name == EXACT
        known = (*MOVABLE, EXACT) if or_exact else MOVABLE
        if self.name.partition(":")[0] not in known:
            raise InvalidArgument(
                f"codec '{self.name}' is for sums of gradients: parameters and activations travel "
                f"as {', '.join(known)}"
            )

    def require_device(self, device: torch.device) -> None:
        """Raises InvalidArgument for a codec that tensors on a device cannot be encoded in."""
        if device.type == "cuda" and self.name not in _FLOATS_OF:
            raise InvalidArgument(
                f"codec '{self.name}' moves tensors between CPUs only, and these are on {device}: "
                "give 'bf16' or 'fp16'"
            )

    @property
    def _float(self) -> torch.dtype:
        return _FLOATS_OF[self.name]

    def shrinks(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor travels in fewer bytes, or in as many, as it has."""
        if tensor.dtype not in _FLOATS or not tensor.numel():
            return False
        return bool(self.size(tensor.numel()) < tensor.nbytes)

    def size(self, elements: int) -> int:
        """The bytes of a payload of so many elements."""
        return self._codec.max_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: torch.Tensor) -> None:
        """Writes a tensor's payload into bytes of its size."""
        if tensor.is_cuda:
            payload.copy_(_rounded(tensor.detach().reshape(-1), self._float).view(torch.uint8))
            return
        x = tensor.detach().reshape(-1).to(torch.float32)
        self._codec.encode(x.data_ptr(), x.numel(), payload.data_ptr())

    def decode(self, payload: torch.Tensor, tensor: torch.Tensor) -> None:
        """Writes a payload's elements into a tensor, rounded to its dtype."""
        if tensor.is_cuda:
            tensor.detach().copy_(payload.view(self._float).to(tensor.dtype).view(tensor.shape))
            return
        y = tensor.detach()
        if y.dtype is not torch.float32 or not y.is_contiguous():
            y = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        self._codec.decode(payload.data_ptr(), y.numel(), y.data_ptr())
        if y.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(y)


def _rounded(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Rounds as the codecs do: what is finite stays so."""
    rounded, largest = tensor.to(to), torch.finfo(to).max
    overflown = torch.isinf(rounded) & torch.isfinite(tensor)
    return torch.where(overflown, rounded.sign() * largest, rounded)
