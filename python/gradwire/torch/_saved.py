"""The hook's state as it is saved with a checkpoint; torch.load(weights_only=True) reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch._scales import Units

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


def units(saved: Mapping[str, Any]) -> Units:
    """Of a state's residuals and velocities."""
    return Units(saved["loss_scale"] or 0.0, tuple(saved["learning_rates"]))


def check(feedback: Mapping[str, Mapping[str, Any]], names: Mapping[torch.Tensor, str]) -> None:
    """Raises InvalidArgument for residuals of another model; `names` are of its parameters."""
    sizes = {name: parameter.numel() for parameter, name in names.items()}
    for name, kept in feedback.items():
        if name not in sizes:
            raise InvalidArgument(f"the state has a residual of {name!r}, the model no parameter")
        if kept["residual"].numel() != sizes[name]:
            raise InvalidArgument(
                f"the state's residual of {name!r} has {kept['residual'].numel()} elements, the "
                f"model's parameter {sizes[name]}"
            )


def check_velocities(
    velocities: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str]
) -> None:
    """The same for velocities, which have their parameters' shapes and types."""
    kinds = {name: (parameter.shape, parameter.dtype) for parameter, name in names.items()}
    for name, velocity in velocities.items():
        if name not in kinds:
            raise InvalidArgument(f"the state has a velocity of {name!r}, the model no parameter")
        shape, dtype = kinds[name]
        if (velocity.shape, velocity.dtype) != (shape, dtype):
            raise InvalidArgument(
                f"the state's velocity of {name!r} is {velocity.dtype} of shape "
                f"{tuple(velocity.shape)}, the model's parameter {dtype} of {tuple(shape)}"
            )
