"""Memory for FSDP2's buffers, as torch asks a custom collective for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Buffers:
    """A base of custom collectives that has torch's buffers in ordinary memory."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for a buffer of torch's."""
        return torch.empty(*size, dtype=dtype, device=device)
