"""The exceptions, as the extension defines them: one tree under `Error`."""

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
    "lost",
]


def lost(rank: int, text: str) -> TransportError:
    """The error that names a rank which is no longer there."""
    error = TransportError(text)
    error.peer = rank
    return error
