"""`gradwire.spawn`: results in rank order, and the root cause of a failure."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.context import ForkProcess
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import _spawn, spawn
from gradwire._bootstrap.acceptor import Acceptor
from gradwire._spawn import SpawnedTraceback
from ranks import LIMIT

Comm = gradwire.Communicator


@pytest.fixture(params=[False, True], ids=["processes", "threads"])
def threads(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def sum_of_ranks(comm: Comm, scale: float) -> tuple[int, int, float]:
    x = np.full(1000, comm.rank * scale, np.float32)
    comm.all_reduce(x)
    return comm.rank, comm.size, float(x[-1])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_results_come_in_rank_order(threads: bool, size: int) -> None:
    total = 2.0 * sum(range(size))
    expected = [(rank, size, total) for rank in range(size)]
    assert spawn(sum_of_ranks, size, args=(2.0,), threads=threads) == expected


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_processes_use_the_given_transports(transport: str) -> None:
    def links(comm: Comm) -> set[str]:
        comm.barrier()
        return set(comm.transports.values())

    assert spawn(links, 3, transports=[transport]) == [{transport}] * 3


def test_threads_use_inproc_and_take_no_transports() -> None:
    assert spawn(lambda comm: comm.transports, 2, threads=True) == [{1: "inproc"}, {0: "inproc"}]
    with pytest.raises(gradwire.InvalidArgument, match="transports="):
        spawn(print, 2, threads=True, transports=["tcp"])


def test_any_function_will_do_and_sees_what_is_around_it(threads: bool) -> None:
    around = np.arange(3)
    results = spawn(lambda comm: around * comm.rank, 3, threads=threads)
    assert [list(each) for each in results] == [[0, 0, 0], [0, 1, 2], [0, 2, 4]]


def test_ranks_are_processes_or_threads_of_this_one(threads: bool) -> None:
    pids = set(spawn(lambda comm: os.getpid(), 2, threads=threads))
    assert pids == {os.getpid()} if threads else len(pids - {os.getpid()}) == 2


class EndsAFork:
    """Garbage that only the collector finds; a fork that collects it ends at once."""

    def __init__(self) -> None:
        self.cycle, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(3)


def test_ranks_do_not_collect_what_their_parent_left() -> None:
    gc.disable()
    try:
        EndsAFork()
        assert spawn(lambda comm: gc.collect() >= 0, 2) == [True, True]
        assert spawn(lambda comm: gc.isenabled(), 1) == [False]
    finally:
        gc.enable()
        gc.collect()


def test_a_fork_collects_nothing_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = ForkProcess._bootstrap  # type: ignore[attr-defined]

    def begin_by_collecting(process: ForkProcess, **keywords: object) -> object:
        if gc.isenabled():
            gc.collect()
        return begin(process, **keywords)

    monkeypatch.setattr(ForkProcess, "_bootstrap", begin_by_collecting)
    thresholds = gc.get_threshold()
    gc.set_threshold(10**9)  # on, but the parent leaves its garbage
    try:
        EndsAFork()
        assert spawn(lambda comm: gc.isenabled(), 2) == [True, True]
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()


def test_ranks_can_split_into_groups_of_different_sizes(threads: bool) -> None:
    def split(comm: Comm) -> tuple[list[int], int]:
        part = comm.split(int(comm.rank >= 3))
        assert part is not None
        ranks = part.all_gather(np.array([comm.rank]))
        total = comm.all_reduce(np.array([comm.rank]))
        part.close()
        return ranks.tolist(), int(total[0])

    expected = [([0, 1, 2], 10)] * 3 + [([3, 4], 10)] * 2
    assert spawn(split, 5, threads=threads) == expected


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "another thread"])
def test_results_come_where_sigchld_is_ignored(thread: bool) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with ThreadPoolExecutor(1) as pool:
            here = partial(spawn, lambda comm: comm.rank, 2)
            assert (pool.submit(here).result() if thread else here()) == [0, 1]
            with pytest.raises(gradwire.Error, match="rank 0 of 1 exited with code 3"):
                spawn(lambda comm: os._exit(3), 1)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_rank_that_never_connects_is_told_of_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spawn, "CONNECT_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(_spawn, "rendezvous", lambda *_, **__: signal.pause())
    with pytest.raises(gradwire.RendezvousError, match=r"rank 0 of 2 did not connect within 0.1 s"):
        spawn(sum_of_ranks, 2, args=(2.0,), timeout=0.1)


AFTER_OPENMP = """
import gradwire, torch
x = torch.ones(1 << 20)
def step(comm):
    weight = torch.ones(256, 256, requires_grad=True)
    (x.exp().sum() + (weight @ weight).sum()).backward()
    comm.all_reduce(weight.grad)
    return float(weight.grad[0, 0])
