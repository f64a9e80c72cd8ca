"""No host counts as dead while its kernel answers: `python -m tests.faults.false_alarms`.

Ranks on hosts of their own (namespaces) compute, sleep, are stopped and exchange, while `--busy`
processes a core take the processors. A case is one such turn of a job; each must end with the
right sum. It needs what tests/python/support/namespaces.py needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Process
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "support"))
import numpy as np
from gradwire import Communicator
from hosts import Network

RANKS = 3
TURNS = 4  # of a job
REST = 7.0  # seconds, the longest that a rank rests or is stopped: beyond the limit of 5 s


def spin() -> None:
    while True:
        pass


def turns(comm: Communicator, pipe: Any, seed: int, count: int) -> int:
    """Takes part in `count` cases; returns in how many the sum was right."""
    alike, own = random.Random(seed), random.Random(f"{seed}.{comm.rank}")
    right = 0
    for _ in range(count):
        resting, elements = alike.randrange(RANKS), alike.choice((1, 1000, 1 << 20))
        algorithm = alike.choice(("ring", "star", "direct"))
        if comm.rank == resting:
            pipe.send(own.uniform(0, REST))  # who reads it stops this process for so long
        elif own.random() < 0.3:
            end = time.monotonic() + own.uniform(0, REST)
            while time.monotonic() < end:
                pass
        x = np.ones(elements, np.float32)
        comm.all_reduce(x, algorithm=algorithm)
        right += bool((x == RANKS).all())
    return right


def stop_for(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has come to its end before it was stopped
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def attend(rank: Any) -> int:
    """Stops a rank as it asks; returns how many of its cases were right."""
    while not hasattr(found := rank.pipe.recv(), "value"):
        stop_for(rank.pid, found)
    if found.error is not None:
        raise found.error
    return int(found.value)


def job(network: Network, seed: int, count: int) -> int:
    """Runs the cases of one job; returns how many were right on all ranks."""

    def body(comm: Communicator, pipe: Any) -> int:
        return turns(comm, pipe, seed, count)

    with network.start(range(RANKS), body, timeout=600) as ranks, ThreadPoolExecutor() as each:
        return min(each.map(attend, ranks))


def jobs(network: Network, seed: int, count: int) -> int:
    """Runs cases in one job after the other, each of which is short enough for hosts.LIMIT."""
    right = 0
    for first in range(0, count, TURNS):
        cases = min(TURNS, count - first)
        right += (found := job(network, seed + first, cases))
        print(f"seed {seed + first}: {found} of {cases} right", flush=True)
    return right


def main() -> None:
    """Prints how many cases were right; exits with 1 where one was not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="cases")
    parser.add_argument("--jobs", type=int, default=8, help="at once")
    parser.add_argument("--busy", type=int, default=10, help="processes a core that only compute")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    busy = [Process(target=spin, daemon=True) for _ in range(asked.busy * (os.cpu_count() or 1))]
    count = -(-asked.count // asked.jobs)
    with contextlib.ExitStack() as stack:
        networks = [
            stack.enter_context(contextlib.closing(Network(RANKS))) for _ in range(asked.jobs)
        ]
        for each in busy:
            each.start()
            stack.callback(each.kill)
        start = time.monotonic()
        with ThreadPoolExecutor(asked.jobs) as at_once:
            seeds = range(asked.seed, asked.seed + asked.jobs * count, count)
            right = sum(
                at_once.map(lambda pair: jobs(*pair, count), zip(networks, seeds, strict=True))
            )
    total, seconds = count * asked.jobs, time.monotonic() - start
    print(f"{right} of {total} cases right in {seconds:.0f} s, load {os.getloadavg()[0]:.0f}")
    sys.exit(right != total)


if __name__ == "__main__":
    main()
