"""`python -m tests.faults.elastic`: ranks die, stop and join; the others stay bit-identical."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import hashlib
import itertools
import logging
import mmap
import multiprocessing
import os
import secrets
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gradwire
import numpy as np
from gradwire import Communicator, Error
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.survivor_links import SurvivorLinks

from tests.faults.elastic_cases import KINDS, Case, Event, make_case
from tests.faults.options import add_choice, campaign_parser, numbers_of
from tests.faults.ranks import die_with_parent

_SECRET = "0123456789abcdef"
_LIMIT = 120.0  # seconds for each thing that is waited for, however busy the machine
_TURN = 0.005
_ELEMENTS = 5000
_SLOT = struct.Struct("<qqq")  # steps, size, epoch of a process
_PROCESSES = 16


class Outcome(NamedTuple):
    """The end of a process that was told to end, or has failed."""

    size: int = 0
    epoch: int = 0
    steps: int = 0
    digests: dict[tuple[int, int], str] | None = None  # of the parameters, by epoch and step
    error: str = ""

    @property
    def is_minority(self) -> bool:
        """Whether it ended since too few were left."""
        return "no majority; pass min_ranks=" in self.error


class Board:
    """Memory that the processes of a case share: whether to end, and where each of them is."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 + _PROCESSES * _SLOT.size)

    @property
    def ends(self) -> bool:
        return self._memory[0] == 1

    def end(self) -> None:
        self._memory[0] = 1

    def note(self, index: int, steps: int, size: int, epoch: int) -> None:
        place = 8 + index * _SLOT.size  # pack_into() would write zeros first, which others may see
        self._memory[place : place + _SLOT.size] = _SLOT.pack(steps, size, epoch)

    def seen(self, index: int) -> tuple[int, int, int]:
        return _SLOT.unpack_from(self._memory, 8 + index * _SLOT.size)


class Process:
    """A forked process of the job."""

    def __init__(self, index: int, body: Callable[[], Outcome]) -> None:
        self.index = index
        self._pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.pid = os.fork()
        if self.pid == 0:
            self._pipe.close()
            _run(body, theirs)
        theirs.close()
        self.doomed = self.left_out = False  # must end by a signal; may be left out
        self.stranded = False  # has nobody to join
        self.status: int | None = None
        self.outcome: Outcome | None = None

    @property
    def lives(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def kill(self, number: int) -> None:
        if self.lives:
            os.kill(self.pid, number)

    def collect(self) -> bool:
        """Whether its outcome is there, or will never be."""
        if self.outcome is None and self._pipe.poll(0):
            with contextlib.suppress(EOFError):
                self.outcome = self._pipe.recv()
        return self.outcome is not None or not self.lives


def _run(body: Callable[[], Outcome], pipe: Connection) -> None:
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # which shows where a process hangs
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    try:
        outcome = body()
    except BaseException as error:
        where = traceback.format_exc() if not isinstance(error, Error) else ""
        outcome = Outcome(error=f"{type(error).__name__}: {error}{where}")
    pipe.send(outcome)
    os._exit(0)


def die_in_resize(point: int) -> None:
    """Has this process die when it has sent so many messages of resizes."""
    if SurvivorLinks.send.__name__ == "send_or_die":  # a process is told after each of its steps
        return
    send, sent = SurvivorLinks.send, itertools.count()

    def send_or_die(self: SurvivorLinks, *message: Any) -> None:
        if next(sent) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, *message)

    SurvivorLinks.send = send_or_die  # type: ignore[method-assign]


def train(
    comm: Communicator,
    index: int,
    board: Board,
    told_to_die: Callable[[], int],
    least: int | None,
) -> Outcome:
    """Trains until told to end; a vector of parameters, the same on all ranks after each step."""
    values, steps = np.zeros(_ELEMENTS), 0
    digests: dict[tuple[int, int], str] = {}
    comm.accept_joins()
    while True:
        try:
            head = np.array([steps], np.int64)
            comm.broadcast(head)
            comm.broadcast(values)
            steps = int(head[0])
            while True:
                gradient = np.sin(values + np.arange(_ELEMENTS) * (comm.rank + 1) + steps)
                comm.all_reduce(gradient, op="avg")
                values -= 0.1 * gradient
                steps += 1
                digests[comm.epoch, steps] = hashlib.sha256(values.tobytes()).hexdigest()[:16]
                board.note(index, steps, comm.size, comm.epoch)
                if board.ends:
                    comm.request_stop()
                if comm.should_stop():
                    comm.close()
                    return Outcome(comm.size, comm.epoch, steps, digests)
                if (point := told_to_die()) >= 0:
                    die_in_resize(point)
                if comm.should_resize():
                    break
        except Error:
            if not comm.closed:
                raise
        limit = 5 if comm._timeout > 5 else comm._timeout
        comm = comm.resize(timeout=limit, min_ranks=least)


