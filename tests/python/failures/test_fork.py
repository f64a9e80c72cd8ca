"""Processes that are forked after init(), as a DataLoader's workers are, never disturb the rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from gradwire import Communicator
from ranks import on_ranks

_context = multiprocessing.get_context("fork")


def exit_at_once() -> None:
    os._exit(0)


def exit_as_python_does() -> None:
    """Exits with everything that runs at the interpreter's end."""
    sys.exit(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("end", [exit_at_once, exit_as_python_does, be_killed])
@on_ranks(2, processes=True)
def test_a_forked_child_ends_unnoticed(
    comm: Communicator, end: Callable[[], None], transport: str
) -> None:
    """While operations are in flight, and more than one at a time."""
    for turn in range(3):
        x = np.full(500_000, float(comm.rank), np.float32)
        works = [comm.all_reduce(x, async_op=True) for _ in range(4)]
        children = [_context.Process(target=end) for _ in range(3)]
        for child in children:
            child.start()
        for work in works:
            work.wait()
        assert (x == 2.0**3).all(), turn
        for child in children:
            child.join(20)
            assert child.exitcode == (-signal.SIGKILL if end is be_killed else 0)
    assert comm.all_reduce(np.ones(3)).tolist() == [2] * 3


@on_ranks(2, transport="shm", processes=True)
def test_children_forked_while_another_thread_is_in_a_call(comm: Communicator) -> None:
    """A lock that the other thread holds at the fork stays locked in the child for ever."""
    forked = threading.Event()

    def reduce() -> None:
        while not comm.all_reduce(np.array([forked.is_set()], np.uint8), op="min")[0]:
            continue

    thread = threading.Thread(target=reduce)
    thread.start()
    for _ in range(10):
        child = _context.Process(target=exit_as_python_does)
        child.start()
        child.join(20)
        assert child.exitcode == 0, "it hangs, or it crashed"
    forked.set()
    thread.join()
