"""The ranks of one run of `gradwire run`: started, watched, signalled and reaped."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import IO, NamedTuple

from gradwire._base.signals import handled
from gradwire._launch import slots
from gradwire._launch.root_cause import (
    Failure,
    describe,
    read_joins,
    read_notes,
    root_cause,
    say,
)
from gradwire._launch.watcher import Watcher

SETTLE_SECONDS = 2.0  # that the others have to fail by themselves after one has failed
GRACE_SECONDS = 5.0  # between asking ranks to end (SIGTERM) and killing them

# Runs before the rank's own program, in its process: die with the launcher. PR_SET_PDEATHSIG is 1.
_PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def prelude() -> list[str]:
    """The begin of the command of a process that dies with this one."""
    return [sys.executable, "-I", "-S", "-c", _PRELUDE, str(os.getpid())]


class _Ended(NamedTuple):
    rank: int
    at: float  # monotonic seconds


class _Signalled(NamedTuple):
    number: int


class LocalRanks:
    """The ranks of one run; only the thread in run() signals and reaps them."""

    def __init__(
        self,
        program: list[str],
        options: argparse.Namespace,
        slot: slots.Slot,
        environment: dict[str, str],
        notes: int,
        watcher: Watcher,
    ) -> None:
        """Takes the options of `gradwire run`, and the file in which ranks leave `notes`."""
        self._program, self._size, self._tag = program, options.n, options.tag_output
        self._environment, self._notes, self._watcher = environment, notes, watcher
        self._keep_going: bool = options.keep_going  # when a rank fails
        self._restarts: int = options.restarts  # with keep_going of each rank; else in all
        self._least: int = options.min or 0  # ranks that are needed to go on when one fails; 0: all
        self._meet = not options.servers  # ranks connect to each other, and not only to servers
        self._slot = slot  # at whose end the ranks must end
        has_margin = options.slot is not None or options.margin is not None
        self._grace = slot.margin if has_margin else GRACE_SECONDS  # until they are killed
        self._events: queue.SimpleQueue[_Ended | _Signalled] = queue.SimpleQueue()
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}  # not reaped yet
        self._printers: list[threading.Thread] = []
        self._failures: list[Failure] = []  # until the ranks were asked to end
        self._ending = False  # the ranks were asked to end
        self._act_at: float | None = None  # when to ask the ranks to end, or to kill them
        self._code = 0
        self.told = False  # by a signal, to stop
        self._saved = False  # some rank wants to be run again, and
        self._unclean = False  # some rank did not end as it was asked to
        self._begun: Counter[int] = Counter()  # how often each rank was started
        self._restarted = 0
        self._succeeded = False  # some rank has

    def run(self) -> int:
        # Forwards them to the ranks. After one of the first two, another signal kills them.
        with handled((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), self._note):
            try:
                for rank in range(self._size):
                    self._start(rank)
                while self._ranks:
                    self._handle(self._next())
                if not self._ending:
                    self._report()
                if self._goes_on and self._succeeded and not self._ending:
                    self._code = 0
                if self._saved and not self._failures and not self._unclean:
                    self._code = slots.REQUEUE
            finally:
                self._signal(signal.SIGKILL)
                for process in self._ranks.values():
                    self._watcher.discard(process.pid)
                    process.wait()
        for printer in self._printers:
            printer.join(GRACE_SECONDS)
        return self._code

    @property
    def _goes_on(self) -> bool:
        """Whether a rank that fails does not end the others."""
        return self._keep_going or self._least > 0

    def _start(self, rank: int) -> None:
        self._begun[rank] += 1
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if self._least and self._begun[rank] > 1:
            environment["GRADWIRE_JOIN"] = "1"
        if self._tag:
            environment["PYTHONUNBUFFERED"] = "1"
        pipe = subprocess.PIPE if self._tag else None
        process = subprocess.Popen(
            [*prelude(), *self._program],
            env=environment,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        self._watcher.add(process.pid)
        self._ranks[rank] = process
        threading.Thread(target=self._watch, args=(rank, process.pid), daemon=True).start()
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                self._print(rank, source, sink.buffer)

    def _watch(self, rank: int, pid: int) -> None:
        """Reports the end of a process without reaping it, which would free its id too early."""
        with contextlib.suppress(
            ChildProcessError
        ):  # run() ended by an exception, and reaped the process
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._events.put(_Ended(rank, time.monotonic()))

    def _print(self, rank: int, source: IO[bytes], sink: IO[bytes]) -> None:
        def copy() -> None:
            with source:
                for line in source:
                    sink.write(b"[%d] %s" % (rank, line if line.endswith(b"\n") else line + b"\n"))
                    sink.flush()

        self._printers.append(threading.Thread(target=copy, daemon=True))
        self._printers[-1].start()

    def _next(self) -> _Ended | _Signalled | None:
        """Waits for the next event; None when the ranks' time to end by themselves is over."""
        while True:
            left = math.inf if self._act_at is None else self._act_at - time.monotonic()
            if not self._ending:
                left = min(left, self._slot.left)
            try:
                return self._events.get(timeout=None if math.isinf(left) else max(0.0, left))
            except queue.Empty:
                if left <= 0:
                    return None

    def _handle(self, event: _Ended | _Signalled | None) -> None:
        if isinstance(event, _Ended):
            self._reap(event)
        elif event is not None and event.number == signal.SIGUSR1:
            self._signal_leaders(event.number)  # asks the ranks to stop, and nothing more
        elif self._ending:
            self._act_at = None
            self._signal(signal.SIGKILL)
        elif event is None:
            if not self._failures:
                self._tell_of_overrun()
            self._stop(signal.SIGTERM)
        else:
            self._code = 128 + event.number
            self._stop(event.number)

    def _reap(self, ended: _Ended) -> None:
        process = self._ranks[ended.rank]
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        failed = status is not None and status.si_status != 0
        if failed or self._ending:
            _signal_group(process.pid, signal.SIGKILL)  # helpers that the rank left running
        self._watcher.discard(process.pid)
        code = process.wait()
        del self._ranks[ended.rank]
        if process.pid in read_joins(self._read_notes(), "late"):
            return  # the others are at their end, and it is not started again
        self._succeeded = self._succeeded or code == 0
        if code == slots.REQUEUE and not self._keep_going:  # the others may still be saving
            self._saved = True
            if math.isinf(self._slot.ends):  # no end of a slot ends those that wait for this one
                self._act_at = self._act_at or time.monotonic() + self._slot.margin
            return
        self._unclean = self._unclean or code != 0
        if code == 0 or self._ending:
            return
        failure = Failure(ended.rank, process.pid, code, ended.at)
        if self._goes_on and self._act_at is None and self._can_go_on(failure):
            self._go_on(failure)
            return
        self._failures.append(failure)
        self._act_at = self._act_at or time.monotonic() + SETTLE_SECONDS

    def _can_start_anew(self, failure: Failure) -> bool:
        if self._keep_going:
            return self._begun[failure.rank] <= self._restarts
        # Whoever joined after the others had come to the end would wait in vain.
        in_vain = self._meet and (self._succeeded or not self._has_members())
        return self._restarted < self._restarts and not in_vain

    def _can_go_on(self, failure: Failure) -> bool:
        """Whether enough ranks are left, or can be started anew."""
        enough = len(self._ranks) >= self._least and (self._has_members() or not self._meet)
        return self._keep_going or enough or self._succeeded or self._can_start_anew(failure)

    def _has_members(self) -> bool:
        """Whether a rank lives that others can join: one from the start, or that has joined."""
        joined = read_joins(self._read_notes(), "joined")
        ranks = self._ranks.items()
        return any(self._begun[rank] == 1 or each.pid in joined for rank, each in ranks)

    def _read_notes(self) -> bytes:
        return os.pread(self._notes, os.fstat(self._notes).st_size, 0)

    def _go_on(self, failure: Failure) -> None:
        """Starts a rank that failed anew, or goes on without it."""
        again = self._can_start_anew(failure)
        number = self._begun[failure.rank] if self._keep_going else self._restarted + 1
        then = f"starting it anew ({number} of {self._restarts})"
        without = f"going on with the other {len(self._ranks)}"
        text = describe([failure], self._size)
        say(f"{text}; {then if again else without}")
        if again:
            self._restarted += 1
            self._start(failure.rank)
        else:
            self._failures.append(failure)

    def _stop(self, number: int) -> None:
        self._report()
        self._ending = True
        self._act_at = time.monotonic() + self._grace
        if number == signal.SIGTERM and not self._failures:
            self._signal_leaders(number)  # which may need their helpers until they have saved
        else:
            self._signal(number)

    def _tell_of_overrun(self) -> None:
        self._code = slots.OVERRUN
        ranks = ", ".join(map(str, sorted(self._ranks)))
        margin = f"{self._slot.margin:g} s"
        what = f"the slot is over, and so is its margin of {margin}, but not rank {ranks}"
        if math.isinf(self._slot.ends):
            first = f"a rank ended with exit code {slots.REQUEUE}"
            what = f"{first}, and {margin} later rank {ranks} had not"
        say(f"{what}: ending what runs; give --margin more than a step and a save take")

    def _report(self) -> None:
        if not self._failures:
            return
        notes = read_notes(self._read_notes())
        failures = [each._replace(note=notes.get(each.process)) for each in self._failures]
        code = root_cause(failures).code
        self._code = code if code > 0 else 128 - code
        then = f"; ending the other {len(self._ranks)}" if self._ranks else ""
        say(f"{describe(failures, self._size)}{then}")

    def _signal(self, number: int) -> None:
        for process in self._ranks.values():
            _signal_group(process.pid, number)

    def _signal_leaders(self, number: int) -> None:
        """Signals the ranks themselves, and not what they have started."""
        for process in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # not send_signal(), which may reap it

    def _note(self, number: int, _: object) -> None:
        self.told = True
        self._events.put(_Signalled(number))


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended, and only its zombie is left
        os.killpg(leader, number)
