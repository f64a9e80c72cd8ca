"""Ranks that stay alive between benchmarks: starting them costs more than most of what they run."""

from __future__ import annotations

import math
import multiprocessing
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gradwire
from gradwire import Communicator
from gradwire.lab.tuning import measure
from gradwire.lab.tuning.measure import Case

_ROUND_SECONDS = 0.01  # what one round of a fast case should take
_MOST_CALLS = 500


class Round(NamedTuple):
    """`calls` calls back to back."""

    case: Case
    calls: int


class Fit(NamedTuple):
    """Asks how many calls make a round of the case worth timing; also checks its results."""

    case: Case


class RankPool:
    """p ranks over one transport, which wait for commands. Ends them when it is closed."""

    def __init__(self, ranks: int, transport: str) -> None:
        self.ranks, self.transport = ranks, transport
        pairs = [multiprocessing.Pipe() for _ in range(ranks)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._spawn, daemon=True)
        self._thread.start()

    def fit(self, case: Case) -> int:
        """How many calls to time in a round; raises AssertionError when results are wrong."""
        calls, wrong = self._ask(Fit(case))
        assert not wrong, f"{wrong} wrong elements of {case} on {self.ranks} ranks"
        return int(calls)

    def seconds(self, case: Case, calls: int) -> float:
        """The time of one call: of the slowest rank, on average over the calls."""
        return float(self._ask(Round(case, calls)))

    def close(self) -> None:
        """Ends the ranks."""
        for pipe in self._ours:
            pipe.send(None)
        self._thread.join()
        for pipe in (*self._ours, *self._theirs):
            pipe.close()

    def _ask(self, command: Fit | Round) -> Any:
        for pipe in self._ours:
            pipe.send(command)
        while not self._ours[0].poll(0.5):
            if not self._thread.is_alive():
                raise RuntimeError("the ranks ended") from self._failure
        return self._ours[0].recv()

    def _spawn(self) -> None:
        inproc = self.transport == "inproc"
        transports = None if inproc else [self.transport]
        try:
            gradwire.spawn(
                _serve, self.ranks, args=(self._theirs,), threads=inproc, transports=transports
            )
        except BaseException as error:
            self._failure = error


def _serve(comm: Communicator, pipes: list[Connection[Any, Any]]) -> None:
    """A rank's loop. Rank 0 answers; a failure ends all ranks, and the pool says why."""
    pipe = pipes[comm.rank]
    while (command := pipe.recv()) is not None:
        answer = _fit(comm, command) if isinstance(command, Fit) else _time(comm, command)
        if comm.rank == 0:
            pipe.send(answer)


def _time(comm: Communicator, command: Round) -> float:
    return measure.seconds(comm, command.case, iterations=command.calls, warmup=1)


def _fit(comm: Communicator, command: Fit) -> tuple[int, int | None]:
    wrong = measure.wrong_elements(comm, command.case)
    once = measure.seconds(comm, command.case, iterations=2, warmup=1)
    return max(1, min(_MOST_CALLS, math.ceil(_ROUND_SECONDS / once))), wrong
