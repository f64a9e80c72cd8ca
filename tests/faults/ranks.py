"""A rank of a case: makes its calls, checks each result, does what its fault says, counts leaks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gradwire import Communicator, Error, ErrorFeedback
from gradwire._bootstrap.mesh import Mesh
from gradwire._communicator import from_mesh
from stopwatch import queued_threads

from tests.faults.calls import SHIFT, Call, Pending
from tests.faults.cases import IN_RANK, SET_UP, Case

_MOST_IN_FLIGHT = 4
_SHRINK_SECONDS = 2.0
_SEQUEL = (Call("all_reduce", 100_000, algorithm="ring"), Call("all_gather", 10), Call(SHIFT, 1000))
_LEAK_SECONDS = 20.0  # for what ends by itself after close(), on a busy machine
_MOST_TEXT = 600  # of an error: a report goes through a pipe in one piece

Enter = Callable[[int, int], None]  # rank, number of the call


@dataclass
class Outcome:
    """The end of a rank; neither a value nor an error if its process died."""

    rank: int
    error: str = ""  # the type's name
    peer: int = -1  # as a rank of the whole job
    text: str = ""
    at: float = 0.0  # when the error came, monotonic seconds
    queued: dict[int, float] = field(default_factory=dict)  # by thread, seconds so far
    wrong: list[tuple[int, int]] = field(default_factory=list)  # call, elements
    digests: dict[int, int] = field(default_factory=dict)  # by call, of results that lost something
    leaks: list[str] = field(default_factory=list)
    died: int | None = None  # the process's exit code, -n for signal n
    went_on: int = 0  # ranks of the communicator that it shrank to, and that worked
    sequel: str = ""  # why it could not

    def __str__(self) -> str:
        how = f"died ({self.died})" if self.died is not None else self.error or "finished"
        named = f" naming {self.peer}" if self.peer >= 0 else ""
        told = f"rank {self.rank} {how}{named}: {self.text}".removesuffix(": ")
        return f"{told}, then went on as one of {self.went_on}" if self.went_on else told


class Leave(Exception):
    """The rank closes in peace, too early."""


def serve(case: Case, meshes: list[Mesh], enter: Enter) -> list[Outcome]:
    """Runs the ranks of this process: one, or one thread for each."""
    before = Resources.now(without=meshes)
    outcomes: list[Outcome] = []
    if len(meshes) == 1:
        outcomes.append(_run(case, meshes[0], enter))
    else:
        threads = [
            threading.Thread(target=lambda mesh=mesh: outcomes.append(_run(case, mesh, enter)))
            for mesh in meshes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    leaks = before.leaks()
    for outcome in outcomes:
        outcome.leaks = leaks
    return outcomes


def _run(case: Case, mesh: Mesh, enter: Enter) -> Outcome:
    script = _Script(case, mesh, enter)
    with contextlib.suppress(BaseException):
        script.run()
    return script.outcome


class _Script:
    """A user's script, with a fault in it."""

    def __init__(self, case: Case, mesh: Mesh, enter: Enter) -> None:
        self.outcome = Outcome(mesh.rank)
        self._case, self._mesh, self._enter = case, mesh, enter
        self._rank = mesh.rank
        self._comms: list[Communicator] = []
        self._feedback: list[ErrorFeedback] = []  # by communicator
        self._pending: list[Pending] = []
        self._communicator = 0  # of the call that is made or waited for
        self._threads: list[threading.Timer] = []

    def run(self) -> None:
        """Calls, a barrier, close; an error leaves the with blocks, and so aborts."""
        try:
            with contextlib.ExitStack() as stack:
                try:
                    self._set_up(stack)
                    self._calls()
                    self._barrier()
                except Leave:
                    pass
                except BaseException as error:
                    self._note(error)
                    if not (self._case.goes_on and self._comms and isinstance(error, Error)):
                        raise
                    self._go_on()
        finally:
            for thread in self._threads:
                thread.join()
            self._comms.clear()
            self._pending.clear()

    def _note(self, error: BaseException) -> None:
        peer = getattr(error, "peer", -1)
        self.outcome.at, self.outcome.queued = time.monotonic(), queued_threads()
        self.outcome.error = type(error).__name__
        self.outcome.text = str(error)[:_MOST_TEXT]
        if peer >= 0:
            self.outcome.peer = self._case.members(self._communicator, self._rank)[peer]

    def _go_on(self) -> None:
        """Continues with the survivors."""
        try:
            with self._comms[0].shrink(timeout=_SHRINK_SECONDS) as comm:
                for index, call in enumerate(_SEQUEL):
                    self._check(Pending(comm, call, index))
                comm.barrier()
                self.outcome.went_on = comm.size
        except Error as error:
            self.outcome.sequel = f"{type(error).__name__}: {error}"[:_MOST_TEXT]

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        case = self._case
        self._reach(SET_UP)
        first = from_mesh(self._mesh, timeout=case.timeout, hosts=case.hosts, **case.tuning)
        self._comms.append(stack.enter_context(first))
        for kind in case.splits:
            made = first.split(0 if kind == "same" else self._rank % 2)
            assert made is not None
            self._comms.append(stack.enter_context(made))
        self._feedback = [ErrorFeedback() for _ in self._comms]

    def _calls(self) -> None:
        for index, call in enumerate(self._case.calls_of(self._rank)):
            self._reach(index)
            self._call(call, index)
        self._finish_down_to(0)

    def _call(self, call: Call, index: int) -> None:
        self._communicator = call.communicator
        comm, feedback = self._comms[call.communicator], self._feedback[call.communicator]
        self._pending.append(Pending(comm, call, index, feedback))
        self._finish_down_to(_MOST_IN_FLIGHT if call.async_op else 0)

    def _finish_down_to(self, count: int) -> None:
        while len(self._pending) > count:
            oldest = self._pending.pop(0)
            self._communicator = oldest.call.communicator
            self._check(oldest)

    def _check(self, pending: Pending) -> None:
        if wrong := pending.wrong():
            self.outcome.wrong.append((pending.index, wrong))
        if pending.digest:
            self.outcome.digests[pending.index] = pending.digest

    def _barrier(self) -> None:
        self._communicator = 0
        self._reach(len(self._case.calls))
        self._comms[0].barrier()

    def _reach(self, index: int) -> None:
        self._enter(self._rank, index)
        fault = self._case.fault
        if fault.kind in IN_RANK and (self._rank, index) == (fault.faulty, fault.call):
            self._misbehave()

    def _misbehave(self) -> None:
        fault = self._case.fault
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "crash":
            self._later(_exit if fault.detail == "exit" else _segmentation_fault)
        elif fault.kind == "abort" and self._comms:
            self._later(lambda: self._comms[0].abort("enough"))
        elif fault.kind == "exception":
            raise SystemExit(1) if fault.detail == "SystemExit" else ValueError("lost")
        elif fault.kind == "leave":
            raise Leave

    def _later(self, action: Callable[[], None]) -> None:
        """Injects the fault from another thread, in the middle of what this one does then."""
        self._threads.append(threading.Timer(self._case.fault.delay, action))
        self._threads[-1].start()


