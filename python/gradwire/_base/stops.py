"""Requests that this process's job stops: signals, and the end of its time slot.

`catch_stops` catches the signals; before it they do what they did, since a program that never asks
must end at SIGTERM. `Communicator.should_stop` asks, and its core tells the other ranks.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import InvalidArgument

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Of this process; all communicators have it. A process that was asked to stop stays so.
REQUEST = _core.StopRequest()

_log = logging.getLogger("gradwire")
_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_handlers: list[_Handler] = []
_lock = threading.RLock()  # guards these; a handler of the program may close a communicator
_is_wanted = False  # whether the program has called catch_stops()


def catch_stops() -> None:
    """Makes SIGTERM and SIGUSR1 ask this process's job to stop, as `request_stop` does.

    `should_stop`, of a communicator or of a trainer, then says so on all ranks. Call it on the main
    thread; elsewhere a warning says that signals do what they did. Handlers of the program's own
    are called too, and a second SIGTERM does what it would do otherwise. Where the last
    communicator that was asked closes, signals do again what they did before.
    """
    global _is_wanted
    _is_wanted = True
    if threading.current_thread() is not threading.main_thread():
        _log.warning(
            "catch_stops() was called on a thread that may not catch signals: call it on the main "
            "thread, or SIGTERM and SIGUSR1 end this process as usual"
        )
    with _lock:
        _install()


def watch(watcher: Any) -> None:
    """Makes the slot's end, and signals if wanted, ask for a stop until `release` for all watchers.

    Raises InvalidArgument for a variable of the environment that is no time.
    """
    with _lock:
        if watcher not in _watchers:
            try:
                _ask_at_end()
            except InvalidArgument as error:
                raise InvalidArgument(f"rank {watcher.rank}: {error}") from None
            _watchers.add(watcher)
        if _is_wanted:
            _install()


def release(watcher: object) -> None:
    """Ends a watch; after the last one signals do what they did before the first."""
    with _lock:
        _watchers.discard(watcher)
        if not list(_watchers):  # len() counts those that are being destroyed
            _uninstall()


def _install() -> None:
    if not all(each.is_ours for each in _handlers):
        _uninstall()  # those of the process that this one was forked from
    if not _handlers and threading.current_thread() is threading.main_thread():
        _handlers.extend(map(_Handler, SIGNALS))


def _uninstall() -> None:
    while _handlers and threading.current_thread() is threading.main_thread():
        _handlers.pop().uninstall()


class _Handler:
    """The handler of one signal, in front of the one that was there."""

    def __init__(self, number: signal.Signals) -> None:
        self._number, self._process, self._asked = number, os.getpid(), False
        self._before: Callable[[int, FrameType | None], Any] | int | None
        self._before = signal.getsignal(number)  # first: a signal may come as soon as this is set
        signal.signal(number, self)

    @property
    def is_ours(self) -> bool:
        """Whether this process set it, and not one that it was forked from."""
        return os.getpid() == self._process

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A forked helper must end, and so must this process when it is told twice.
        asks = self.is_ours and not (self._asked and self._number == signal.SIGTERM)
        if asks:
            self._asked = True
            REQUEST.make()
        if callable(self._before):
            self._before(number, frame)
        elif not asks and self._before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def uninstall(self) -> None:
        """Puts the handler back that was there, unless the program has set another one since."""
        is_set = signal.getsignal(self._number) is self
        if is_set:
            signal.signal(self._number, self._before or signal.SIG_DFL)


def _ask_at_end() -> None:
    """Has the request made a margin before the end of the slot or of Slurm's job, if it has one."""
    slot_ends = environment.number("GRADWIRE_SLOT_ENDS")
    job_ends = _time("SLURM_JOB_END_TIME", os.environ.get("SLURM_JOB_END_TIME"))
    end = min(math.inf if slot_ends is None else slot_ends, job_ends)
    if math.isinf(end):
        return
    margin = environment.seconds("GRADWIRE_SLOT_MARGIN")
    left = end - time.time()
    if left <= margin and not REQUEST.made():
        _log.warning(
            "the time slot ends in %.0f s, no later than its margin of %.0f s "
            "(GRADWIRE_SLOT_MARGIN): all ranks are asked to stop at once",
            max(left, 0),
            margin,
        )
    REQUEST.make_at(end - margin)


def _time(name: str, given: str | None) -> float:
    """A variable in seconds since 1970; infinite where it is not set."""
    if not given:
        return math.inf
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise InvalidArgument(f"{name}={given!r} is no time: give seconds since 1970")
    return value