class Stage:
    """The processes of a case, and what happens to them."""

    def __init__(self, case: Case, store: str, name: str) -> None:
        self.case, self._store, self._name = case, store, name
        self.board = Board()
        self._fates = mmap.mmap(-1, _PROCESSES)  # by process: 1 + point where it dies, or 0
        self.processes: list[Process] = []
        for rank in range(case.ranks):
            self._start(functools.partial(self._member, rank))

    def _start(self, body: Callable[[int], Outcome]) -> Process:
        index = len(self.processes)
        self.processes.append(Process(index, lambda: body(index)))
        return self.processes[-1]

    def _member(self, rank: int, index: int) -> Outcome:
        os.environ["GRADWIRE_JOB"] = self._name
        comm = gradwire.init(
            rank=rank,
            ranks=self.case.ranks,
            store=self._store,
            secret=_SECRET,
            transports=self.case.transports,
            timeout=60,
        )
        comm._timeout = self.case.timeout
        return self._train(comm, index)

    def _joiner(self, point: int, index: int) -> Outcome:
        os.environ["GRADWIRE_JOB"] = self._name
        if point >= 0:
            die_in_resize(point)
        options: dict[str, Any] = {"store": self._store, "secret": _SECRET, "timeout": 60}
        comm = gradwire.join(transports=self.case.transports, **options)
        comm._timeout = self.case.timeout
        return self._train(comm, index)

    def _train(self, comm: Communicator, index: int) -> Outcome:
        return train(comm, index, self.board, lambda: self._fates[index] - 1, self.case.least)

    def wait(self, what: str, holds: Callable[[], object]) -> None:
        """Waits until something holds; raises TimeoutError, which says what."""
        limit = time.monotonic() + _LIMIT
        while not holds():
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"hung: {what}; {[self.board.seen(p.index) for p in self.sound]}"
                )
            time.sleep(_TURN)

    @property
    def sound(self) -> list[Process]:
        """Those that must go on to the end."""
        out = [each for each in self.processes if each.doomed or each.left_out or each.stranded]
        return [each for each in self.processes if each not in out]

    def play(self) -> None:
        self.wait("the first steps", lambda: all(self.board.seen(p.index)[0] for p in self.sound))
        for event in self.case.events:
            time.sleep(event.delay)
            self._happen(event)
        self.wait("one communicator", self._is_whole)
        self.board.end()
        ended = [each.outcome for each in self.processes if each.collect() and each.outcome]
        for each in self.processes:
            joining = not self.board.seen(each.index)[0] and not each.doomed
            each.stranded = joining and any(outcome.is_minority for outcome in ended)
        awaited = [p for p in self.processes if not p.doomed and not p.stranded]
        self.wait("the end", lambda: all(each.collect() for each in awaited))
        for each in self.processes:  # a process that was to die while it joins came too late
            if each not in awaited and not each.collect():
                each.kill(signal.SIGKILL)

    def _is_whole(self) -> bool:
        """Whether all sound processes are in one communicator, or some have failed already."""
        seen = {self.board.seen(each.index)[1:] for each in self.sound}
        failed = any(each.collect() for each in self.sound)
        return failed or (len(seen) == 1 and seen.pop()[0] == len(self.sound))

    def _happen(self, event: Event) -> None:
        members = [each for each in self.sound if self.board.seen(each.index)[0]]
        spare = len(self.processes) < _PROCESSES - 1
        victim = members[event.pick % len(members)]
        if event.kind == "join" and spare:
            self._start(functools.partial(self._joiner, -1))
        elif event.kind == "join and die" and spare:
            self._start(functools.partial(self._joiner, event.point % 4)).doomed = True
        elif len(members) < 2:  # somebody must be left with the state
            return
        elif event.kind == "die in a resize" and spare:
            victim.doomed = True
            self._fates[victim.index] = 1 + event.point
            joiner = self._start(functools.partial(self._joiner, -1))
            is_in = lambda: self.board.seen(joiner.index)[0] or joiner.collect()  # noqa: E731
            self.wait("a death in a resize", lambda: not victim.lives or is_in())
            victim.kill(signal.SIGKILL)  # where the resize had fewer messages
        elif event.kind in ("kill", "crash"):
            victim.doomed = True
            victim.kill(signal.SIGKILL if event.kind == "kill" else signal.SIGSEGV)
        elif event.kind == "pause":
            victim.kill(signal.SIGSTOP)
            time.sleep(event.point / 100)
            victim.kill(signal.SIGCONT)
        elif event.kind == "stop":
            victim.left_out = True
            victim.kill(signal.SIGSTOP)
            self.wait("the others to go on", self._is_whole)
            victim.kill(signal.SIGCONT)


