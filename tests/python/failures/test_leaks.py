"""Leaks: a communicator that is over leaves nothing, counted in /proc, however it ended.

Memory and mappings are also malloc's, which keeps more of them now and then. So they are counted
after each of some rounds, and what most rounds leave is a leak.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import statistics
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from census import Census, allocated, census, growth, held, threads
from gradwire import (
    Aborted,
    Communicator,
    Error,
    InvalidArgument,
    RendezvousError,
    Timeout,
    TransportError,
)
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._communicator import from_mesh
from gradwire._launch import at_exit
from ranks import PROCESS_TRANSPORTS, VANISHED, eventually, meshes, outcomes, run, vanish

P = 3
ROUNDS, TURNS = 6, 3  # a round is so many turns
MOST_GROWTH = 1 << 18  # bytes in a round; one communicator holds several MiB
ELEMENTS = 100_000
M_ARENA_MAX = -8  # of <malloc.h>
DROPS, WARM_UP = 50, 4  # splits in a round; rounds in which Python's cache of attributes fills
MOST_BYTES, MOST_BLOCKS = 400, 1.5  # that one of them may leave, as noise

Ending = Callable[[Communicator], Communicator]


def use(comm: Communicator) -> None:
    """Uses a communicator in every way that allocates or starts something."""
    works = [comm.all_reduce(np.ones(ELEMENTS, np.float32), async_op=True) for _ in range(3)]
    sent = comm.send(np.ones(ELEMENTS), (comm.rank + 1) % comm.size, async_op=True)
    comm.recv(np.empty(ELEMENTS), (comm.rank - 1) % comm.size)
    comm.all_reduce(np.ones(ELEMENTS, np.float32), algorithm="star", codec="fp16")
    for work in (*works, sent):
        work.wait()


def close(comm: Communicator) -> Communicator:
    comm.close()
    return comm


def fail(comm: Communicator, victim: int = 1) -> None:
    """Rank `victim` dies while the others have work in flight."""

    def train() -> None:
        works = [comm.all_reduce(np.ones(ELEMENTS, np.float32), async_op=True) for _ in range(3)]
        works[0].wait()
        if comm.rank == victim:
            vanish(comm)
        works[2].wait()

    until(TransportError, train)


def until(kind: type[Error], call: Callable[[], object]) -> None:
    try:
        while True:
            call()
    except kind:
        return


def end(comm: Communicator) -> None:
    """Rank 0 aborts, once all are here: who still worked would take it for an error of that."""

    def meet() -> None:
        comm.barrier()
        if comm.rank == 0:
            comm.abort("enough")

    until(Aborted, meet)


def failure(comm: Communicator) -> Communicator:
    fail(comm)
    return close(comm)


def abort(comm: Communicator) -> Communicator:
    """While two threads are in calls."""
    receive = threading.Thread(target=until, args=(Aborted, lambda: comm.recv(np.empty(1))))
    receive.start()
    comm.all_reduce(np.ones(ELEMENTS, np.float32), async_op=True).wait()
    end(comm)
    receive.join()
    return close(comm)


def interrupt(comm: Communicator) -> Communicator:
    """Ctrl-C on rank 0, while all receive in vain."""
    if comm.rank == 0:
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            comm.recv(np.empty(1), 1)
        timer.join()
    else:
        until(Aborted, lambda: comm.recv(np.empty(1), (comm.rank + 1) % P))
    return close(comm)


def mismatch(comm: Communicator) -> Communicator:
    until(InvalidArgument, lambda: comm.all_reduce(np.ones(ELEMENTS + (comm.rank == 1))))
    return close(comm)


def timeout(comm: Communicator) -> Communicator:
    """Runs into the timeout of a call that rank 1 does not make."""
    call = comm.barrier if comm.rank != 1 else partial(comm.recv, np.empty(1), 0)
    until(Timeout, lambda: call(timeout=0.05))
    return close(comm)


def shrink(comm: Communicator) -> Communicator:
    """Twice, the second time after an abort; the old ones are still referred to."""
    fail(comm)
    smaller = comm.shrink()
    use(smaller)
    end(smaller)
    again = smaller.shrink()
    use(again)
    again.close()
    return comm


def turn(transport: str, ending: Ending) -> Communicator:
    """A communicator's life on rank 0, which is this process; the other ranks are forked."""
    made = meshes(P, transport)
    children = []
    for mesh in made[1:]:
        child = os.fork()
        if child == 0:
            os._exit(_code_of_child(mesh, made, ending))
        children.append(child)
    for mesh in made[1:]:
        mesh.close()
    ended = live(from_mesh(made[0], timeout=20), ending)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert all(code in (0, VANISHED) for code in codes), "more is left on another rank: see above"
    assert ended.closed
    return ended


