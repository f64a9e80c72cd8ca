"""A host that is cut off shows by its kernel's silence; one that computes for long does not.

The hosts are network namespaces (`hosts.py`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import gradwire
import hosts
import namespaces
import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, TransportError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.rendezvous_exchange import RendezvousExchange
from gradwire._host import keepalive
from hosts import Network, Rank
from stopwatch import own_time

MISSING = namespaces.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SILENCE = 2.0  # seconds, GRADWIRE_TCP_TIMEOUT_SECONDS of these ranks; the default is 5
# A frame that was sent into the silence just before its end begins another one.
FOUND = 2 * SILENCE + 2.0
PLACES = (0, 0, 1, 1, 2, 2)
CUT = 1  # the host
GONE = {2, 3}  # its ranks
SETTING = {"GRADWIRE_TCP_TIMEOUT_SECONDS": str(SILENCE)}


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def environment(_: int) -> dict[str, str]:
    return SETTING


def failure_of(call: Any) -> tuple[float, int, str]:
    """The time on this rank at which a call failed for lack of a host, the peer and the text."""
    try:
        call()
    except TransportError as error:
        return own_time(), error.peer, str(error)
    raise AssertionError("the call did not fail")


def reduce_for_ever(comm: Communicator, pipe: Any, algorithm: str) -> tuple[float, int, str]:
    x = np.ones(4 << 20, np.float32)

    def call() -> None:
        while True:
            comm.all_reduce(x, algorithm=algorithm)
            pipe.send("under way")

    return failure_of(call)


def await_rank_2(comm: Communicator, pipe: Any) -> tuple[float, int, str]:
    """Rank 0 waits for a message, and the others in a barrier."""
    comm.barrier()
    pipe.send("under way")
    if comm.rank == 0:
        return failure_of(lambda: comm.recv(np.empty(1), src=2))
    return failure_of(comm.barrier)


def await_word(rank: Rank) -> None:
    assert rank.pipe.poll(hosts.LIMIT)
    assert rank.pipe.recv() == "under way"


def ended(rank: Rank) -> Any:
    """The rank's outcome, past what else it said."""
    deadline = time.monotonic() + hosts.LIMIT
    while rank.pipe.poll(deadline - time.monotonic()):
        found = rank.pipe.recv()
        if found != "under way":
            if found.error is not None:
                raise found.error
            return found.value
    raise AssertionError("a rank did not end")


@needs_hosts
@pytest.mark.parametrize("algorithm", ["ring", "hierarchical(ring,ring)", "star"])
def test_a_cut_host_is_named_on_all_ranks(network: Network, algorithm: str) -> None:
    def body(comm: Communicator, pipe: Any) -> tuple[float, int, str]:
        return reduce_for_ever(comm, pipe, algorithm)

    with network.start(PLACES, body, environment=environment, timeout=60) as ranks:
        for rank in ranks:
            await_word(rank)
        with network.cut(CUT):
            at = [own_time(rank.pid) for rank in ranks]
            found = [ended(rank) for rank in ranks]
    for rank, (failed, peer, text) in enumerate(found):
        assert failed - at[rank] < FOUND, (rank, text)
        # The cut host's ranks are alive, and lack the others.
        assert (peer in GONE) == (rank not in GONE), (rank, text)


@needs_hosts
@pytest.mark.parametrize("waits", [False, True])
def test_a_cut_host_is_named_within_5_seconds_by_default(network: Network, waits: bool) -> None:
    def body(comm: Communicator, pipe: Any) -> tuple[float, int, str]:
        return await_rank_2(comm, pipe) if waits else reduce_for_ever(comm, pipe, "ring")

    with network.start(PLACES, body, timeout=60) as ranks:
        for rank in ranks:
            await_word(rank)
        with network.cut(CUT):
            at = [own_time(rank.pid) for rank in ranks]
            found = [ended(rank) for rank in ranks]
    for rank, (failed, peer, text) in enumerate(found):
        assert failed - at[rank] < 5.0, (rank, text)
        assert (peer in GONE) == (rank not in GONE), (rank, text)


