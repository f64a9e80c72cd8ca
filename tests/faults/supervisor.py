"""Runs one case: starts its ranks, lets its fault happen, and waits for every rank to end."""

from __future__ import annotations

import heapq
import itertools
import logging
import multiprocessing
import os
import resource
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from gradwire._bootstrap.mesh import Mesh, inproc_meshes
from stopwatch import queued_threads

from tests.faults.cases import Case
from tests.faults.faults import Outside
from tests.faults.ranks import Outcome, die_with_parent, serve
from tests.faults.wires import Wire, Wiring, connect

_BEFORE_FAULT = 60.0  # seconds, for a busy machine; healthy ranks need a fraction of one
_AFTER_FAULT = 60.0  # the same, on top of the operations' own timeout
_LONGEST_TURN = 0.5


@dataclass
class Finished:
    """The facts about a case when it is over."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by rank; those that hang lack
    entered: dict[int, int] = field(default_factory=dict)  # by rank: the last call that it made
    fired_at: float | None = None  # when the fault happened, monotonic seconds
    queued: dict[int, dict[int, float]] = field(default_factory=dict)  # by rank, at that time
    seconds: float = 0.0


@dataclass
class _Child:
    """A process with one rank, or with all of them."""

    pid: int
    pipe: Connection
    ranks: list[int]


def run_case(case: Case) -> Finished:
    """Runs a case; returns how it went, and leaves no process behind."""
    return _Supervisor(case).run()


class _Supervisor:
    """The stage on which the fault plays; see `faults.Stage`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._finished = Finished()
        self._children: list[_Child] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._deadline = time.monotonic() + _BEFORE_FAULT
        self._wire: Wire | None = None
        self._went_on = False
        self._outside = Outside(self)

    @property
    def wire(self) -> Wire:
        """The one that the fault asked for."""
        assert self._wire is not None
        return self._wire

    def signal(self, rank: int, number: int) -> None:
        for child in self._children:
            if rank in child.ranks:
                os.kill(child.pid, number)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    def run(self) -> Finished:
        began = time.monotonic()
        self._start()
        while self._children and time.monotonic() < self._deadline:
            self._turn()
            self._let_stopped_go_on()
        self._end()
        self._finished.seconds = time.monotonic() - began
        return self._finished

    def _start(self) -> None:
        if self.case.transport == "inproc":
            self._fork(None, list(range(self.case.ranks)))
        else:
            self._start_processes()

    def _start_processes(self) -> None:
        wiring = connect(self.case, tapped=Outside.needs_wire(self.case))
        self._wire = wiring.wire
        self._outside.prepare()
        for rank in range(self.case.ranks):
            self._fork(wiring, [rank])
        for mesh in wiring.meshes:
            mesh.close()

    def _fork(self, wiring: Wiring | None, ranks: list[int]) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be_ranks(self.case, wiring, ranks, theirs)
        theirs.close()
        self._children.append(_Child(pid, ours, ranks))

    def _turn(self) -> None:
        poller = select.poll()
        for child in self._children:
            poller.register(child.pipe.fileno(), select.POLLIN)
        if self._wire is not None:
            self._wire.register(poller)
        ready = {descriptor for descriptor, _ in poller.poll(1e3 * self._pause())}
        for child in list(self._children):
            if child.pipe.fileno() in ready:
                self._hear(child)
        if self._wire is not None:
            self._wire.carry()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _pause(self) -> float:
        due = self._timers[0][0] if self._timers else self._deadline
        return min(max(due - time.monotonic(), 0.0), _LONGEST_TURN)

    def _hear(self, child: _Child) -> None:
        try:
            said = child.pipe.recv()
        except EOFError:
            self._bury(child)
            return
        if isinstance(said, Outcome):
            self._finished.outcomes[said.rank] = said
        else:
            self._note_entry(*said)

    def _note_entry(self, rank: int, call: int) -> None:
        self._finished.entered[rank] = call
        fault = self.case.fault
        if (rank, call) == (fault.faulty, fault.call) and fault.kind != "none":
            self.after(fault.delay, self._fire)

    def _fire(self) -> None:
        for child in self._children:
            self._finished.queued |= dict.fromkeys(child.ranks, queued_threads(child.pid))
        self._finished.fired_at = time.monotonic()
        self._allow(self.case.timeout)
        self._outside.fire()

    def _allow(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds + _AFTER_FAULT

    def _bury(self, child: _Child) -> None:
        child.pipe.close()
        self._children.remove(child)
        _, status = os.waitpid(child.pid, 0)
        for rank in child.ranks:
            missing = Outcome(rank, died=os.waitstatus_to_exitcode(status))
            self._finished.outcomes.setdefault(rank, missing)

    def _let_stopped_go_on(self) -> None:
        """Once the others have ended without it: then it must end too."""
        faulty = self.case.fault.faulty
        alone = [child.ranks for child in self._children] == [[faulty]]
        if self.case.fault.kind == "stop" and alone and not self._went_on:
            self._went_on = True
            self.signal(faulty, signal.SIGCONT)
            self._allow(self.case.timeout)

    def _end(self) -> None:
        for child in self._children:  # they hang
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.pipe.close()
        if self._wire is not None:
            self._wire.close()


def _be_ranks(case: Case, wiring: Wiring | None, ranks: list[int], pipe: Connection) -> None:
    """The whole life of a forked process; does not return."""
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.disable()  # of what is meant to happen here
        lock = threading.Lock()

        def say(said: object) -> None:
            with lock:
                pipe.send(said)

        for outcome in serve(case, _meshes(wiring, ranks), lambda *entry: say(entry)):
            say(outcome)
        os._exit(0)
    except KeyboardInterrupt:  # that came when the ranks had ended
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _meshes(wiring: Wiring | None, ranks: list[int]) -> list[Mesh]:
    if wiring is None:
        return inproc_meshes(len(ranks))
    wiring.keep_only(ranks[0])
    return [wiring.meshes[ranks[0]]]