own = [step(comm) for comm in [gradwire.init()]]
assert len([*__import__("pathlib").Path("/proc/self/task").iterdir()]) > 1
assert gradwire.spawn(step, 2) == [2 * own[0]] * 2
"""


def test_ranks_compute_after_openmp_has_run_here() -> None:
    """A fork of a process that has OpenMP's threads waits for them in the next parallel region."""
    pytest.importorskip("torch")
    program = [sys.executable, "-c", AFTER_OPENMP]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    subprocess.run(program, env=environment, timeout=LIMIT, check=True)


def wait_for_all(comm: Comm) -> None:
    if comm.rank == 1:
        raise LookupError("the reason")
    comm.barrier()


def test_the_root_cause_is_raised_with_its_rank_and_traceback(threads: bool) -> None:
    with pytest.raises(LookupError, match="the reason") as raised:
        spawn(wait_for_all, 3, threads=threads)
    assert isinstance(raised.value.__cause__, SpawnedTraceback)
    assert "on rank 1:" in str(raised.value.__cause__)
    assert "in wait_for_all" in str(raised.value.__cause__)


def test_the_other_ranks_hear_of_it(threads: bool) -> None:
    heard: dict[int, str] = {}

    def tell(comm: Comm) -> None:
        try:
            wait_for_all(comm)
        except gradwire.Error as error:
            heard[comm.rank] = str(error)
            raise

    with pytest.raises(LookupError):
        spawn(tell, 3, threads=threads)
    if threads:  # a process has its own copy of the dictionary
        assert sorted(heard) == [0, 2]
        assert all("LookupError: the reason" in text for text in heard.values())


def test_gradwires_errors_keep_their_type_and_peer(threads: bool) -> None:
    def late(comm: Comm) -> None:
        if comm.rank == 0:
            comm.recv(np.empty(1), 1, timeout=0.1)
        comm.barrier()

    with pytest.raises(gradwire.Timeout) as raised:
        spawn(late, 2, threads=threads)
    assert raised.value.peer == 1


def test_a_process_that_is_killed_is_named() -> None:
    def die(comm: Comm) -> None:
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(gradwire.Error, match="rank 2 of 3 was killed by SIGKILL"):
        spawn(die, 3)


def test_a_process_that_exits_on_its_own_is_named() -> None:
    with pytest.raises(gradwire.Error, match="rank 0 of 1 exited with code 0"):
        spawn(lambda comm: os._exit(0), 1)


def test_processes_that_do_not_communicate_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spawn, "GRACE_SECONDS", 0.2)
    ours, theirs = os.pipe()

    def compute_on(comm: Comm) -> None:
        if comm.rank == 1:
            raise LookupError("the reason")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(theirs, b"x")
        signal.pause()

    with pytest.raises(LookupError):
        spawn(compute_on, 2)
    os.close(theirs)
    with open(ours, "rb") as pipe:  # ends when the last process that holds it has
        pipe.read()


def test_a_thread_that_computes_on_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spawn, "GRACE_SECONDS", 0.1)
    over = threading.Event()

    def compute_on(comm: Comm) -> None:
        if comm.rank == 1:
            raise LookupError("the reason")
        over.wait()

    with pytest.raises(LookupError):
        spawn(compute_on, 2, threads=True)
    over.set()


class Unreadable(Exception):
    """Can be pickled and not read again, as many exceptions with arguments of their own."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_be_pickled_is_still_told() -> None:
    def fail(comm: Comm) -> None:
        raise Unreadable(1, 2)

    with pytest.raises(gradwire.Error, match="Unreadable: 1 and 2"):
        spawn(fail, 1)


def test_a_result_that_cannot_be_pickled_is_an_error_that_names_the_rank() -> None:
    with pytest.raises(Exception, match="pickle") as raised:
        spawn(lambda comm: threading.Lock(), 1)
    assert "on rank 0" in str(raised.value.__cause__)


def test_a_rank_that_ends_in_sys_exit_is_a_failure(threads: bool) -> None:
    def leave(comm: Comm) -> Any:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        spawn(leave, 2, threads=threads)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(gradwire.InvalidArgument, match="ranks=0"):
        spawn(print, 0)
    with pytest.raises(gradwire.InvalidArgument, match="'ib'"):
        spawn(print, 1, transports=["ib"])


def test_an_acceptor_that_fails_ends_the_rendezvous(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(Acceptor, "_accept", broken)
    with pytest.raises(gradwire.RendezvousError, match="rank 0 can accept no connections any more"):
        spawn(lambda comm: comm.rank, 2)
