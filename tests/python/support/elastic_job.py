"""A job whose processes leave and join: all are forked, this process has the store.

Each keeps a state, as a training does: a counter of steps and a sum. `train` goes on through every
change of the ranks until a condition holds that all of them see alike.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gradwire
import numpy as np
from gradwire import Communicator, Error
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from ranks import LIMIT, Outcome

SECRET = "0123456789abcdef"
Until = Callable[[Communicator, "State"], bool]


class State(NamedTuple):
    """What ranks must agree on, bit by bit."""

    steps: int
    total: float


def train(comm: Communicator, until: Until, **options: Any) -> tuple[Communicator, State]:
    """Steps until the condition holds, and resizes where a rank dies or somebody asks to join."""
    state = State(0, 0.0)
    comm.accept_joins()
    while True:
        try:
            state = agreed(comm, state)
            while not until(comm, state):
                x = np.full(1000, float(state.steps), np.float32)
                comm.all_reduce(x, op="avg")
                state = State(state.steps + 1, state.total + float(x[0]))
                if comm.should_resize():
                    break
            else:
                return comm, state
        except Error:
            assert comm.closed
        comm = comm.resize(**options)


def agreed(comm: Communicator, state: State) -> State:
    """The state of rank 0, which is never one that has just joined."""
    assert comm.size > comm.joined
    values = np.array(state, np.float64)
    comm.broadcast(values)
    return State(int(values[0]), float(values[1]))


def has(size: int) -> Until:
    """Whether there are so many ranks, and each of them has done a step."""
    return lambda comm, _: comm.size == size


class Process:
    """A forked process that reports what a function returned."""

    def __init__(self, body: Callable[[], Any], *, before: Callable[[], object]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_report, args=(body, before, theirs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def outcome(self) -> Outcome:
        """Waits for its end."""
        outcome = Outcome(died=True)
        with contextlib.suppress(EOFError, ConnectionResetError):
            outcome = self._pipe.recv()
        self._process.join()
        outcome.status = self._process.exitcode or 0
        self._process.close()
        self._pipe.close()
        return outcome

    def value(self) -> Any:
        """The value that the function returned; raises what it raised."""
        ended = self.outcome()
        if ended.error is not None:
            raise ended.error
        assert not ended.died, f"it died with status {ended.status}"
        return ended.value


def _report(body: Callable[[], Any], before: Callable[[], object], pipe: Connection) -> None:
    faulthandler.enable(sys.__stderr__)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    before()
    try:
        outcome = Outcome(body())
    except BaseException as error:
        outcome = Outcome(error=error)
    try:
        pipe.send(outcome)
    except (pickle.PicklingError, AttributeError, TypeError):
        pipe.send(Outcome(error=RuntimeError(repr(outcome))))
    faulthandler.cancel_dump_traceback_later()


class ElasticJob:
    """The processes of one job."""

    def __init__(self, server: StoreServer, name: str, transports: tuple[str, ...] | None) -> None:
        self.name, self._server, self._transports = name, server, transports
        self._environment = {"GRADWIRE_STORE": str(server.address), "GRADWIRE_JOB": name}
        self.processes: list[Process] = []

    @property
    def store(self) -> str:
        return self._environment["GRADWIRE_STORE"]

    def start(self, size: int, body: Callable[[Communicator], Any]) -> list[Process]:
        """Starts the first members."""

        def member(rank: int) -> Any:
            with_store = {"store": self.store, "transports": self._transports, "timeout": 30}
            return body(gradwire.init(rank=rank, ranks=size, secret=SECRET, **with_store))

        return [self.process(lambda rank=rank: member(rank)) for rank in range(size)]

    def join(self, body: Callable[[Communicator], Any], **options: Any) -> Process:
        """Starts a process that joins."""

        def joiner() -> Any:
            given = {"transports": self._transports, "timeout": 30, "secret": SECRET, **options}
            return body(gradwire.join(**given))

        return self.process(joiner)

    def process(self, body: Callable[[], Any]) -> Process:
        made = Process(body, before=lambda: os.environ.update(self._environment))
        self.processes.append(made)
        return made


@contextlib.contextmanager
def elastic_job(transports: tuple[str, ...] | None = None) -> Iterator[ElasticJob]:
    """A job, whose processes end with the block at the latest."""
    name = f"elastic-{secrets.token_hex(4)}"
    server = StoreServer(Address("unix", f"gradwire-{name}"), name, SECRET.encode())
    with server:
        job = ElasticJob(server, name, transports)
        try:
            yield job
        finally:
            for each in job.processes:
                with contextlib.suppress(OSError, ValueError):
                    each.kill()