def _code_of_child(mesh: Mesh, made: list[Mesh], ending: Ending) -> int:
    """Code of a child that exits with 0 if it has nothing more at the end than without its mesh."""
    try:
        for other in made:
            if other is not mesh:
                other.close()
        before, own = held(), sum(len(list(peer.sockets())) for peer in mesh.peers.values())
        ended = live(from_mesh(mesh, timeout=20), ending)
        eventually(lambda: threads() == before.threads)  # one that was joined is still ending
        after = held()
        del ended
        assert after.descriptors + Counter({"socket": own}) == before.descriptors
        assert after.shared == before.shared
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def live(comm: Communicator, ending: Ending) -> Communicator:
    use(comm)
    return ending(comm)


def census_after(turns: int, live_once: Callable[[], object]) -> Census:
    """A thread that was joined is still ending: the next turn has its stack once it is gone."""
    before = threads()
    for _ in range(turns):
        ended = live_once()
        eventually(lambda: threads() == before)
    found = census()
    del ended  # what is over holds nothing even while somebody refers to it
    return found


def assert_nothing_is_left(live_once: Callable[[], object]) -> None:
    def body(_: Communicator) -> None:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # or threads that meet get mappings of their own
        before = census()
        found = [census_after(TURNS, live_once) for _ in range(ROUNDS)]
        print([(each.mappings, each.resident) for each in found])
        assert found[-1].threads == before.threads
        assert found[-1].descriptors == before.descriptors
        assert found[-1].shared == before.shared
        assert growth([each.mappings for each in found]) < 1
        assert growth([each.resident for each in found]) < MOST_GROWTH

    (ended,) = outcomes(1, body, processes=True)
    if ended.error is not None:
        raise ended.error


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param(name, marks=() if name == "shm" else pytest.mark.nightly)
        for name in PROCESS_TRANSPORTS
    ],
)
@pytest.mark.parametrize("ending", [close, failure, abort, shrink])
def test_nothing_is_left_of_a_communicator(ending: Ending, transport: str) -> None:
    assert_nothing_is_left(lambda: turn(transport, ending))


@pytest.mark.parametrize(
    ("ending", "transport"), [(interrupt, "shm"), (mismatch, "tcp"), (timeout, "shm")]
)
def test_nothing_is_left_of_one_that_took_its_time_to_fail(ending: Ending, transport: str) -> None:
    assert_nothing_is_left(lambda: turn(transport, ending))


def test_nothing_is_left_of_a_rendezvous_that_failed() -> None:
    """Ranks 0, with the store, and 1 wait in vain for rank 2."""

    def meet(launch: LaunchInfo) -> None:
        with pytest.raises(RendezvousError, match="rank 2"):
            rendezvous(launch, lambda mesh: mesh, timeout=0.05)

    def live_once() -> None:
        store = f"unix://gradwire-test-{secrets.token_hex(8)}"
        launches = [LaunchInfo(rank, 3, store=store, rank_0_hosts=True) for rank in range(2)]
        meeting = [threading.Thread(target=meet, args=(launch,)) for launch in launches]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join()

    assert_nothing_is_left(live_once)


def drop_splits(comm: Communicator) -> None:
    """Drops communicators, used ones and others; at the end none waits for its ranks."""
    for i in range(DROPS):
        made = comm.split(0)
        assert made is not None
        if i % 2:  # so is the last one, whose ranks made the same calls: its drop lets go of all
            made.all_reduce(np.ones(10, np.float32))
            eventually(lambda: all(core.settled() for core, _ in at_exit._unsettled))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_nothing_is_left_of_splits_that_are_dropped() -> None:
    """Python makes its dict of all names anew now and then, so that the usual round counts."""

    def usual_growth(counts: list[int]) -> float:
        return statistics.median(after - before for before, after in pairwise(counts))

    def body(comm: Communicator) -> list[tuple[int, int]]:
        found = []
        for _ in range(WARM_UP + ROUNDS):
            drop_splits(comm)
            found.append(allocated())
        return found[WARM_UP:]

    for found in run(2, body, transport="shm", processes=True):
        print(found)
        assert usual_growth([each for each, _ in found]) < MOST_BYTES * DROPS
        assert usual_growth([blocks for _, blocks in found]) < MOST_BLOCKS * DROPS
