"""A rank that has not moved for long logs once what it does, and what whom it waits for does."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, _core
from ranks import eventually, run, state_of

CALL = r"all_reduce\(float64\[3\], op=sum, algorithm=ring, codec=none\), call 1,"
QUIET = r"has not moved for 0\.2 s: it waits for"
SHARED: Any = multiprocessing.get_context("fork")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files for the ranks' standard errors, and a short limit."""
    monkeypatch.setenv("GRADWIRE_STALL_SECONDS", "0.2")
    path = tmp_path / "log"
    path.touch()
    return path


def lines_of(log: Path, rank: int) -> list[str]:
    return re.findall(rf"^gradwire: (rank {rank}: .*)\n", log.read_text(), re.MULTILINE)


def begin(comm: Communicator, log: Path) -> None:
    """Makes the first call of every rank, which works, and of which nothing is logged."""
    comm.all_reduce(np.ones(3))
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)


def run_ranks(p: int, body: Callable[..., Any]) -> None:
    run(p, body, transport="shm", processes=True)


def test_a_rank_that_computes_is_said_to_be_outside(log: Path) -> None:
    def body(comm: Communicator) -> None:
        begin(comm, log)
        if comm.rank == 2:
            eventually(lambda: lines_of(log, 0) and lines_of(log, 1))
        assert comm.all_reduce(np.ones(3), algorithm="ring").tolist() == [3] * 3

    run_ranks(3, body)
    (line,) = lines_of(log, 0)
    first = r"rank 2 to send segment 0 of round 0; "
    outside = r"rank 2 \(process \d+\) has been outside gradwire for .* s; its last call was 0"
    assert re.match(rf"rank 0: {CALL} {QUIET} {first}{outside}\. All ranks", line), line
    (line,) = lines_of(log, 1)  # its neighbour in the ring is rank 0, which is innocent
    assert re.match(rf"rank 1: {CALL} {QUIET} rank 0 to send", line), line


def test_a_rank_that_was_stopped_is_said_to_be(log: Path) -> None:
    stopped = SHARED.Value("i", 0)

    def body(comm: Communicator) -> None:
        begin(comm, log)
        if comm.rank == 1:
            stopped.value = os.getpid()
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            eventually(lambda: stopped.value and state_of(stopped.value) == "T")
        work = comm.all_reduce(np.ones(3), algorithm="ring", async_op=True)
        if comm.rank == 0:
            try:
                eventually(lambda: lines_of(log, 0))
            finally:
                os.kill(stopped.value, signal.SIGCONT)
        assert work.wait().tolist() == [2] * 3

    run_ranks(2, body)
    line, *_ = lines_of(log, 0)
    known = r"rank 1 \(process (\d+)\) is stopped \(kill -CONT \1 lets it go on\)"
    assert re.match(rf"rank 0: {CALL} {QUIET} rank 1 to send segment 0 of round 0; {known}", line)


def test_a_rank_in_another_operation_is_said_to_be(log: Path) -> None:
    def body(comm: Communicator) -> None:
        begin(comm, log)
        if comm.rank == 2:
            comm.recv(np.empty(3), 0)
        eventually(lambda: lines_of(log, 2))
        work = comm.all_reduce(np.ones(3), algorithm="ring", async_op=True)
        if comm.rank == 0:
            eventually(lambda: lines_of(log, 0))
            comm.send(np.ones(3), 2)
        work.wait()

    run_ranks(3, body)
    line, *_ = lines_of(log, 2)
    message = r"recv of 24 bytes, message 0"
    outside = r"rank 0 \(process \d+\) has been outside"
    assert re.match(rf"rank 2: {message}, {QUIET} rank 0 to send; {outside}", line), line
    line, *_ = lines_of(log, 0)
    waits = rf"rank 2 \(process \d+\) waits for rank 0 in {message}"
    assert re.match(rf"rank 0: {CALL} {QUIET} rank 2 to send segment 0 of round 0; {waits}", line)


def test_a_recv_from_any_rank_may_wait_for_long(log: Path) -> None:
    def body(comm: Communicator) -> None:
        begin(comm, log)
        if comm.rank == 0:
            comm.recv(np.empty(3))
        elif comm.rank == 1:
            eventually(lambda: waiting(comm) == {0: -1})
            comm.send(np.ones(3), 0)

    run_ranks(3, body)
    assert log.read_text() == ""


def waiting(comm: Communicator) -> dict[int, int]:
    """The ranks whose pages show that they wait, and the peers that they wait for."""
    return {
        each["rank"]: each["peer"]
        for each in _core.ranks_on_this_host()
        if each["tag"] == comm._mesh.job.tag
        and (each["peer"] >= 0 or each["activity"] == "receive")
    }


def test_zero_turns_it_off(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_STALL_SECONDS", "0")

    def body(comm: Communicator) -> None:
        begin(comm, log)
        if comm.rank == 2:
            eventually(lambda: waiting(comm) == {0: 2, 1: 0})
        comm.all_reduce(np.ones(3), algorithm="ring")

    run_ranks(3, body)
    assert log.read_text() == ""


def test_patience_is_thirty_seconds_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is what a communicator gives its core."""
    monkeypatch.delenv("GRADWIRE_STALL_SECONDS", raising=False)
    given: list[float] = []
    core = _core.Communicator

    def spy(*args: Any, stall_seconds: float, **rest: Any) -> _core.Communicator:
        given.append(stall_seconds)
        return core(*args, stall_seconds=stall_seconds, **rest)

    monkeypatch.setattr(_core, "Communicator", spy)
    run(2, lambda comm: None)
    assert given == [30, 30]


def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_STALL_SECONDS", "soon")
    with pytest.raises(InvalidArgument, match="GRADWIRE_STALL_SECONDS='soon'"):
        run(2, lambda comm: None)
