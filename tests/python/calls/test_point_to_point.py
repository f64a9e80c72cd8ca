"""send and recv: matching, order, both directions at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, Timeout, TransportError
from ranks import on_ranks, outcomes, run

TRANSPORTS = ("inproc", "shm", "tcp")
LARGE = 3_000_001


def pattern(n: int, sender: int) -> np.ndarray:
    return np.random.default_rng([sender, n]).integers(0, 255, n, np.uint8)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [0, 1, 100, LARGE])
@on_ranks(2)
def test_a_message_arrives(comm: Communicator, n: int, transport: str) -> None:
    if comm.rank == 0:
        assert comm.send(pattern(n, 0), 1) is None
    else:
        x = np.empty(n, np.uint8)
        assert comm.recv(x, 0) == 0
        np.testing.assert_array_equal(x, pattern(n, 0))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("p", [2, 3, 5])
@on_ranks()
def test_all_pairs_at_once(comm: Communicator, p: int, transport: str) -> None:
    peers = [peer for peer in range(p) if peer != comm.rank]
    outs = {peer: np.empty(LARGE, np.uint8) for peer in peers}
    mine = pattern(LARGE, comm.rank)
    sends = [comm.send(mine, peer, async_op=True) for peer in peers]
    receives = {peer: comm.recv(outs[peer], peer, async_op=True) for peer in peers}
    for work in sends:
        assert work.wait() is None
    for peer, work in receives.items():
        assert work.wait() == peer
        np.testing.assert_array_equal(outs[peer], pattern(LARGE, peer))


@on_ranks(2)
def test_messages_of_a_pair_arrive_in_order(comm: Communicator) -> None:
    sizes = [5, 0, 200_000, 1, 70_000, 3]
    if comm.rank == 0:
        works = [comm.send(pattern(n, 0), 1, async_op=True) for n in sizes]
    else:
        outs = [np.empty(n, np.uint8) for n in sizes]
        works = [comm.recv(out, 0, async_op=True) for out in outs]
    for work in works:
        work.wait()
    if comm.rank == 1:
        for n, out in zip(sizes, outs, strict=True):
            np.testing.assert_array_equal(out, pattern(n, 0))


def test_receives_from_any_rank_name_the_sender() -> None:
    def body(comm: Communicator) -> list[int] | None:
        if comm.rank != 0:
            comm.send(np.full(1000, comm.rank, np.int64), 0)
            return None
        sources = []
        for _ in range(1, comm.size):
            x = np.empty(1000, np.int64)
            sources.append(comm.recv(x))
            np.testing.assert_array_equal(x, np.full(1000, sources[-1]))
        return sorted(sources)

    assert run(5, body)[0] == [1, 2, 3, 4]


def test_a_receive_from_any_rank_that_nobody_can_answer_fails() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(np.empty(1))

    (first, *_) = outcomes(3, body)
    assert isinstance(first.error, TransportError)
    assert "closed" in str(first.error)


@on_ranks(3)
def test_the_result_of_an_asynchronous_receive_is_the_sender(comm: Communicator) -> None:
    x = np.empty(3)
    if comm.rank == 0:
        assert comm.recv(x, async_op=True).wait() == 2
        comm.send(x, 1)
    elif comm.rank == 1:
        assert comm.recv(x, 0) == 0
    else:
        comm.send(np.arange(3.0), 0)


@on_ranks(2)
def test_transfers_are_independent_of_collectives(comm: Communicator) -> None:
    x = np.empty(100_000, np.float32)
    if comm.rank == 1:  # is asked for before a collective, and comes after it
        work = comm.recv(x, 0, async_op=True)
    assert comm.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
    if comm.rank == 0:
        comm.send(np.ones(100_000, np.float32), 1)
    else:
        assert work.wait() == 0
        assert (x == 1).all()


@on_ranks(2)
def test_any_dtype_and_list_views(comm: Communicator) -> None:
    text = np.array(["ab", "cdé"])
    if comm.rank == 0:
        comm.send(text, 1)
    else:
        x = np.empty(2, "U3")
        comm.recv(x, 0)
        assert x.tolist() == text.tolist()


@pytest.mark.parametrize("peer", [2, -1, 7])
@on_ranks(2)
def test_who_is_no_peer_is_refused(comm: Communicator, peer: int) -> None:
    if comm.rank == 0:
        with pytest.raises(InvalidArgument, match=str(peer)):
            comm.send(np.zeros(1), peer)
        with pytest.raises(InvalidArgument, match=str(peer)):
            comm.recv(np.zeros(1), peer)
    comm.barrier()


def errors(p: int, body: Any) -> list[BaseException | None]:
    return [each.error for each in outcomes(p, body)]


def test_lengths_that_differ_are_an_error() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(np.zeros(10, np.uint8), 1)
            comm.barrier()
        else:
            comm.recv(np.empty(11, np.uint8), 0)

    found = errors(2, body)
    assert isinstance(found[1], InvalidArgument)
    assert "11" in str(found[1])


def test_a_receive_without_a_sender_times_out() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.recv(np.empty(1), 0, timeout=0.2)
        else:
            comm.barrier()

    found = errors(2, body)
    assert all(isinstance(each, Timeout) and each.peer == 0 for each in found)


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("n", [0, 1, LARGE])
@on_ranks()
def test_a_blocking_send_to_oneself_waits_for_no_recv(comm: Communicator, p: int, n: int) -> None:
    sent = pattern(n, comm.rank)
    comm.send(sent, comm.rank)
    sent[:] = 0  # it was copied
    x = np.empty(n, np.uint8)
    assert comm.recv(x, comm.rank) == comm.rank
    np.testing.assert_array_equal(x, pattern(n, comm.rank))
    comm.barrier()


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("source", ["itself", "any"])
@on_ranks()
def test_messages_to_oneself_arrive_in_order(comm: Communicator, p: int, source: str) -> None:
    src = comm.rank if source == "itself" else None
    sizes = [5, 0, 200_000, 1]
    outs = [np.empty(n, np.uint8) for n in sizes]
    early = [comm.recv(out, src, async_op=True) for out in outs[:2]]
    for n in sizes:
        comm.send(pattern(n, n), comm.rank)
    late = [comm.recv(out, src, async_op=True) for out in outs[2:]]
    for work in early + late:
        assert work.wait() == comm.rank
    for n, out in zip(sizes, outs, strict=True):
        np.testing.assert_array_equal(out, pattern(n, n))
    comm.barrier()


@on_ranks(3)
def test_a_recv_from_any_rank_takes_messages_of_others_and_its_own(comm: Communicator) -> None:
    comm.send(np.full(3, comm.rank), 0)
    comm.send(np.full(3, comm.rank), comm.rank)
    x = np.empty(3, np.int64)
    found = []
    for _ in range(comm.size + 1 if comm.rank == 0 else 1):
        found.append(comm.recv(x))
        assert x.tolist() == [found[-1]] * 3
    assert sorted(found) == ([0, 0, 1, 2] if comm.rank == 0 else [comm.rank])


@pytest.mark.parametrize("p", [1, 2])
def test_who_waits_for_itself_in_vain_is_named(p: int) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(np.empty(3), 0, timeout=0.2)

    (first, *others) = outcomes(p, body)
    assert isinstance(first.error, Timeout)
    assert first.error.peer == 0
    assert "timed out: no send or recv matched with rank 0" in str(first.error)
    for each in others:
        assert each.error is None or isinstance(each.error, Timeout)


def test_a_message_to_oneself_of_another_size_is_refused() -> None:
    def body(comm: Communicator) -> None:
        comm.send(np.ones(3), comm.rank)
        comm.recv(np.ones(4), comm.rank)

    for each in outcomes(2, body):
        assert isinstance(each.error, InvalidArgument)
        assert "sent a message of another size than the 32 bytes" in str(each.error)
