"""Limits of gradients. NaN and Inf pass all of them, so that no rank makes the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gradwire._base.arguments import number
from gradwire._errors import InvalidArgument


def require_norm(given: Any) -> float:
    """Checks ``clip_norm=``; raises InvalidArgument."""
    limit = number(given, "clip_norm")
    if not 0 < limit < math.inf:
        raise InvalidArgument(f"clip_norm={given} is no norm: give a finite one above 0, or None")
    return limit


def norm(tensors: Sequence[torch.Tensor]) -> float:
    """The norm of all elements together."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]
    return math.hypot(*map(float, norms))


def factor(norm: float, limit: float) -> float:
    """The factor that brings a norm within the limit."""
    return limit / norm if math.isfinite(norm) and norm > limit else 1.0


def clamp(values: torch.Tensor, most: float) -> torch.Tensor:
    """Limits each element's magnitude, in place."""
    largest = float(torch.stack(torch.aminmax(values)).abs().max()) if values.numel() else 0.0
    return values.clamp_(-most, most) if math.isfinite(largest) and largest > most else values
