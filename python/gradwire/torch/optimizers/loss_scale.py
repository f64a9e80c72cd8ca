"""LossScale: what a GradScaler says of an optimizer's gradients, and what it is told in turn."""

from __future__ import annotations

from typing import Any

import torch

from gradwire._base.arguments import wrong
from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.gradient_scale import Scaler


class LossScale:
    """The GradScaler of an optimizer whose `step` unscales and skips by itself.

    torch's GradScaler sets the attributes ``grad_scale`` and ``found_inf`` of such an optimizer
    while it calls `step`. They are of this rank's gradients, and the others' may have Inf where
    these have none: the scaler is told, so that all ranks lower their scales together.
    """

    def __init__(self, scaler: Scaler | None) -> None:
        """Raises InvalidArgument for what is no GradScaler."""
        if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "get_scale")):
            raise wrong(scaler, "scaler", "the GradScaler that scales the loss")
        self.scaler = scaler

    def of(self, optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
        """The factor that unscales gradients, and whether the scaler found Inf in them."""
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return 1.0, False
        if self.scaler is None:
            raise InvalidArgument(
                f"a GradScaler calls {type(optimizer).__name__}.step(), and was not given to it: "
                "give scaler=, so that scales stay the same on all ranks"
            )
        scale = getattr(optimizer, "grad_scale", None)
        return (1.0 if scale is None else 1.0 / float(scale)), bool(found)

    def note_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tells the scaler of a skipped step, if one has called it; returns whether one has."""
        if getattr(optimizer, "found_inf", None) is None:
            return False
        scaler: Any = self.scaler
        for each in scaler._found_inf_per_device(optimizer).values():
            each.fill_(1)
        return True
