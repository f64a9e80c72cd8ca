"""Work: operations in the background, whose memory stays as long as they need it."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from gradwire import Aborted, Communicator, InvalidArgument, Timeout, Work
from gradwire._bootstrap.mesh import inproc_meshes
from gradwire._communicator import from_mesh
from ranks import eventually, on_ranks, outcomes, run


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@on_ranks(3)
def test_many_in_flight_finish_in_any_order_of_waiting(comm: Communicator, transport: str) -> None:
    xs = [np.full(1 + 10_000 * i, i + comm.rank, np.float32) for i in range(8)]
    works = [comm.all_reduce(x, async_op=True) for x in xs]
    for i in (7, 0, 3, 1, 2, 6, 5, 4):
        assert works[i].wait() is xs[i]
        np.testing.assert_array_equal(xs[i], 3 * i + 3)
        assert works[i].done()


@on_ranks(2)
def test_wait_returns_what_the_call_would(comm: Communicator) -> None:
    x = torch.tensor([float(comm.rank)])
    works: dict[str, Work] = {
        "all_gather": comm.all_gather(x, async_op=True),
        "reduce_scatter": comm.reduce_scatter(torch.ones(2, 3), async_op=True),
        "reduce": comm.reduce(x.clone(), root=1, async_op=True),
        "gather": comm.gather(x, async_op=True),
        "barrier": comm.barrier(async_op=True),
        "all_to_all": comm.all_to_all(torch.arange(2) + 2 * comm.rank, async_op=True),
        "broadcast": comm.broadcast(x.clone(), root=1, async_op=True),
    }
    found = {name: work.wait() for name, work in works.items()}
    assert found["all_gather"].tolist() == [0, 1]
    assert found["reduce_scatter"].tolist() == [[2, 2, 2]]
    assert (found["reduce"] is None) == (comm.rank == 0)
    assert (found["gather"] is None) == (comm.rank == 1)
    assert found["barrier"] is None
    assert found["all_to_all"].tolist() == [comm.rank, 2 + comm.rank]
    assert found["broadcast"].tolist() == [1]


@on_ranks(3)
def test_blocking_calls_come_after_what_is_in_flight(comm: Communicator) -> None:
    x = np.ones(200_000, np.float32)
    comm.all_reduce(x, async_op=True)
    comm.all_reduce(x)
    assert (x == 9).all()


def test_arrays_live_until_the_work_is_over() -> None:
    go = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert go.wait(30)
            comm.all_reduce(np.ones(1000, np.float32))
        else:
            x = np.ones(1000, np.float32)
            alive = weakref.ref(x)
            work = comm.all_reduce(x, async_op=True)
            del x, work
            gc.collect()
            assert alive() is not None
            go.set()
        comm.barrier()
        comm.barrier(async_op=True).wait()  # a later call lets go
        if comm.rank == 0:
            gc.collect()
            assert alive() is None

    run(2, body)


def test_a_wait_that_times_out_leaves_the_operation() -> None:
    go = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            assert go.wait(30)
            comm.all_reduce(np.ones(4))
            return
        work = comm.all_reduce(np.ones(4), async_op=True)
        with pytest.raises(Timeout, match="wait"):
            work.wait(timeout=0.01)
        assert not work.done()
        assert "in flight" in repr(work)
        go.set()
        assert work.wait(timeout=30).tolist() == [2] * 4
        assert "done" in repr(work)

    run(2, body)


@on_ranks(2)
def test_several_threads_may_wait_and_call(comm: Communicator) -> None:
    works = [comm.all_reduce(np.full(5000, i), async_op=True) for i in range(6)]
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda w=w: seen.append(w.wait()[0])) for w in works]
    for thread in threads:
        thread.start()
    assert comm.all_reduce(np.ones(3)).tolist() == [2] * 3
    for thread in threads:
        thread.join()
    assert sorted(seen) == [2 * i for i in range(6)]


@on_ranks(3)
def test_close_finishes_what_is_in_flight(comm: Communicator) -> None:
    xs = [np.ones(100_000, np.float32) for _ in range(4)]
    works = [comm.all_reduce(x, async_op=True) for x in xs]
    comm.close()
    assert all(work.done() for work in works)
    assert all((x == 3).all() for x in xs)
    with pytest.raises(Aborted, match="closed"):
        comm.all_reduce(xs[0])


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_dropped_communicator_ends_its_work(is_under_way: bool) -> None:
    """The work never writes to memory that went with it, however far it has come."""
    one, other = inproc_meshes(2)
    made: list[Communicator] = []
    thread = threading.Thread(target=lambda: made.append(from_mesh(other, timeout=30)))
    thread.start()
    comm = from_mesh(one, timeout=30)
    thread.join()
    comm.all_reduce(np.ones(100_000), async_op=True)
    if is_under_way:
        eventually(lambda sender=comm: sender.traffic.frames_sent > 0)
    del comm
    gc.collect()
    with pytest.raises(Aborted, match="rank 0"):
        made[0].all_reduce(np.ones(100_000))


def test_a_communicator_dropped_in_peace_is_no_failure() -> None:
    """Slower ranks may still be in the operation that the dropped one has finished."""

    def body(comm: Communicator) -> float:
        return comm.split(0).all_reduce(np.ones(50_000))[0]

    for _ in range(20):
        assert run(3, body) == [3.0] * 3


def test_ctrl_c_ends_a_blocked_call_on_all_ranks() -> None:
    """Rank 0 is this, the main thread."""
    one, other = inproc_meshes(2)
    main = threading.main_thread().ident
    caught: list[BaseException] = []

    def rank_1() -> None:
        comm = from_mesh(other, timeout=30)
        comm.recv(np.empty(1), 0)
        signal.pthread_kill(main, signal.SIGINT)
        try:
            comm.barrier(timeout=20)
            comm.barrier(timeout=20)
        except Aborted as error:
            caught.append(error)

    thread = threading.Thread(target=rank_1)
    thread.start()
    comm = from_mesh(one, timeout=30)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  the signal may come before recv()
        comm.send(np.zeros(1), 1)
        comm.recv(np.empty(1), 1)
    comm.abort("interrupted")
    thread.join()
    assert isinstance(caught[0], Aborted)
    with pytest.raises(Aborted):
        comm.barrier()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
@on_ranks(1)
def test_a_timeout_is_a_positive_number(comm: Communicator, timeout: float) -> None:
    for call in (comm.barrier, comm.close, comm.barrier(async_op=True).wait):
        with pytest.raises(InvalidArgument, match="timeout"):
            call(timeout=timeout)


def test_the_error_of_an_operation_is_raised_by_wait() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3 + comm.rank), async_op=True).wait()

    for each in outcomes(2, body):
        assert isinstance(each.error, InvalidArgument)
