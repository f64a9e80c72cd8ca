"""The exceptions: one tree under `Error`, defined by the extension."""

from __future__ import annotations

import logging
from typing import TypeVar

from gradwire._core import (
    Aborted,
    Error,
    InvalidArgument,
    RendezvousError,
    ScheduleError,
    Timeout,
    TransportError,
)

_log = logging.getLogger("gradwire")
_Naming = TypeVar("_Naming", Aborted, Timeout, TransportError)

__all__ = [
    "Aborted",
    "Error",
    "InvalidArgument",
    "JobOver",
    "RendezvousError",
    "ScheduleError",
    "Timeout",
    "TransportError",
    "describe",
    "first_line",
    "lost",
    "naming",
]


class JobOver(RendezvousError):
    """Raised in a process that wants to join when the others have come to the end."""


def describe(error: BaseException) -> str:
    """An error's message, or its type's name if it has none."""
    return str(error) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch's go on with frames of C++, for the debug log.

    An error that gives it is raised `from None`: else Python would print the whole message above.
    """
    first, *more = describe(error).strip().splitlines()
    if more:
        _log.debug("%s: %s", type(error).__name__, error)
    return first


def lost(rank: int, text: str) -> TransportError:
    """The TransportError for a lost rank, whose number is in `peer`."""
    return naming(TransportError(text), rank)


def naming(error: _Naming, peer: int, job_peer: int | None = None) -> _Naming:
    """The error with the rank at fault: in the communicator, and in the job if that differs."""
    error.peer, error.job_peer = peer, peer if job_peer is None else job_peer
    return error
