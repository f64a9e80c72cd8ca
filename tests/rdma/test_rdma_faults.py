"""Who is killed, stopped or aborts while ranks wait for RDMA is named, and others can be made.

The tests of faults in tests/python go over a device too, where there is one (`ranks.py`). Here
ranks meet as users' do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
from device import PATIENCE, TRANSPORT, local_store, on_a_device, started
from gradwire import Aborted, Communicator, Error, Timeout, TransportError
from ranks import state_of

pytestmark = on_a_device

P = 3
VICTIM = 1
SOON = 5.0  # seconds, under emulation
Call = Callable[[Communicator], Any]


def sums(comm: Communicator) -> None:
    """Without end."""
    x = np.ones(200_000, np.float32)
    while True:
        comm.all_reduce(x, algorithm="ring", timeout=SOON)


def error_of(comm: Communicator, call: Call) -> Error:
    """What a call ends with, and every later one."""
    assert set(comm.transports.values()) == {TRANSPORT}
    with pytest.raises(Error) as first:
        call(comm)
    with pytest.raises(type(first.value)) as second:
        comm.barrier()
    assert str(second.value) == str(first.value)
    assert comm.closed
    return first.value


def meet_anew(store: str, rank: int, size: int) -> float:
    """In this process, whose first communicator is dead."""
    with gradwire.init(
        rank=rank,
        ranks=size,
        store=store,
        transports=[TRANSPORT],
        secret="0123456789abcdef",
        timeout=PATIENCE,
    ) as comm:
        return float(comm.all_reduce(np.ones(50_000, np.float32))[-1])


def survivor(again: str) -> Call:
    """A body: how its calls ended, and what a new communicator of the two others computes."""

    def body(comm: Communicator) -> tuple[Error, float]:
        error = error_of(comm, sums)
        return error, meet_anew(again, min(comm.rank, 1), P - 1)

    return body


def kill_myself(comm: Communicator) -> None:
    """After a moment, from a thread, in the midst of sums."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    sums(comm)


def test_all_others_name_a_killed_rank_and_meet_anew() -> None:
    again = local_store()
    bodies = dict.fromkeys(range(P), survivor(again)) | {VICTIM: kill_myself}
    with started(bodies, P, local_store(), transports=[TRANSPORT]) as ranks:
        ended = {rank: each.outcome() for rank, each in ranks.items()}
    assert ended.pop(VICTIM).died
    for each in ended.values():
        assert each.error is None, each.error
        error, total = each.value
        assert isinstance(error, TransportError), error
        assert error.peer == VICTIM, error
        assert f"rank {VICTIM}" in str(error)
        assert total == P - 1


def test_survivors_of_a_killed_rank_go_on_over_the_device() -> None:
    def body(comm: Communicator) -> tuple[set[str], float]:
        with pytest.raises(TransportError):
            sums(comm)
        with comm.shrink(PATIENCE) as fewer:
            total = float(fewer.all_reduce(np.ones(50_000, np.float32))[-1])
            return set(fewer.transports.values()), total

    bodies = dict.fromkeys(range(P), body) | {VICTIM: kill_myself}
    with started(bodies, P, local_store(), transports=[TRANSPORT]) as ranks:
        ended = {rank: each.outcome() for rank, each in ranks.items()}
    assert ended.pop(VICTIM).died
    assert [each.error or each.value for each in ended.values()] == [({TRANSPORT}, P - 1.0)] * 2


def stop_myself(comm: Communicator) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    sums(comm)


def test_all_others_name_a_stopped_rank() -> None:
    again = local_store()
    bodies = dict.fromkeys(range(P), survivor(again)) | {VICTIM: stop_myself}
    with started(bodies, P, local_store(), transports=[TRANSPORT]) as ranks:
        others = [each.outcome() for rank, each in ranks.items() if rank != VICTIM]
        assert state_of(ranks[VICTIM].pid) == "T"
    for each in others:
        assert each.error is None, each.error
        error, total = each.value
        assert isinstance(error, Timeout), error
        assert error.peer == VICTIM, error
        assert total == P - 1


BLOCKED: dict[str, Call] = {
    "a receive": lambda comm: comm.recv(np.empty(10), (comm.rank + 1) % P),
    "a sum that one rank does not join": lambda comm: comm.all_reduce(np.ones(10)),
    "sums": sums,
}


@pytest.mark.parametrize("blocked", BLOCKED)
def test_abort_wakes_ranks_that_wait(blocked: str) -> None:
    def body(comm: Communicator) -> tuple[Error, float]:
        comm.barrier()
        if comm.rank == VICTIM:
            time.sleep(0.5)
            comm.abort("enough")
            return error_of(comm, lambda comm: comm.barrier()), time.monotonic()
        error = error_of(comm, BLOCKED[blocked])
        return error, time.monotonic()

    def victims_call(comm: Communicator) -> tuple[Error, float]:
        """`sums` needs all ranks, until one of them aborts from another thread."""
        comm.barrier()
        threading.Timer(0.5, comm.abort, ("enough",)).start()
        return error_of(comm, sums), time.monotonic()

    bodies = dict.fromkeys(range(P), body)
    if blocked == "sums":
        bodies[VICTIM] = victims_call
    with started(bodies, P, local_store(), transports=[TRANSPORT]) as ranks:
        ended = [each.outcome() for each in ranks.values()]
    for each in ended:
        assert each.error is None, each.error
        assert isinstance(each.value[0], Aborted)
        assert f"rank {VICTIM}: enough" in str(each.value[0])
    times = [each.value[1] for each in ended]
    assert max(times) - min(times) < SOON / 2


def test_spawn_works_after_a_rank_was_killed() -> None:
    def body(comm: Communicator, dies: bool) -> float:
        if dies and comm.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(comm.all_reduce(np.ones(50_000, np.float32))[-1])

    how = {"transports": [TRANSPORT], "timeout": PATIENCE}
    with pytest.raises(Error, match=f"rank {VICTIM} of {P} was killed by SIGKILL"):
        gradwire.spawn(body, P, args=(True,), **how)
    assert gradwire.spawn(body, P, args=(False,), **how) == [P] * P