def _exit() -> None:
    os._exit(3)


def _segmentation_fault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@dataclass(frozen=True)
class Resources:
    """Resources of a process that a communicator may forget to give back."""

    descriptors: frozenset[int]
    threads: int
    mappings: int  # of shared memory

    @staticmethod
    def now(without: list[Mesh]) -> Resources:
        """Counts this process's resources, without sockets that communicators will take over."""
        owned = {s.fileno() for m in without for peer in m.peers.values() for s in peer.sockets()}
        listed = {int(name) for name in os.listdir("/proc/self/fd")}
        maps = Path("/proc/self/maps").read_text()
        return Resources(
            frozenset(fd for fd in listed - owned if _target(fd)),
            len(os.listdir("/proc/self/task")),
            maps.count("/memfd:gradwire"),
        )

    def leaks(self) -> list[str]:
        """Resources that are left, once what ends by itself has had its time."""
        gc.collect()
        deadline = time.monotonic() + _LEAK_SECONDS
        while (found := self.more()) and time.monotonic() < deadline:
            time.sleep(0.001)
        return found

    def more(self) -> list[str]:
        """Resources that are left at this moment."""
        now = Resources.now(without=[])
        found = [f"descriptor {fd}: {_target(fd)}" for fd in now.descriptors - self.descriptors]
        if now.threads > self.threads:
            found.append(f"{now.threads - self.threads} threads")
        if now.mappings > self.mappings:
            found.append(f"{now.mappings - self.mappings} mappings")
        return found


def _target(descriptor: int) -> str:
    """The target of a descriptor; nothing if it is closed, like the one that listed the others."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def die_with_parent() -> None:
    """Lets the rank die with its parent, so that an interrupted campaign leaves no stopped rank."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
