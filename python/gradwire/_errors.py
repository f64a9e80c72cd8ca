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
    "describe",
    "lost",
]


def describe(error: BaseException) -> str:
    """What it says or, where it says nothing, what it is."""
    return str(error) or type(error).__name__


def lost(rank: int, text: str) -> TransportError:
    """The error that names a rank which is no longer there."""
    error = TransportError(text)
    error.peer = rank
    return error
