"""The exceptions: one tree under `Error`, defined by the extension."""

from __future__ import annotations

from gradwire._core import (
    Aborted,
    Error,
    InvalidArgument,
    RendezvousError,
    ScheduleError,
    Timeout,
    TransportError,
)

__all__ = [
    "Aborted",
    "Error",
    "InvalidArgument",
    "RendezvousError",
    "ScheduleError",
    "Timeout",
    "TransportError",
    "describe",
    "lost",
]


def describe(error: BaseException) -> str:
    """An error's message, or its type's name if it has none."""
    return str(error) or type(error).__name__


def lost(rank: int, text: str) -> TransportError:
    """The TransportError for a lost rank, whose number is in `peer`."""
    error = TransportError(text)
    error.peer = rank
    return error
