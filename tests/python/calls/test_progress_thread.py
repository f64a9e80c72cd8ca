"""Calls that are waited for do not wake the thread that goes on with calls in the background."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import ranks
from gradwire import Communicator

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
