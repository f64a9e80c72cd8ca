"""What a rank says when its process ends, and what a forked child must not say.

A communicator that is still open when the program ends is closed, which tells the other ranks that
this one left in peace. Where an uncaught exception ends the program it is aborted instead, and the
others raise Aborted with this rank and the exception. Nothing can be said by a process that is
killed or calls os._exit(): its sockets close, and the others raise TransportError.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from gradwire import _core, _environment
from gradwire._errors import Aborted, Error, Timeout, TransportError

if TYPE_CHECKING:
    from gradwire._communicator import Communicator

_EXIT_SECONDS = 1.0  # for work in flight when the interpreter ends
_CONSEQUENCES = (TransportError, Timeout, Aborted)  # what a rank's failure causes on the others
_MOST_TEXT = 400  # characters of an exception that the others are told

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_noted: set[int] = set()  # processes (this one, or the one it was forked from) that wrote a note


class _ExceptHook(Protocol):
    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> Any: ...


def track(communicator: Communicator) -> None:
    """Ends the communicator, if nobody else has, when the program ends."""
    _open.add(communicator)
    if not isinstance(sys.excepthook, _Hook):  # also where the program has set its own meanwhile
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """A sys.excepthook that tells the other ranks, and then calls the one it found."""

    def __init__(self, found: _ExceptHook) -> None:
        self._found = found

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            if _ends_program(error):
                _abort_all(error)
        finally:
            self._found(kind, error, trace)


def _ends_program(error: BaseException) -> bool:
    """Not at an interactive prompt, and not where some code calls sys.excepthook by hand."""
    interactive = hasattr(sys, "ps1") or sys.flags.inspect or "PYTHONINSPECT" in os.environ
    by_interpreter = getattr(sys, "last_value", None) is error
    main = threading.current_thread() is threading.main_thread()
    return main and by_interpreter and not interactive


def _abort_all(error: BaseException) -> None:
    what = _text(error)
    note(what, is_consequence=_is_consequence(error))  # before anybody can fail because of it
    for communicator in list(_open):
        if communicator._core.owned_here:
            communicator._core.abort(f"rank {communicator.rank} raised {what}")


def _text(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    return " ".join("".join(lines).split())[:_MOST_TEXT]


def _is_consequence(error: BaseException | None) -> bool:
    """Whether it comes, perhaps over others, from an error that another rank is to blame for."""
    while error is not None and not isinstance(error, _CONSEQUENCES):
        error = error.__cause__ or error.__context__
    return error is not None


def note(error: str, *, is_consequence: bool) -> None:
    """Leaves the launcher, if it asked for it, the first word of how this process ends."""
    path = _environment.text("GRADWIRE_EXIT_FILE")
    if path is None or os.getpid() in _noted:
        return
    _noted.add(os.getpid())
    said = {
        "process": os.getpid(),
        "at": time.monotonic(),
        "error": error,
        "is_consequence": is_consequence,
    }
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write(json.dumps(said).encode() + b"\n")


@atexit.register
def _close_all() -> None:
    """Gets every thread out of C++ before the interpreter is gone, and tells the peers."""
    note("", is_consequence=False)
    # A GPU's calls end before the communicators that they need.
    for communicator in sorted(_open, key=lambda each: each._gpu is None):
        with contextlib.suppress(Error):
            communicator.close(_EXIT_SECONDS)
    _core.await_calls(_EXIT_SECONDS)


def _let_go_in_child() -> None:
    """A forked child has the sockets, not the threads; kept open, they would outlive the rank."""
    _core.forget_calls()
    for communicator in list(_open):
        communicator._core.let_go_in_child()


os.register_at_fork(after_in_child=_let_go_in_child)
