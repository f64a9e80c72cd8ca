"""A rank that is killed, stopped or gone is named by every other rank, over any links."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest
from gradwire import Communicator, Error, Timeout, TransportError, algorithms
from ranks import Outcome, eventually, outcomes, over_processes, state_of
from stopwatch import Stopwatch

P = 4
HOSTS = [[0, 1], [2, 3]]
SCHEDULES = [*algorithms("all_reduce"), "hierarchical(ring,direct)"]


class Board:
    """Numbers that all ranks see, though they are processes."""

    def __init__(self) -> None:
        self.watch = Stopwatch(P)
        self.pid = RawArray(ctypes.c_int, 1)
        self.ready = RawArray(ctypes.c_int, P)

    def mark(self) -> None:
        """Notes who it is that ends or stops now."""
        self.pid[0] = os.getpid()
        self.watch.start()

    @property
    def age(self) -> float:
        """Seconds since then, of this rank's own."""
        return self.watch.seconds


def in_the_middle(comm: Communicator, begin: Callable[[], Any]) -> None:
    """Returns when this rank has sent something of the call that `begin` starts."""
    before = comm.traffic.frames_sent
    begin()
    eventually(lambda: comm.traffic.frames_sent > before)


def error_of(call: Callable[[], Any]) -> Error:
    """The error that a call ends with, if it has to be made over and over."""
    try:
        while True:
            call()
    except Error as error:
        return error


def die(board: Board) -> None:
    board.mark()
    os.kill(os.getpid(), signal.SIGKILL)


def large() -> np.ndarray:
    return np.ones(8_000_000, np.float32)


def survivors(ended: list[Outcome], victim: int) -> list[tuple[Error, float]]:
    """The error of each, and how many seconds after the fault it was raised."""
    assert [each.died for each in ended] == [rank == victim for rank in range(P)]
    for each in ended:
        assert each.error is None, each.error
    return [each.value for each in ended if not each.died]


def check_killed(ended: list[Outcome], victim: int) -> None:
    for error, seconds in survivors(ended, victim):
        assert isinstance(error, TransportError), error
        assert error.peer == victim, error
        assert f"rank {victim}" in str(error)
        assert seconds < 2


@over_processes
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_a_killed_rank_is_named_by_all_within_two_seconds(algorithm: str, transport: str) -> None:
    board = Board()

    def body(comm: Communicator) -> tuple[Error, float]:
        board.watch.join(comm.rank)
        x = large()
        comm.barrier()
        if comm.rank == 2:
            in_the_middle(comm, lambda: comm.all_reduce(x, algorithm=algorithm, async_op=True))
            die(board)
        return error_of(lambda: comm.all_reduce(x, algorithm=algorithm)), board.age

    check_killed(outcomes(P, body, transport=transport, processes=True, hosts=HOSTS), 2)


def with_rank_3(
    comm: Communicator, halves: Communicator, parities: Communicator
) -> list[Communicator]:
    """The one of a rank's two parts that has rank 3 in it: as its rank 1."""
    return [halves] * (comm.rank >= 2) + [parities] * (comm.rank % 2 == 1)


@over_processes
def test_a_killed_rank_is_named_in_every_communicator(transport: str) -> None:
    """All of them have operations in flight. One that the rank is no member of goes on."""
    board = Board()

    def body(comm: Communicator) -> tuple[Error, float]:
        board.watch.join(comm.rank)
        parts = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        xs = [large() for _ in range(3)]
        doomed = with_rank_3(comm, *parts) if comm.rank != 3 else []
        in_parts = [part.all_reduce(large(), async_op=True) for part in doomed]
        if comm.rank == 3:
            eventually(lambda: sum(board.ready) == P - 1)
            in_the_middle(comm, lambda: [comm.all_reduce(x, async_op=True) for x in xs])
            die(board)
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        board.ready[comm.rank] = 1
        for work in in_parts:
            with pytest.raises(TransportError) as missed:
                work.wait()
            assert missed.value.peer == 1
        for part in parts:
            if part not in doomed:
                assert part.all_reduce(np.ones(1000)).tolist() == [2] * 1000
                part.close()
        errors = [error_of(work.wait) for work in works]
        assert {str(each) for each in errors} == {str(errors[0])}
        return errors[0], board.age

    check_killed(outcomes(P, body, transport=transport, processes=True), 3)


