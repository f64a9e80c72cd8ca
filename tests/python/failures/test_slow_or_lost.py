"""A rank that is late is told apart: one that is slow answers, and one that is stopped does not."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from typing import Any

import numpy as np
import pytest
from gradwire import Communicator, Timeout
from ranks import eventually, on_ranks, over_processes, run, state_of

SHARED: Any = multiprocessing.get_context("fork")


class Board:
    """What the ranks share: the process of rank 1, and whether rank 0 has given up."""

    def __init__(self) -> None:
        self.pid, self.over = SHARED.Value("i", 0), SHARED.Value("b", False)

    @property
    def is_stopped(self) -> bool:
        return bool(self.pid.value) and state_of(self.pid.value) == "T"


def hide() -> None:
    """Takes away this rank's status page, as if it were on another host."""
    for each in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{each}"
        if os.path.islink(path) and "memfd:gradwire-status" in os.readlink(path):
            os.dup2(os.open(os.devnull, os.O_RDONLY), int(each))


def late(comm: Communicator, board: Board, stops: bool, here: bool) -> str:
    """The text of rank 0's Timeout, for which rank 1 makes no call after the first."""
    if not here:
        hide()
    comm.all_reduce(np.ones(3), async_op=True).wait()
    comm.all_reduce(np.ones(3), async_op=True).wait()
    if comm.rank == 1:
        board.pid.value = os.getpid()
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        eventually(lambda: board.over.value)
        with pytest.raises(Timeout):
            comm.barrier()
        return ""
    eventually(lambda: board.is_stopped if stops else board.pid.value)
    try:
        with pytest.raises(Timeout) as raised:
            comm.all_reduce(np.ones(3), timeout=1.5)
    finally:
        board.over.value = True
        os.kill(board.pid.value, signal.SIGCONT)
    assert raised.value.peer == 1
    return str(raised.value)


TEXTS = {
    ("slow", "here"): r"It is alive: rank 1 \(process \d+\) has been outside gradwire for .* s; "
    r"its last call was 1\. Did it make the same call\? A longer timeout= waits",
    ("slow", "there"): r"It is alive: rank 1 was last heard of outside gradwire, having begun 2 ",
    ("stopped", "here"): r"It has not been heard of for (\S+) s, though its connection is open: "
    r"rank 1 \(process (\d+)\) is stopped \(kill -CONT \2 lets it go on\)",
    ("stopped", "there"): r"It has not been heard of for (\S+) s, though its connection is open: "
    r"rank 1 is stopped, or hangs, or makes no call here",
}


@over_processes
@pytest.mark.parametrize(("how", "where"), TEXTS)
def test_a_timeout_says_whether_the_rank_is_alive(how: str, where: str, transport: str) -> None:
    options = how == "stopped", where == "here"
    text, _ = run(2, late, Board(), *options, transport=transport, processes=True)
    assert "timed out after its timeout=1.5 s; it waits for rank 1 in round" in text
    found = re.search(TEXTS[how, where], text)
    assert found, text
    if how == "stopped":
        assert float(found[1]) >= 1.4


@on_ranks(2, transport="shm", processes=True)
def test_a_message_that_nobody_sends_is_told_apart_too(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3), async_op=True).wait()
    if comm.rank == 1:
        with pytest.raises(Timeout):
            comm.recv(np.empty(3), 0, timeout=60)
        return
    with pytest.raises(Timeout, match=r"within its timeout=0\.5 s") as raised:
        comm.recv(np.empty(3), 1, timeout=0.5)
    assert "It is alive: rank 1 (process" in str(raised.value)


def wait_patiently(comm: Communicator, board: Board, stops: bool) -> str | list[float]:
    """Rank 0's result, or its Timeout; rank 1 is slow for several timeouts, or stopped."""
    comm.all_reduce(np.ones(3), async_op=True).wait()
    comm._core.set_patience(300)
    if comm.rank == 1:
        board.pid.value = os.getpid()
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(Timeout):
                comm.barrier()
            return ""
        eventually(lambda: board.over.value)
    if comm.rank == 0:
        eventually(lambda: board.is_stopped if stops else board.pid.value)
    work = comm.all_reduce(np.ones(3), async_op=True, timeout=1.0)
    if comm.rank == 0 and not stops:
        with pytest.raises(Timeout, match="which goes on"):
            work.wait(timeout=3.5)
        board.over.value = True
    try:
        return [float(each) for each in work.wait()]
    except Timeout as error:
        return str(error)
    finally:
        if stops:
            os.kill(board.pid.value, signal.SIGCONT)


@over_processes
def test_patience_waits_for_a_rank_that_is_slow(transport: str) -> None:
    found = run(2, wait_patiently, Board(), False, transport=transport, processes=True)
    assert found == [[2.0] * 3] * 2


@over_processes
def test_patience_ends_for_a_rank_that_is_stopped(transport: str) -> None:
    text, _ = run(2, wait_patiently, Board(), True, transport=transport, processes=True)
    assert "timed out after its timeout=1 s" in text
    assert "is stopped (kill -CONT" in text


@on_ranks(2, transport="shm", processes=True)
def test_patience_has_an_end(comm: Communicator) -> None:
    comm.all_reduce(np.ones(3), async_op=True).wait()
    comm._core.set_patience(1.5)
    if comm.rank == 1:
        with pytest.raises(Timeout):
            comm.recv(np.empty(3), 0, timeout=60)
        return
    with pytest.raises(Timeout) as raised:
        comm.all_reduce(np.ones(3), timeout=0.5)
    assert "timed out after its patience=1.5 s" in str(raised.value)
