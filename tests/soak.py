"""A soak: ranks do a bit of everything for hours, and their memory must come to a plateau.

    python -m tests.soak --minutes 120

Each rank's private memory is counted at equal times. The first third is for what fills and then
stays: plans and shapes that are cached, Python's cache of attributes (4,096 names, of which each
communicator looks some up), and malloc's stock, of which the root of collectives of objects needs
most. After it no rank may grow by more than a limit in an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gradwire
import numpy as np
from gradwire import Communicator

from tests.python.support.census import growth, held

RANKS = 3
SAMPLES = 60
MOST_GROWTH = 2 << 20  # bytes in an hour; a leak of 100 bytes in each turn is tens of megabytes
SETTLE = 1 / 3  # of the time
_MOST_BYTES = 20_000


class Sample(NamedTuple):
    """What a rank held at a time."""

    seconds: float
    turns: int
    private: int  # bytes of memory that it shares with nobody
    descriptors: int


def _floats(draw: random.Random, most: int) -> Any:
    return np.ones(draw.randrange(1, most), np.float32)


def _reduce(comm: Communicator, draw: random.Random) -> None:
    for _ in range(10):
        comm.all_reduce(_floats(draw, 20_000))
    comm.all_reduce([_floats(draw, 5_000) for _ in range(4)], codec="int8")


def _exchange_objects(comm: Communicator, draw: random.Random) -> None:
    payloads = [draw.randbytes(draw.randrange(_MOST_BYTES)) for _ in range(comm.size)]
    comm.all_gather_object({"rank": comm.rank, "data": payloads[comm.rank]})
    comm.gather_object(payloads[comm.rank], root=0)
    comm.broadcast_object(payloads[0] if comm.rank == 0 else None)
    comm.scatter_object(payloads if comm.rank == 0 else None)


def _send(comm: Communicator, draw: random.Random) -> None:
    x = _floats(draw, 50_000)
    if comm.rank:
        comm.send(x, 0)
        comm.recv(x, 0)
        return
    for peer in range(1, comm.size):
        comm.recv(x, peer)
    for peer in range(1, comm.size):
        comm.send(x, peer)


def _begin_and_wait(comm: Communicator, draw: random.Random) -> None:
    works = [comm.all_reduce(_floats(draw, 5_000), async_op=True) for _ in range(6)]
    for work in works[:3]:  # the others are dropped
        work.wait()


def _split(comm: Communicator, draw: random.Random) -> None:
    made = comm.split(0 if comm.rank < 2 else None)
    if made is not None:
        made.all_reduce(np.ones(10, np.float32))
        made.close()


def _drop_splits(comm: Communicator, draw: random.Random) -> None:
    comm.split(0)
    used = comm.split(comm.rank % 2)
    assert used is not None
    used.all_reduce(np.ones(10, np.float32))


def _regroup(comm: Communicator, draw: random.Random) -> Communicator:
    if draw.random() < 0.5:
        comm.accept_joins()
        return comm.resize()
    aborts = comm.rank == draw.randrange(comm.size)
    with contextlib.suppress(gradwire.Error):  # which may also reach a rank that is late here
        comm.barrier()
        while not aborts:
            comm.barrier()
    comm.abort("for the soak")
    return comm.shrink()


_WORKS: tuple[Callable[[Communicator, random.Random], Any], ...] = (
    _reduce,
    _exchange_objects,
    _send,
    _begin_and_wait,
    _split,
    _drop_splits,
)


def _private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) << 10


def _turn(comm: Communicator, draw: random.Random) -> Communicator:
    for work in _WORKS:
        work(comm, draw)
    return _regroup(comm, draw)


def soak(rank: int, store: str, seconds: float, report: Callable[[int, Sample], None]) -> None:
    """One rank's part; reports samples at equal times."""
    draw = random.Random(7)  # the same on all ranks
    comm = gradwire.init(rank=rank, ranks=RANKS, store=store, secret="0123456789abcdef")
    began, turns, reported = time.monotonic(), 0, 0
    over = np.zeros(1, np.float32)
    while not over[0]:
        comm = _turn(comm, draw)
        if comm.size != RANKS:
            raise gradwire.Error(f"only {comm.size} of {RANKS} ranks are left")
        turns += 1
        passed = time.monotonic() - began
        if passed >= (reported + 1) * seconds / SAMPLES:
            reported = int(passed * SAMPLES / seconds)
            gc.collect()
            report(rank, Sample(passed, turns, _private_bytes(), held().descriptors.total()))
        over[0] = passed > seconds
        comm.broadcast(over, root=0)
    comm.close()


def judge(samples: Sequence[Sample]) -> str:
    """What is wrong with a rank's samples; empty for a plateau."""
    settled = samples[int(len(samples) * SETTLE) :]
    if len(settled) < 3:
        return "it gave too few samples: give it more time"
    hours = (settled[-1].seconds - settled[0].seconds) / 3600 / (len(settled) - 1)
    grown = growth([each.private for each in settled]) / hours
    found = []
    if grown > MOST_GROWTH:
        found.append(f"its memory grows by {grown / (1 << 20):.1f} MiB an hour")
    if growth([each.descriptors for each in settled]) > 0:
        found.append(f"it holds {settled[-1].descriptors} descriptors, and ever more")
    return " and ".join(found)


def main() -> int:
    """Runs all ranks; returns 0 for a plateau on each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=120.0)
    seconds = 60 * parser.parse_args().minutes
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    ranks = [
        context.Process(target=_run, args=(rank, store, seconds, queue)) for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    samples: dict[int, list[Sample]] = {rank: [] for rank in range(RANKS)}
    while all(not each.exitcode for each in ranks) and (
        any(each.is_alive() for each in ranks) or not queue.empty()
    ):
        with contextlib.suppress(Exception):
            rank, sample = queue.get(timeout=1)
            samples[rank].append(Sample(*sample))
            _show(rank, samples[rank][-1])
    for each in ranks:
        each.kill()  # where another has failed
        each.join()
    failed = [
        f"rank {n} ended with {each.exitcode}" for n, each in enumerate(ranks) if each.exitcode
    ]
    found = {rank: judge(each) for rank, each in samples.items()}
    failed += [f"rank {rank}: {why}" for rank, why in found.items() if why]
    print("\n".join(failed) or "all ranks came to a plateau", flush=True)
    return 1 if failed else 0


def _run(rank: int, store: str, seconds: float, queue: Any) -> None:
    soak(rank, store, seconds, lambda number, sample: queue.put((number, tuple(sample))))


def _show(rank: int, sample: Sample) -> None:
    print(
        f"rank {rank}, {sample.seconds / 60:6.1f} min, {sample.turns:7d} turns: "
        f"{sample.private / (1 << 20):6.2f} MiB, {sample.descriptors} descriptors",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
