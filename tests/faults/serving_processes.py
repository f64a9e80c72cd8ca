"""The processes of a case of the parameter server, all forked before anything begins."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gradwire import serve

from tests.faults.ranks import die_with_parent
from tests.faults.serving_cases import SHARDS, Case

_SNAPSHOT_SECONDS = 0.05
_RECONNECT_SECONDS = 60.0
_STEPS_BEFORE = 3  # before the phase of the actor


@dataclass
class Outcome:
    """The end of a client that was told to end, or has failed."""

    steps: int = 0
    longest: float = 0.0  # seconds of a step
    error: str = ""
    gone: list[str] = field(default_factory=list)  # clients that ended, as shard 0 tells
    versions: list[int] = field(default_factory=list)
    values: tuple[float, float, float, float] | None = None  # least and most of each shard's
    lost: int = 0


class Process:
    """A forked process with a pipe; it begins when it is told "go"."""

    def __init__(self, name: str, body: Callable[[Connection], None]) -> None:
        self.name = name
        self.pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            _run(body, theirs)
        theirs.close()
        self.outcome: Outcome | None = None
        self.steps = 0
        self.said: list[str] = []
        self.ended = False

    @property
    def failed(self) -> bool:
        """Whether its last words are a traceback."""
        return bool(self.said) and self.said[-1].startswith("Traceback")

    def tell(self, what: str) -> None:
        """Sends a word, if the process is there."""
        with contextlib.suppress(OSError):
            self.pipe.send(what)

    def hear(self, seconds: float) -> None:
        """Takes in what the process says, after at most so many seconds."""
        try:
            while not self.ended and self.pipe.poll(seconds):
                said: Any = self.pipe.recv()
                if isinstance(said, Outcome):
                    self.outcome = said
                elif isinstance(said, int):
                    self.steps = said
                else:
                    self.said.append(said)
                seconds = 0.0
        except (EOFError, OSError):
            self.ended = True

    def signal(self, number: int) -> None:
        """Sends a signal; the process is not waited for before end(), so its number is its own."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


def _run(body: Callable[[Connection], None], pipe: Connection) -> None:
    """Spends the whole life of a forked process; does not return."""
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name in ("RANK", "GRADWIRE_STORE"):
            os.environ.pop(name, None)
        logging.disable()  # of what is meant to happen here
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if pipe.recv() == "go":
            body(pipe)
        os._exit(0)
    except EOFError:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())
    finally:
        os._exit(70)


def server(case: Case, shard: int, store: str, folder: Path, pipe: Connection) -> None:
    """Serves a shard until it is told to end."""
    with serve.Server(
        SHARDS,
        only=[shard],
        store=store,
        transports=[case.transport],
        snapshot=folder,
        interval=_SNAPSHOT_SECONDS,
    ):
        pipe.send("ready")
        pipe.recv()


class Client:
    """A client that pushes ones and pulls; the actor tells when its phase begins."""

    def __init__(self, case: Case, name: str, store: str, actor: bool, pipe: Connection) -> None:
        self._case, self._name, self._store, self._pipe = case, name, store, pipe
        self._actor, self._outcome = actor, Outcome()
        self._ones = [np.ones(case.size, np.float32)]
        self._values = [np.zeros(case.size, np.float32)]

    def run(self) -> None:
        """Runs to its end, and reports the outcome."""
        try:
            ps = self._connect()
            if self._case.kind == "restart":
                ps.checkpoint()  # from which the other server goes on
            while self._outcome.steps < _STEPS_BEFORE:
                self._step(ps)
            if self._actor and self._case.phase != "joining":
                self._phase(ps)
            while not self._pipe.poll():
                self._step(ps)
            self._look(ps)
            ps.close()
        except Exception as error:
            self._outcome.error = f"{type(error).__name__}: {error}"
        self._pipe.send(self._outcome)

    def _connect(self) -> serve.ParameterServer:
        atomic: Literal["push", "frame"] = "push" if self._case.atomic else "frame"
        if self._actor and self._case.phase == "joining":
            self._pipe.send("phase")
        return serve.connect(
            [np.zeros(self._case.size, np.float32)],
            serve.SGD(lr=1.0),
            store=self._store,
            replica=self._name,
            transports=[self._case.transport],
            atomic=atomic,
            timeout=self._case.timeout,
            reconnect=_RECONNECT_SECONDS if self._case.kind == "restart" else None,
        )

    def _step(self, ps: serve.ParameterServer) -> None:
        began = time.monotonic()
        ps.push(self._ones)
        ps.pull(self._values)
        self._outcome.longest = max(self._outcome.longest, time.monotonic() - began)
        self._outcome.steps += 1
        self._pipe.send(self._outcome.steps)

    def _phase(self, ps: serve.ParameterServer) -> None:
        if self._case.phase == "snapshot":
            ps.checkpoint()
        self._pipe.send("phase")
        if self._case.phase == "idle":
            self._pipe.recv()  # "go on"
        elif self._case.phase == "push":
            ps.push(self._ones)
        elif self._case.phase == "pull":
            ps.pull(self._values)
        else:
            ps.checkpoint()

    def _look(self, ps: serve.ParameterServer) -> None:
        pending = ps.pull(self._values, async_op=True)
        assert pending is not None
        self._outcome.versions = pending.wait()
        (values,) = self._values
        halves = values[: max(1, len(values) // 4)], values[-max(1, len(values) // 4) :]
        (a, b), (c, d) = ((float(each.min()), float(each.max())) for each in halves)
        self._outcome.values = (a, b, c, d)
        self._outcome.gone = ps.stats()[0]["gone"]
        self._outcome.lost = ps.lost
