"""Activations in a codec: which tensors of a group travel in one, and how.

Activations differ from call to call and have no names, so there is no error feedback here.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.torch.backend.options import Options
from gradwire.torch.backend.reductions import keywords
from gradwire.torch.exchange.payloads import Payloads

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SUMS = ("sum", "avg")


class ActivationCodec:
    """The codec of one group's tensors, if the program gave one."""

    def __init__(self, options: Options) -> None:
        """Takes the options that the program gave."""
        self._least = options.min_elements
        self._payloads = None if options.codec == "none" else Payloads(options.codec)

    @property
    def compresses(self) -> bool:
        """Whether anything travels in a codec."""
        return self._payloads is not None

    def payloads(self, tensor: torch.Tensor) -> Payloads | None:
        """The codec of a tensor that is moved; None if its own bytes travel."""
        if self._payloads is None or tensor.numel() < self._least:
            return None
        return self._payloads if self._payloads.shrinks(tensor) else None

    def reduction(self, op: Any, *tensors: torch.Tensor) -> tuple[dict[str, Any], Any]:
        """The keywords of a call that reduces, and the dtype that its tensors must have, if any.

        `op` is torch's; the tensors, all of one dtype, are what each rank reduces.
        """
        given = keywords(op)
        payloads = self._payloads
        if payloads is None or given["op"] not in _SUMS or not self.takes(tensors):
            return given, None
        return {**given, "codec": payloads.name, "feedback": False}, torch.float32

    def takes(self, tensors: Any) -> bool:
        """Whether a reduction of these tensors travels in the codec."""
        elements = sum(each.numel() for each in tensors)
        first = tensors[0]
        if self._payloads is None or first.dtype not in _FLOATS or elements < self._least:
            return False
        return bool(self._payloads.size(elements) < elements * first.element_size())
