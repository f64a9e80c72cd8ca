"""The end of a rank's process: what it tells the other ranks, and what a forked child must not.

A communicator that is still open when the program ends is closed, which tells the other ranks that
this one ended regularly. If ranks turn out to have made different calls, the process says so and
exits with a status other than 0; to find out, it waits for ranks that are behind, at most the
communicator's timeout. If an uncaught exception ends the program, the communicator is aborted
instead, and the others raise Aborted with this rank and the exception. A process that is killed or
calls os._exit() can say nothing: its sockets close, and the others raise TransportError.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from gradwire import _core
from gradwire._base import environment
from gradwire._base.texts import encodable
from gradwire._errors import Aborted, Error, InvalidArgument, Timeout, TransportError

_EXIT_SECONDS = 1.0  # for calls in flight when the interpreter ends
_LEAST_SETTLE = 0.1  # seconds, after waiting for other communicators
# Errors that a rank's failure causes on the others.
CONSEQUENCES = (TransportError, Timeout, Aborted)
_MOST_TEXT = 400  # characters of an exception that are sent to the others

_open: weakref.WeakSet[_Communicator] = weakref.WeakSet()
_users: weakref.WeakSet[_User] = weakref.WeakSet()
_last: list[Callable[[], None]] = []
_unsettled: list[tuple[_core.Communicator, float]] = []  # with their timeouts
_noted: set[int] = set()  # processes (this one and its parents) that wrote a note


class _Communicator(Protocol):
    """The private part of a `Communicator` that is needed here."""

    _core: _core.Communicator
    _gpu: Any

    @property
    def rank(self) -> int: ...

    def _end(self, timeout: float) -> None:
        """Closes the communicator."""


class _ExceptHook(Protocol):
    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> Any: ...


class _User(Protocol):
    """An object whose threads make calls on a communicator."""

    @property
    def communicator(self) -> _Communicator: ...

    def close(self, with_communicator: bool, /) -> None:
        """Ends the threads; may be called again."""


def close_first(user: _User) -> None:
    """Closes the user at the end of the program, before its communicator."""
    _users.add(user)


def track(communicator: _Communicator) -> None:
    """Closes the communicator at the end of the program, unless it is closed before."""
    _open.add(communicator)
    if not isinstance(sys.excepthook, _Hook):  # also if the program has set its own meanwhile
        sys.excepthook = _Hook(sys.excepthook)


def call_last(call: Callable[[], None]) -> None:
    """Calls it at the end of the program, after all communicators are closed."""
    _last.append(call)


def outlive(core: _core.Communicator, timeout: float) -> None:
    """Keeps a dropped core while a rank may still turn out to have made another call.

    Such a call is logged at once, and again at the end of the program.
    """
    if core.owned_here:
        _unsettled.append((core, timeout))
    for each in _unsettled.copy():  # other threads and the garbage collector may do the same
        if each[0].settled():
            with contextlib.suppress(ValueError):
                _unsettled.remove(each)
        elif each[0] is core:
            core.drop()


class _Hook:
    """A sys.excepthook that aborts the communicators, and then calls the previous hook."""

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
    """Whether an error ends the program: not at a prompt, nor when code calls the hook."""
    interactive = hasattr(sys, "ps1") or sys.flags.inspect or "PYTHONINSPECT" in os.environ
    by_interpreter = getattr(sys, "last_value", None) is error
    main = threading.current_thread() is threading.main_thread()
    return main and by_interpreter and not interactive


def _abort_all(error: BaseException) -> None:
    what = _text(error)
    note(what, is_consequence=_is_consequence(error))  # before another rank can fail because of it
    for communicator in list(_open):
        if communicator._core.owned_here:
            communicator._core.abort(f"rank {communicator.rank} raised {what}", alone=False)


def _text(error: BaseException) -> str:
    lines = traceback.format_exception_only(type(error), error)
    return encodable(" ".join("".join(lines).split())[:_MOST_TEXT])


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error follows, perhaps over others, from another rank's failure."""
    while error is not None and not isinstance(error, CONSEQUENCES):
        error = error.__cause__ or error.__context__
    return error is not None


def note(error: str, *, is_consequence: bool, at: float | None = None) -> None:
    """Writes the launcher a note of how this process ends, if the launcher asked for one.

    Only a process's first note counts. `at` is when the end began, in monotonic seconds; now if
    None.
    """
    path = environment.text("GRADWIRE_EXIT_FILE")
    if path is None or os.getpid() in _noted:
        return
    _noted.add(os.getpid())
    fields = {
        "process": os.getpid(),
        "at": time.monotonic() if at is None else at,
        "error": error,
        "is_consequence": is_consequence,
    }
    _write(path, fields)


def note_join(how: str) -> None:
    """Writes the launcher a note, if it asked for notes, that this process has "joined".

    Or that it came "late": when the others were at the end.
    """
    path = environment.text("GRADWIRE_EXIT_FILE")
    if path is not None:
        _write(path, {how: os.getpid()})


def _write(path: str, fields: dict[str, object]) -> None:
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write(json.dumps(fields).encode() + b"\n")


@atexit.register
def _close_all() -> None:
    """Closes everything: peers must know, and threads must leave C++ before the end."""
    began = time.monotonic()
    users = [each for each in _users if each.communicator._core.owned_here]
    closing: list[Callable[[float], None]]
    closing = [functools.partial(_end_threads, each) for each in users]
    # Calls on a GPU end before the communicators that they need.
    closing += [each._end for each in sorted(_open, key=lambda each: each._gpu is None)]
    closing += [
        functools.partial(_close_unsettled, core, began + limit) for core, limit in _unsettled
    ]
    found = [error for error in map(_error_of, closing) if error is not None]
    _core.await_calls(_EXIT_SECONDS)
    for call in _last:
        call()
    note(_text(found[0]) if found else "", is_consequence=False, at=None if found else began)
    for error in found:
        print(_text(error), file=sys.stderr, flush=True)
    if found:
        _core.end_with(1)


def _end_threads(user: _User, _: float) -> None:
    user.close(False)


def _close_unsettled(core: _core.Communicator, until: float, timeout: float) -> None:
    """Closes a dropped core; all of them share one time limit."""
    core.close(timeout, settle=max(until - time.monotonic(), _LEAST_SETTLE))


def _error_of(close: Callable[[float], None]) -> BaseException | None:
    """Closes something; returns the error of this program, not one that another rank reports."""
    try:
        close(_EXIT_SECONDS)
    except (InvalidArgument, Timeout, KeyboardInterrupt) as error:
        return error
    except Error:
        pass
    return None


def _let_go_in_child() -> None:
    """Closes the sockets in a forked child, where they would outlive the rank."""
    _core.forget_calls()
    for communicator in list(_open):
        communicator._core.release_after_fork()
    for core, _ in _unsettled:
        core.release_after_fork()
    _unsettled.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
