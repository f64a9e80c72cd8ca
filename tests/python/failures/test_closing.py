"""close: from several threads at once, and when it is interrupted while work is in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
from gradwire import Aborted, Communicator, TransportError
from ranks import LIMIT, eventually, outcomes, over_processes


@over_processes
def test_threads_that_close_together_all_return(transport: str) -> None:
    """While the progress thread, which one of them joins, has work."""

    def body(comm: Communicator) -> float:
        x = np.ones(4, np.float32)
        work = comm.all_reduce(x, async_op=True) if comm.rank == 0 else None
        closers = [threading.Thread(target=comm.close, daemon=True) for _ in range(4)]
        if comm.rank == 1:
            comm.all_reduce(x)
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(20)
            assert not closer.is_alive()
        assert comm.closed
        assert work is None or work.done()
        return float(x.sum())

    for each in outcomes(2, body, transport=transport, processes=True):
        assert each.error is None, each.error
        assert each.value == 8


@over_processes
def test_the_others_go_on_without_one_who_said_goodbye(transport: str) -> None:
    left = multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> float:
        comm.barrier()
        if comm.rank == 2:
            comm.close()
            left.set()
            return 0
        assert left.wait(60)
        x = np.full(100_000, float(comm.rank))
        for _ in range(3):
            work = comm.send(x, 1 - comm.rank, async_op=True)
            comm.recv(got := np.empty_like(x), 1 - comm.rank)
            work.wait()
        assert not comm.closed
        return float(got[-1])

    ended = outcomes(3, body, transport=transport, processes=True)
    assert [each.error for each in ended] == [None] * 3
    assert [each.value for each in ended] == [1, 0, 0]


@over_processes
def test_ctrl_c_ends_a_close_that_waits_for_work(transport: str) -> None:
    def body(comm: Communicator) -> float:
        if comm.rank == 1:
            with pytest.raises((Aborted, TransportError), match="rank 0"):
                comm.recv(np.empty(1), 0)
            return 0
        comm.all_reduce(np.ones(4), async_op=True)
        rang = []

        def interrupt() -> None:
            rang.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.3, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            comm.close(60)
        assert comm.closed
        return time.monotonic() - rang[0]

    for each in outcomes(2, body, transport=transport, processes=True):
        assert each.error is None, each.error
        assert each.value < 5  # 0.1 s on a quiet machine


@over_processes
def test_an_abort_of_one_who_said_goodbye_is_not_heard(transport: str) -> None:
    """Rank 0 only waits to hear that rank 1 has made the same call."""
    aborted = multiprocessing.get_context("fork").Event()

    def body(comm: Communicator) -> float:
        x = np.full(4, float(comm.rank + 1))
        if comm.rank == 1:
            assert aborted.wait(LIMIT)
            comm.broadcast(x)
            return float(x.sum())
        comm.broadcast(x)
        closer = threading.Thread(target=comm.close)
        closer.start()
        eventually(lambda: comm.closed)
        comm.abort("too late")
        closer.join(LIMIT)
        aborted.set()
        return float(x.sum())

    ended = outcomes(2, body, transport=transport, processes=True, timeout=LIMIT)
    assert [each.error for each in ended] == [None, None]
    assert [each.value for each in ended] == [4, 4]
