"""The floor: whatever a rank does or fails to do, every other rank is told who and why."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest
from gradwire import (
    Aborted,
    Communicator,
    Error,
    InvalidArgument,
    Schedule,
    Timeout,
    TransportError,
    algorithms,
)
from ranks import Outcome, eventually, on_ranks, outcomes, over_all, over_processes, vanish
from stopwatch import own_time

Call = Callable[[Communicator], Any]


def survivors(ended: list[Outcome]) -> list[BaseException]:
    return [each.error for each in ended if not each.died]


@over_processes
@pytest.mark.parametrize("algorithm", ["ring", "star", "recursive_doubling"])
def test_all_others_name_a_rank_that_vanished(algorithm: str, transport: str) -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(100_000, np.float32)
        comm.all_reduce(x, algorithm=algorithm)
        if comm.rank == 2:
            vanish(comm)
        while True:
            comm.all_reduce(x, algorithm=algorithm)

    errors = survivors(outcomes(4, body, transport=transport, processes=True))
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, TransportError)
        assert error.peer == 2, error


@pytest.mark.parametrize("algorithm", [*algorithms(), "auto"])
def test_all_others_name_a_rank_that_is_late(algorithm: str) -> None:
    late = threading.Barrier(4)

    def body(comm: Communicator) -> None:
        comm.barrier()
        try:
            if comm.rank != 1:
                comm.all_reduce(np.ones(1000), algorithm=algorithm, timeout=0.5)
        finally:
            late.wait(30)

    ended = outcomes(4, body)
    for rank in (0, 2, 3):
        error = ended[rank].error
        assert isinstance(error, Timeout)
        assert isinstance(error, TimeoutError)
        assert error.peer == 1, error
        assert "rank 1" in str(error)


def test_a_rank_that_closed_is_named() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    ended = outcomes(3, body)
    for rank in (0, 2):
        assert isinstance(ended[rank].error, TransportError)
        assert ended[rank].error.peer == 1
        assert "closed" in str(ended[rank].error)


def next_to(comm: Communicator) -> int:
    return (comm.rank + 1) % comm.size


BLOCKED: dict[str, Call] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(10)),
    "recv": lambda comm: comm.recv(np.ones(10), next_to(comm)),
    "recv from any": lambda comm: comm.recv(np.ones(10)),
    "wait": lambda comm: comm.all_reduce(np.ones(10), async_op=True).wait(),
    "send": lambda comm: comm.send(np.ones(10_000_000), next_to(comm)),
    "split": lambda comm: comm.split(0),
}


@pytest.mark.parametrize("blocked", BLOCKED)
def test_abort_from_another_thread_wakes_every_rank(blocked: str) -> None:
    """Ranks 1 and 2 wait for each other; rank 0 aborts while its first thread is blocked."""
    waiting = threading.Barrier(2)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            threading.Thread(target=lambda: (waiting.wait(30), comm.abort("enough"))).start()
            waiting.wait(30)
            BLOCKED[blocked](comm)
        else:
            comm.recv(np.empty(1), 3 - comm.rank)

    began = own_time()
    for each in outcomes(3, body):
        assert isinstance(each.error, Aborted)
        assert "rank 0: enough" in str(each.error)
    assert own_time() - began < 5


@over_all
def test_an_error_in_a_with_block_aborts_the_others(transport: str) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            raise KeyError("lost")
        comm.barrier()

    ended = outcomes(3, body, transport=transport)
    assert isinstance(ended[0].error, KeyError)
    for each in ended[1:]:
        assert isinstance(each.error, Aborted)
        assert "rank 0: left its with block with KeyError: 'lost'" in str(each.error)


MISMATCHES: dict[str, tuple[Call, Call]] = {
    "lengths": (
        lambda comm: comm.all_reduce(np.ones(10)),
        lambda comm: comm.all_reduce(np.ones(11)),
    ),
    "ops": (
        lambda comm: comm.all_reduce(np.ones(10)),
        lambda comm: comm.all_reduce(np.ones(10), op="max"),
    ),
    "dtypes": (
        lambda comm: comm.all_reduce(np.ones(10, np.int64)),
        lambda comm: comm.all_reduce(np.ones(10)),
    ),
    "roots": (
        lambda comm: comm.broadcast(np.ones(10), root=0),
        lambda comm: comm.broadcast(np.ones(10), root=1),
    ),
    "collectives": (
        lambda comm: comm.all_reduce(np.ones(10), algorithm="ring"),
        lambda comm: comm.broadcast(np.ones(10), algorithm="star"),
    ),
    "algorithms": (
        lambda comm: comm.all_reduce(np.ones(10), algorithm="ring"),
        lambda comm: comm.all_reduce(np.ones(10), algorithm="direct"),
    ),
    "codecs": (
        lambda comm: comm.all_reduce(np.ones(10, np.float32), codec="fp16", algorithm="ring"),
        lambda comm: comm.all_reduce(np.ones(10, np.float32), codec="bf16", algorithm="ring"),
    ),
    "cuts": (
        lambda comm: comm.all_reduce([np.ones(4), np.ones(6)]),
        lambda comm: comm.all_reduce([np.ones(6), np.ones(4)]),
    ),
    "schedules": (
        lambda comm: comm.all_reduce(np.ones(10), schedule=Schedule.generate("ring", comm.size)),
        lambda comm: comm.all_reduce(np.ones(10), schedule=Schedule.generate("star", comm.size)),
    ),
    "orders": (
        lambda comm: (comm.all_reduce(np.ones(3)), comm.broadcast(np.ones(4))),
        lambda comm: (comm.broadcast(np.ones(4)), comm.all_reduce(np.ones(3))),
    ),
}
SHOWN = {  # of what rank 0 and rank 1 passed
    "lengths": ("float64[10]", "float64[11]"),
    "ops": ("op=sum", "op=max"),
    "dtypes": ("int64[10]", "float64[10]"),
    "roots": ("root=0", "root=1"),
    "collectives": ("called all_reduce(", "called broadcast("),
    "algorithms": ("algorithm=ring", "algorithm=direct"),
    "codecs": ("codec=fp16", "codec=bf16"),
    "cuts": ("float64[4, 6]", "float64[6, 4]"),
    "schedules": ("algorithm=ring #", "algorithm=star #"),
    "orders": ("called all_reduce(float64[3]", "called broadcast(float64[4]"),
}


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("what", MISMATCHES)
def test_calls_that_differ_raise_on_all_ranks_what_each_passed(what: str, p: int) -> None:
    def body(comm: Communicator) -> None:
        MISMATCHES[what][comm.rank == 1](comm)
        comm.barrier()  # a root may have sent before it hears of it

    errors = [each.error for each in outcomes(p, body, timeout=5)]
    for error in errors:
        assert isinstance(error, InvalidArgument), error
        assert str(error) == str(errors[0])
    sides = str(errors[0]).split("; ")
    assert sides[0].startswith("ranks disagree in call 0: rank")
    assert SHOWN[what][0] in sides[0]
    assert sides[1].startswith("rank 1 called")
    assert SHOWN[what][1] in sides[1]


@over_processes
def test_ranks_that_would_never_exchange_data_are_told(transport: str) -> None:
    """Both are roots, and neither waits for anybody."""

    def body(comm: Communicator) -> None:
        while True:
            comm.broadcast(np.ones(3), root=comm.rank)

    for each in outcomes(2, body, transport=transport, processes=True):
        assert isinstance(each.error, InvalidArgument)
        assert "root=0" in str(each.error)
        assert "root=1" in str(each.error)


@over_processes
def test_ranks_that_differed_are_told_when_they_close(transport: str) -> None:
    called = RawArray(ctypes.c_int, 3)

    def body(comm: Communicator) -> None:
        try:
            comm.broadcast(np.ones(3), root=comm.rank)
        finally:
            called[comm.rank] = 1  # who comes last may be told before
        eventually(lambda: sum(called) == 3)

    for each in outcomes(3, body, transport=transport, processes=True):
        assert isinstance(each.error, InvalidArgument)
        for root in range(3):
            assert f"rank {root} called broadcast(float64[3], root={root}" in str(each.error)


@on_ranks(2)
def test_a_failure_is_final(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument) as first:
        comm.all_reduce(np.ones(1 + comm.rank))
    assert comm.closed
    assert repr(comm).endswith("closed>")
    for call in BLOCKED.values():
        with pytest.raises(InvalidArgument) as later:
            call(comm)
        assert str(later.value) == str(first.value)
    comm.abort("too late to matter")
    comm.close()


@on_ranks(2)
def test_what_is_refused_before_it_is_sent_is_not_final(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument):
        comm.all_reduce(np.ones(3), op="median")
    assert comm.all_reduce(np.ones(3)).tolist() == [2] * 3


@on_ranks(2, transport="shm", processes=True)
def test_a_fork_holds_a_shell(comm: Communicator) -> None:
    """Calls in the fork say so, and its end does nothing to the parent's communicator."""
    child = os.fork()
    if child == 0:
        os._exit(_use_in_child(comm))
    assert os.waitpid(child, 0)[1] == 0
    assert comm.all_reduce(np.ones(3)).tolist() == [2] * 3


def test_a_rank_is_missed_though_a_child_of_its_lives() -> None:
    """A DataLoader's workers may live on for a while when their trainer is killed."""
    reader, writer = os.pipe()

    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            if os.fork() == 0:
                os.read(reader, 1)  # until rank 0 has given up
                os._exit(0)
            vanish(comm)
        try:
            comm.all_reduce(np.ones(3), timeout=20)
        finally:
            os.write(writer, b".")

    missed = outcomes(2, body, transport="shm", processes=True)[0].error
    os.close(reader)
    os.close(writer)
    assert isinstance(missed, TransportError)
    assert missed.peer == 1


def _use_in_child(comm: Communicator) -> int:
    try:
        for call in (*BLOCKED.values(), lambda comm: comm.abort(), lambda comm: comm.traffic):
            with pytest.raises(Aborted, match="fork"):
                call(comm)
        assert comm.closed
        comm.close()
        del comm
    except BaseException:
        return 1
    return 0


def test_peers_of_a_failed_rank_get_errors_of_this_tree() -> None:
    for kind in (TransportError, Timeout, Aborted, InvalidArgument):
        assert issubclass(kind, Error)