def problems(case: Case, processes: list[Process]) -> list[str]:
    """Judges the ends of all processes; empty when they are as they must be."""
    found, sound, minority = [], [], 0
    for each in processes:
        name, outcome = f"process {each.index}", each.outcome
        if each.doomed and not (outcome and outcome.is_minority and case.least is None):
            if outcome is not None:
                found.append(f"{name} was to die and said {outcome.error or 'that it had ended'}")
        elif outcome is not None and outcome.is_minority and case.least is None:
            minority += 1
        elif each.stranded:
            if outcome is not None and not outcome.error:
                found.append(f"{name} has joined where a minority gave up: {outcome}")
        elif each.left_out and outcome is not None and not outcome.error and case.least is None:
            sound.append(outcome)  # the others gave up, and it is their majority
        elif each.left_out:
            if outcome is None or "left this rank out" not in outcome.error:
                found.append(f"{name} was stopped, and not told that it was left out: {outcome}")
        elif outcome is None or outcome.error:
            found.append(f"{name} failed: {outcome and outcome.error} (status {each.status})")
        else:
            sound.append(outcome)
    ends = {(each.size, each.epoch, each.steps) for each in sound}
    if len(ends) > 1:
        found.append(f"the survivors ended in different places: {sorted(ends)}")
    if minority and any(not each.left_out and each.outcome in sound for each in processes):
        found.append(f"{minority} ended as a minority, and {len(sound)} have gone on")
    if sound and sound[0].size != len(sound):
        found.append(f"{len(sound)} survivors ended in a communicator of {sound[0].size}")
    by_step: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
    for each in sound:
        for step, digest in (each.digests or {}).items():
            by_step[step].add(digest)
    different = sorted(step for step, digests in by_step.items() if len(digests) > 1)
    if different:
        found.append(f"parameters differed first at (epoch, step) {different[0]}")
    return found


class Result(NamedTuple):
    """A case, what must not be of it, and how often the ranks changed."""

    case: Case
    problems: list[str]
    epochs: int


def run_case(case: Case) -> Result:
    """Runs one case; ends all its processes."""
    name = f"elastic-{secrets.token_hex(8)}"
    server = StoreServer(Address("unix", f"gradwire-{name}"), name, _SECRET.encode())
    with server:
        stage = Stage(case, str(server.address), name)
        try:
            stage.play()
            found = problems(case, stage.processes)
        except TimeoutError as error:
            for each in stage.processes:
                each.kill(signal.SIGUSR1)
            time.sleep(1)
            found = [str(error), *problems(case, stage.processes)]
        finally:
            for each in stage.processes:
                each.kill(signal.SIGKILL)
                if each.status is None:
                    os.waitpid(each.pid, 0)
    return Result(
        case, found, max((p.outcome.epoch for p in stage.processes if p.outcome), default=0)
    )


def _judged(seed: int, number: int) -> Result:
    return run_case(make_case(seed, number))


def main() -> int:
    """Runs the command; returns 0 when nothing went wrong."""
    parser = campaign_parser("tests.faults.elastic", __doc__, count=100)
    add_choice(parser, jobs=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    print(f"seed {options.seed}: {options.count} cases, {options.jobs} at a time", flush=True)
    began = time.monotonic()
    numbers = numbers_of(options)
    fork = multiprocessing.get_context("fork")
    results = []
    with ProcessPoolExecutor(options.jobs, fork, max_tasks_per_child=None) as pool:
        for result in pool.map(functools.partial(_judged, options.seed), numbers):
            results.append(result)
            if result.problems:
                print(f"\n{result.case}", *result.problems, sep="\n  PROBLEM ", flush=True)
                again = f"--seed {options.seed} --only {result.case.number}"
                print(f"  again: python -m tests.faults.elastic {again}", flush=True)
    events = collections.Counter(event.kind for each in results for event in each.case.events)
    failed = sum(bool(each.problems) for each in results)
    print(f"{len(results)} cases, {failed} with problems, in {time.monotonic() - began:.0f} s")
    print(f"{sum(each.epochs for each in results)} changes of ranks;", end=" ")
    print(", ".join(f"{kind}: {events[kind]}" for kind in KINDS))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
