"""The hook's state as it is saved with a checkpoint; torch.load(weights_only=True) reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback

VERSION = 1


def to_tensors(feedback: ErrorFeedback) -> dict[str, dict[str, Any]]:
    """What ErrorFeedback.state_dict() says, with tensors for arrays."""
    return {
        key: {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in kept.items()
        }
        for key, kept in feedback.state_dict().items()
    }


def to_arrays(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What ErrorFeedback.load_state_dict() takes."""
    return {
        key: {
            name: value.numpy() if isinstance(value, torch.Tensor) else value
            for name, value in kept.items()
        }
        for key, kept in saved.items()
    }


def check(feedback: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int]) -> None:
    """Raises InvalidArgument for residuals of another model; `sizes` are the parameters'."""
    for name, kept in feedback.items():
        if name not in sizes:
            raise InvalidArgument(f"the state has a residual of {name!r}, the model no parameter")
        if kept["residual"].numel() != sizes[name]:
            raise InvalidArgument(
                f"the state's residual of {name!r} has {kept['residual'].numel()} elements, the "
                f"model's parameter {sizes[name]}"
            )