@over_processes
def test_a_rank_killed_while_all_close_is_named_by_close(transport: str) -> None:
    board = Board()

    def body(comm: Communicator) -> tuple[Error, float]:
        board.watch.join(comm.rank)
        comm.barrier()
        x = large()
        if comm.rank == 1:
            eventually(lambda: sum(board.ready) == P - 1)
            in_the_middle(comm, lambda: comm.all_reduce(x, async_op=True))
            die(board)
        for _ in range(20):
            comm.all_reduce(x, async_op=True)
        board.ready[comm.rank] = 1
        with pytest.raises(Error) as caught:
            comm.close()
        return caught.value, board.age

    check_killed(outcomes(P, body, transport=transport, processes=True), 1)


def outlive(
    board: Board, comm: Communicator, timeout: float, call: Callable[..., Any]
) -> tuple[Error, float]:
    """The end of `call` on a rank that is not the stopped one; the last one wakes that."""
    error, seconds = error_of(partial(call, timeout=timeout)), board.age
    assert board.watch.elapsed > timeout / 2
    assert state_of(board.pid[0]) == "T"  # before the last can wake it
    board.ready[comm.rank] = 1
    if sum(board.ready) == P - 1:
        os.kill(board.pid[0], signal.SIGCONT)
    return error, seconds


def stop(board: Board) -> None:
    board.mark()
    os.kill(os.getpid(), signal.SIGSTOP)


def check_stopped(ended: list[Outcome], victim: int, timeout: float) -> None:
    for rank, each in enumerate(ended):
        assert each.error is None, each.error
        error, seconds = each.value
        assert isinstance(error, Timeout), error
        assert error.peer == victim, error
        assert rank == victim or seconds < timeout + 1.5


@over_processes
@pytest.mark.parametrize("algorithm", ["ring", "binary_tree", "double_binary_tree", "star"])
def test_a_stopped_rank_is_named_by_all_at_the_deadline(algorithm: str, transport: str) -> None:
    board = Board()

    def body(comm: Communicator) -> tuple[Error, float]:
        board.watch.join(comm.rank)
        x = large()
        comm.barrier()
        if comm.rank == 1:
            in_the_middle(comm, lambda: comm.all_reduce(x, algorithm=algorithm, async_op=True))
            stop(board)
            return error_of(comm.barrier), 0
        return outlive(board, comm, 1.5, partial(comm.all_reduce, x, algorithm=algorithm))

    check_stopped(outcomes(P, body, transport=transport, processes=True), 1, 1.5)


@over_processes
def test_a_rank_stopped_while_it_waited_is_named(transport: str) -> None:
    """The last that it said is that it waits for rank 0, which comes only then."""
    board = Board()

    def body(comm: Communicator) -> tuple[Error, float]:
        board.watch.join(comm.rank)
        x = large()
        comm.barrier()
        if comm.rank == 1:
            board.mark()
            work = comm.all_reduce(x, algorithm="ring", async_op=True)
            eventually(lambda: board.watch.elapsed > 0.4)  # by now it has said so
            assert not work.done()
            stop(board)
            return error_of(comm.barrier), 0
        if comm.rank == 0:
            eventually(lambda: board.pid[0] and state_of(board.pid[0]) == "T")
        return outlive(board, comm, 2, partial(comm.all_reduce, x, algorithm="ring"))

    check_stopped(outcomes(P, body, transport=transport, processes=True), 1, 2)


@over_processes
def test_a_rank_stopped_while_it_received_is_named(transport: str) -> None:
    """The last that it said is that it waits for a message of rank 2."""
    board = Board()

    def body(comm: Communicator) -> tuple[Error, float]:
        board.watch.join(comm.rank)
        comm.barrier()
        if comm.rank == 1:
            board.mark()
            work = comm.recv(np.empty(4), 2, async_op=True)
            eventually(lambda: board.watch.elapsed > 0.4)  # by now it has said so
            assert not work.done()
            stop(board)
            return error_of(comm.barrier), 0
        eventually(lambda: board.pid[0] and state_of(board.pid[0]) == "T")
        if comm.rank == 2:
            comm.send(np.zeros(4), 1)
        return outlive(board, comm, 2, partial(comm.recv, np.empty(4), 1))

    check_stopped(outcomes(P, body, transport=transport, processes=True), 1, 2)


@over_processes
def test_a_rank_that_left_in_peace_is_neither(transport: str) -> None:
    def body(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank != 2:
            comm.all_reduce(np.ones(5), algorithm="ring")

    ended = outcomes(P, body, transport=transport, processes=True)
    assert ended[2].error is None
    for rank in (0, 1, 3):
        error = ended[rank].error
        assert isinstance(error, TransportError)
        assert error.peer == 2
        assert "rank 2 closed its communicator, or ended its program, after 1 call" in str(error)
        assert "in call 1, all_reduce(float64[5]" in str(error)
