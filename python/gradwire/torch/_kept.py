"""What goes on with residuals when another State takes them over: their units, and velocities.

A DDP model is made anew when ranks leave, and when parameters are frozen or thawed; the
`ErrorFeedback` of the first one's hook is then given to the next one's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from gradwire._feedback import ErrorFeedback
from gradwire.torch._scales import Units


@dataclass
class Kept:
    """Beside the residuals, from one step to the next."""

    units: Units = field(default_factory=Units)  # of residuals and velocities
    velocities: dict[str, torch.Tensor] = field(default_factory=dict)  # by parameter


_kept: WeakKeyDictionary[ErrorFeedback, Kept] = WeakKeyDictionary()


def kept_with(feedback: ErrorFeedback | None) -> Kept:
    """The same for the same feedback, for as long as that lives."""
    return Kept() if feedback is None else _kept.setdefault(feedback, Kept())
