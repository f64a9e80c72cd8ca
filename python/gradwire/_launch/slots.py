"""Time slots of `gradwire run`: ranks run for a slot, stop, and run again in the next one.

Ranks that should stop save what they need and exit with `REQUEUE`. Ranks are asked to stop by the
variables of the environment that `Communicator.should_stop` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple, NoReturn

from gradwire._base import units
from gradwire._base.signals import handled
from gradwire._errors import InvalidArgument
from gradwire._launch.root_cause import say

REQUEUE = os.EX_TEMPFAIL  # 75, the exit code of ranks that want to be run again
OVERRUN = 124  # the exit code of a run that its slot's end cut off, as of timeout(1)
MARGIN_SECONDS = 60.0
_MOST_SECONDS, _MOST_MARGIN = 1e8, 1e6  # three years; what GRADWIRE_SLOT_MARGIN may be


class Slot(NamedTuple):
    """One time slot; infinite where there are none."""

    ends: float  # in seconds since 1970
    margin: float  # seconds before its end in which ranks are asked to stop

    @property
    def left(self) -> float:
        """Seconds until its end."""
        return self.ends - time.time()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell ranks of it."""
        if self.ends == float("inf"):
            return {}
        return {"GRADWIRE_SLOT_ENDS": f"{self.ends:.3f}", "GRADWIRE_SLOT_MARGIN": f"{self.margin}"}


class Outcome(NamedTuple):
    """The end of one slot's run."""

    code: int  # exit code
    told: bool  # a signal told the run itself to stop, and not only the slot's end its ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of slots to those of `gradwire run`."""
    parser.add_argument(
        "--slot",
        type=_time_of,
        metavar="TIME",
        help="run for a time slot (40m, 1.5h), ask the ranks to stop before its end "
        f"(should_stop()), and start them again in the next one if they exit with code {REQUEUE}",
    )
    parser.add_argument(
        "--margin",
        type=_time_of,
        metavar="TIME",
        help="so long before the slot's end ranks are asked; after SIGTERM they have as long "
        f"({MARGIN_SECONDS:g}s)",
    )
    parser.add_argument(
        "--pause", type=_time_of, default=0.0, metavar="TIME", help="between two slots (0s)"
    )
    parser.add_argument(
        "--lock",
        metavar="FILE",
        help="hold this file's lock in each slot: runs that share it take turns",
    )


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program for options that do not go together."""
    margin = MARGIN_SECONDS if options.margin is None else options.margin
    if margin > _MOST_MARGIN:
        parser.error(f"--margin: {margin:g} s are more than {_MOST_MARGIN:g}")
    if options.slot is None and (options.pause or options.lock):
        parser.error("--pause and --lock go with --slot TIME")
    if options.slot is not None and options.slot <= margin:
        parser.error(
            f"--slot: {options.slot:g} s are no longer than the margin of {margin:g} s in which "
            "ranks save and end; give a longer slot, or a shorter --margin"
        )
    if options.slot is not None and (options.servers or options.keep_going):
        parser.error("--slot goes with neither --servers nor --keep-going: ranks stop together")

    if options.lock is not None:
        try:
            with _files(options.lock):
                pass
        except OSError as error:
            parser.error(f"--lock: {error}")


def _time_of(given: str) -> float:
    try:
        found = units.duration(given)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found > _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{given!r:.80} is more than three years")
    return found


def run(options: argparse.Namespace, once: Callable[[Slot], Outcome]) -> int:
    """Calls `once` for each slot, until its exit code or a signal says that this was the last."""
    margin = MARGIN_SECONDS if options.margin is None else options.margin
    if options.slot is None:
        return once(Slot(float("inf"), margin)).code
    while True:
        try:
            with _turn(options.lock):
                slot = Slot(time.time() + options.slot, margin)
                code, told = once(slot)
            if code != REQUEUE or told or slot.left > margin:  # they stopped for another reason
                return code
            free = f", or when {options.lock} is free" if options.lock else ""
            say(f"the slot is over; the next one begins in {options.pause:g} s{free}")
            with _leaving():
                time.sleep(options.pause)
        except _Leave:
            return REQUEUE
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


@contextlib.contextmanager
def _turn(path: str | None) -> Iterator[None]:
    """Holds a file's lock during the block, after those that waited for it before.

    Whoever waits holds the lock of a second file. So a run whose slot is over cannot take the first
    one again before the other that waits. The kernel releases the locks of a run that dies.
    """
    if path is None:
        yield
        return
    with _files(path) as (lock, queue):
        with _leaving():
            fcntl.flock(queue, fcntl.LOCK_EX)
            fcntl.flock(lock, fcntl.LOCK_EX)
            fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def _files(path: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file that a run locks, and the one that the next in turn locks."""
    with open(path, "ab") as lock, open(f"{path}.next", "ab") as queue:
        yield lock, queue


class _Leave(Exception):
    """A signal came while nothing runs that would have to be saved."""


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """Makes SIGTERM and SIGUSR1 raise _Leave during the block."""

    def leave(*_: object) -> NoReturn:
        raise _Leave

    with handled((signal.SIGTERM, signal.SIGUSR1), leave):
        yield