@needs_hosts
def test_survivors_of_a_cut_host_shrink_and_go_on(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> tuple[tuple[tuple[int, ...], ...], float]:
        reduce_for_ever(comm, pipe, "ring")
        with comm.shrink(timeout=SILENCE) as rest:
            sum_of_ranks = rest.all_reduce(np.full(100_000, float(comm.rank)))
            return rest.hosts, float(sum_of_ranks[0])

    with network.start(PLACES, body, environment=environment, timeout=60) as ranks:
        for rank in ranks:
            await_word(rank)
        with network.cut(CUT):
            found = [ended(rank) for rank in ranks]
    survivors = ((0, 1), (2, 3)), 0.0 + 1 + 4 + 5
    assert [each for rank, each in enumerate(found) if rank not in GONE] == [survivors] * 4
    # The cut host cannot know that it is the one, and goes on for itself.
    assert [found[rank] for rank in sorted(GONE)] == [(((0, 1),), 2.0 + 3)] * 2


@needs_hosts
def test_a_host_that_is_cut_while_all_are_idle_shows_at_the_next_call(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> tuple[float, int, str]:
        comm.barrier()
        pipe.send("under way")
        if comm.rank == 0:  # sits in a call, so it notices first
            return failure_of(lambda: comm.recv(np.empty(1), src=2))
        pipe.recv()
        return failure_of(comm.barrier)

    with network.start(PLACES, body, environment=environment, timeout=60) as ranks:
        for rank in ranks:
            await_word(rank)
        with network.cut(CUT):
            at = own_time(ranks[0].pid)
            failed, peer, text = ended(ranks[0])
            assert peer in GONE
            assert failed - at < FOUND
            for rank in ranks[1:]:
                asked = own_time(rank.pid)
                rank.pipe.send("go on")
                failed, peer, text = ended(rank)
                assert failed - asked < 1.0, text
                assert (peer in GONE) == (rank not in (ranks[2], ranks[3])), text


@needs_hosts
def test_a_host_that_is_cut_while_the_ranks_meet_is_named(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", "0123456789abcdef")
    monkeypatch.setenv("GRADWIRE_TCP_TIMEOUT_SECONDS", str(SILENCE))
    honest = RendezvousExchange._get

    def meet_in_vain(rank: int, pipe: Any) -> tuple[float, int, str]:
        def get(self: RendezvousExchange, what: str, peer: int, deadline: Deadline) -> bytes:
            if peer == 3:  # which is not there
                pipe.send("under way")
            return honest(self, what, peer, deadline)

        monkeypatch.setattr(RendezvousExchange, "_get", get)  # in this process alone
        with pytest.raises(TransportError) as raised:
            gradwire.init(rank=rank, ranks=4, store=f"tcp://10.77.0.1:{hosts.PORT}", timeout=60)
        return own_time(), raised.value.peer, str(raised.value)

    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, place in enumerate((0, 0, CUT)):
            ranks.append(Rank(network.hosts[place], lambda pipe, r=rank: meet_in_vain(r, pipe)))
            stack.callback(ranks[-1].close)
        for each in ranks:
            await_word(each)
        with network.cut(CUT):
            at = [own_time(each.pid) for each in ranks]
            found = [ended(each) for each in ranks[:2]]
            alone = ended(ranks[2])
    for rank, (failed, peer, text) in enumerate(found):
        assert failed - at[rank] < FOUND, (rank, text)
        assert peer == 2, (rank, text)
    assert alone[0] - at[2] < FOUND + SILENCE
    assert alone[1] == 0  # which hosts the store
    assert "lost the store at tcp://10.77.0.1" in alone[2]


@needs_hosts
def test_a_rank_that_computes_for_long_is_not_taken_for_dead(network: Network) -> None:
    """The kernel answers, though the windows of its connections are closed."""
    silence = 1.0

    def body(comm: Communicator, pipe: Any) -> float:
        x = np.ones(8 << 20, np.float32)
        if comm.rank == 2:
            pipe.send("under way")
            pipe.recv()
        works = [comm.all_reduce(x, algorithm=name, async_op=True) for name in ("star", "direct")]
        for work in works:
            work.wait()
        return float(x[0])

    setting = {"GRADWIRE_TCP_TIMEOUT_SECONDS": str(silence)}
    with network.start(PLACES, body, environment=lambda _: setting, timeout=60) as ranks:
        await_word(ranks[2])
        others = [rank for rank in ranks if rank is not ranks[2]]
        assert not others[0].pipe.poll(3 * silence)  # it waits, and goes on waiting
        ranks[2].pipe.send("go on")
        assert [ended(rank) for rank in ranks] == [36.0] * 6


# The options themselves


def options(always_read: bool) -> dict[str, int]:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    with socket.socket() as sock:
        keepalive.fail_with_host(sock, always_read=always_read)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        return {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}


def test_a_dead_host_shows_within_5_seconds_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_TCP_TIMEOUT_SECONDS", raising=False)
    found = options(always_read=True)
    assert found["TCP_USER_TIMEOUT"] == 4_250
    assert found["TCP_KEEPIDLE"] + found["TCP_KEEPINTVL"] * found["TCP_KEEPCNT"] == 4


@pytest.mark.parametrize("seconds", ["1", "2", "7.5", "60", "3600"])
def test_probes_end_within_the_time_that_was_set(
    monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setenv("GRADWIRE_TCP_TIMEOUT_SECONDS", seconds)
    found = options(always_read=False)
    assert found["TCP_USER_TIMEOUT"] == 0  # the reader of a data link may rest
    total = found["TCP_KEEPIDLE"] + found["TCP_KEEPINTVL"] * found["TCP_KEEPCNT"]
    assert 0.7 * float(seconds) <= total <= max(2, float(seconds))


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "86400"])
def test_a_wrong_time_is_refused(monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("GRADWIRE_TCP_TIMEOUT_SECONDS", seconds)
    with pytest.raises(InvalidArgument, match="use 1 to 3600 seconds"):
        options(always_read=True)


def test_local_sockets_are_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        keepalive.fail_with_host(one, always_read=True)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
