"""Calls that are waited for do not wake the thread that goes on with calls in the background."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import ranks
from gradwire import Communicator, spawn

CALLS = 500


def _sleeps_of_other_threads() -> int:
    """How often the threads of this process but its first one have gone to sleep."""
    tasks = [each for each in Path("/proc/self/task").iterdir() if each.name != str(os.getpid())]
    lines = [line for each in tasks for line in (each / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def _small_calls(comm: Communicator) -> float:
    """Sleeps of the progress thread per small call of ranks that share a core."""
    x = np.zeros(1, np.float32)
    comm.all_reduce(np.zeros(9), async_op=True).wait()  # starts the thread
    comm.all_reduce(x)
    comm.barrier()
    before = _sleeps_of_other_threads()
    for _ in range(CALLS):
        comm.all_reduce(x)
    return (_sleeps_of_other_threads() - before) / CALLS


def test_small_calls_of_ranks_that_share_a_core_wake_no_other_thread() -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the ranks inherit it
    try:
        found = ranks.run(2, _small_calls, transport="shm", processes=True)
    finally:
        os.sched_setaffinity(0, cores)
    assert max(found) < 0.2


def _sums_of_groups(comm: Communicator) -> list[float]:
    """Calls of several groups at once, begun and awaited in another order on each rank."""
    parts = [comm.split(0) for _ in range(3)]
    assert all(each is not None for each in parts)
    groups = [comm, *filter(None, parts)]
    order = groups[comm.rank :] + groups[: comm.rank]
    arrays = {id(each): np.full(100_000, float(i)) for i, each in enumerate(groups)}
    works = [each.all_reduce(arrays[id(each)], async_op=True) for each in order for _ in range(3)]
    for work in reversed(works):
        work.wait()
    for each in parts:
        each.close()
    return [float(arrays[id(each)][-1]) for each in groups]


def test_one_thread_moves_the_calls_of_several_groups() -> None:
    for transport in ("shm", "tcp"):
        found = spawn(_sums_of_groups, 3, transports=[transport], timeout=ranks.LIMIT)
        assert found == [[27.0 * i for i in range(4)]] * 3
