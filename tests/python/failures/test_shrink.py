"""shrink: whoever survives a failure goes on, in the same process, without the store."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import (
    Aborted,
    Communicator,
    Error,
    InvalidArgument,
    RendezvousError,
    Timeout,
    TransportError,
    _core,
    _regrouping,
)
from gradwire._bootstrap import connect as _connect
from gradwire._bootstrap import shrink
from gradwire._bootstrap import survivor_links as _links
from mortal_links import LIVES, Crash, Made, MortalLinks, connect, connected, made_by, mesh_of
from ranks import Outcome, on_ranks, outcomes, reserved_store, run
from stopwatch import own_time

processes = pytest.mark.parametrize("transport", ["shm", "tcp"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def shrink_without_rank_2(comm: Communicator) -> int:
    if comm.rank == 2:
        comm.abort("bye")
        return 0
    with contextlib.suppress(Error):
        comm.all_reduce(np.ones(4, np.float32))
    with comm.shrink() as smaller:
        return smaller.size


def test_a_timeout_without_end_is_one() -> None:
    assert gradwire.spawn(shrink_without_rank_2, 3, timeout=math.inf) == [2, 2, 0]


def train_until_it_fails(comm: Communicator, victim: int | None = None) -> Error:
    """The victim dies between two steps; the others may not be through the first of them."""
    x = np.ones(300_000, np.float32)
    try:
        for step in itertools.count():
            comm.all_reduce(x, timeout=20)
            if step == 2 and comm.rank == victim:
                die()
    except Error as error:
        assert comm.closed
        return error
    raise AssertionError("unreachable")


def members(comm: Communicator, name: int) -> list[int]:
    """Shows that the new communicator works, in every lane; the names in rank order."""
    x = np.full(200_000, float(comm.rank), np.float32)
    comm.all_reduce(x)
    assert (x == sum(range(comm.size))).all()
    if comm.size > 1:
        got = np.zeros(3)
        work = comm.send(np.full(3, float(comm.rank)), (comm.rank + 1) % comm.size, async_op=True)
        comm.recv(got, (comm.rank - 1) % comm.size)
        work.wait()
        assert (got == (comm.rank - 1) % comm.size).all()
    return comm.all_gather(np.array([name])).tolist()


def survivors(ended: Sequence[Outcome]) -> list[Any]:
    for each in ended:
        if each.error is not None:
            raise each.error
    return [each.value for each in ended if not each.died]


@processes
@pytest.mark.parametrize("victim", [0, 2])
def test_survivors_of_a_killed_rank_go_on(transport: str, victim: int) -> None:
    def body(comm: Communicator) -> list[int]:
        error = train_until_it_fails(comm, victim)
        assert isinstance(error, TransportError)
        assert error.peer == victim
        began = own_time()
        with comm.shrink() as smaller:
            assert own_time() - began < 10
            assert smaller.size == 3
            assert set(smaller.transports.values()) == {transport}
            return members(smaller, comm.rank)

    ended = outcomes(4, body, transport=transport, processes=True)
    rest = [rank for rank in range(4) if rank != victim]
    assert survivors(ended) == [rest] * 3


@processes
def test_shrinking_goes_on_to_the_last_rank(transport: str) -> None:
    """Each time rank 0 dies."""

    def body(comm: Communicator) -> list[list[int]]:
        name, seen = comm.rank, []
        while comm.size > 1:
            train_until_it_fails(comm, victim=0)
            comm = comm.shrink()
            seen.append(members(comm, name))
        comm.close()
        return seen

    ended = outcomes(4, body, transport=transport, processes=True)
    assert survivors(ended) == [[[1, 2, 3], [2, 3], [3]]]


CAUSES: dict[str, Callable[[Communicator], object]] = {
    "aborted": lambda comm: comm.abort("enough") if comm.rank == 1 else comm.barrier(),
    "different calls": lambda comm: comm.all_reduce(np.ones(3 + comm.rank)),
}


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("cause", CAUSES)
def test_nobody_need_die(transport: str, cause: str) -> None:
    def body(comm: Communicator) -> list[int]:
        try:
            CAUSES[cause](comm)
            comm.barrier()
        except (Aborted, InvalidArgument):
            with comm.shrink() as again:
                return members(again, comm.rank)
        raise AssertionError("nothing failed")

    assert run(3, body, transport=transport) == [[0, 1, 2]] * 3


@processes
def test_a_stopped_rank_is_left_out_at_the_deadline(transport: str) -> None:
    def body(comm: Communicator) -> list[int]:
        pids = comm.all_gather(np.array([os.getpid()])).tolist()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            with pytest.raises(Error) as raised:
                comm.all_reduce(np.ones(10), timeout=1.5)
            if comm.rank != 1:
                assert isinstance(raised.value, Timeout)
                assert raised.value.peer == 1
            with comm.shrink(timeout=3) as smaller:
                return members(smaller, comm.rank)
        finally:
            if comm.rank == 0:
                os.kill(pids[1], signal.SIGCONT)

    ended = outcomes(3, body, transport=transport, processes=True)
    assert [ended[rank].value for rank in (0, 2)] == [[0, 2]] * 2
    error = ended[1].error
    assert isinstance(error, TransportError)
    assert "left this rank out" in str(error)
    assert error.peer in (0, 2)


@pytest.mark.parametrize("point", [*range(10), 12])
def test_a_rank_may_die_while_the_others_shrink(point: int, monkeypatch: Any) -> None:
    """Rank 3 is dead; rank 2 dies when it has sent `point` messages to ranks 0 and 1."""
    send, sent = _links.SurvivorLinks.send, itertools.count()

    def send_or_die(self: _links.SurvivorLinks, peer: int, *message: Any) -> None:
        if peer != 3 and next(sent) == point:
            die()
        send(self, peer, *message)

    def body(comm: Communicator) -> tuple[list[int], bool]:
        train_until_it_fails(comm, victim=3)
        if comm.rank == 2:
            monkeypatch.setattr(_links.SurvivorLinks, "send", send_or_die)
        smaller = comm.shrink(timeout=10)
        if comm.rank == 2:
            die()
        joined = smaller.size == 3
        if joined:
            assert train_until_it_fails(smaller).peer == 2
            smaller = smaller.shrink()
        with smaller:
            return members(smaller, comm.rank), joined

    ended = outcomes(4, body, transport="shm", processes=True)
    (names, joined), other = survivors(ended)
    assert other == (names, joined)
    assert names == [0, 1]
    # It sends VIEW, ADDRESS, READY and DONE, each to two, VIEW perhaps again; one READY may do.
    assert joined or point < 10
    assert not joined or point >= 5


def listen_until_others_are_ready(own: Any, view: Any, *_: object) -> None:
    while own._without(view, own._ready):
        own._listen(1)


@processes
@pytest.mark.parametrize(("victim", "stage"), [(0, "connect"), (1, "make"), (1, "ready")])
def test_a_rank_that_is_stopped_while_the_links_are_made_is_left_out(
    transport: str, victim: int, stage: str, monkeypatch: Any
) -> None:
    def stop_in_shrink() -> None:
        # The others have its address, or are connected to it, or wait for nothing but its READY.
        owner: Any = {"connect": _connect, "make": _regrouping, "ready": shrink.Agreement}[stage]
        name = {
            "connect": "unpack_address_info",
            "make": "build_core",
            "ready": "_joiners_without",
        }[stage]
        call, calls = getattr(owner, name), itertools.count()

        def stop_once(*args: Any, **options: Any) -> Any:
            if next(calls) == 0:
                if stage == "ready":
                    listen_until_others_are_ready(*args)
                os.kill(os.getpid(), signal.SIGSTOP)
            return call(*args, **options)

        monkeypatch.setattr(owner, name, stop_once)

    def body(comm: Communicator) -> list[int]:
        pids = comm.all_gather(np.array([os.getpid()])).tolist()
        error = train_until_it_fails(comm, victim=3)
        assert error.peer == 3
        if comm.rank == victim:
            stop_in_shrink()
        began = own_time()
        try:
            with comm.shrink(timeout=2) as smaller:
                names = members(smaller, comm.rank)
                assert own_time() - began < 20
                return names
        finally:
            if comm.rank != victim:
                with contextlib.suppress(ProcessLookupError):  # another survivor woke it before
                    os.kill(pids[victim], signal.SIGCONT)

    monkeypatch.setattr(shrink, "_LEAST_CONNECT_SECONDS", 4.0)
    ended = outcomes(4, body, transport=transport, processes=True)
    rest = [rank for rank in range(3) if rank != victim]
    assert [(ended[rank].value, ended[rank].error) for rank in rest] == [(rest, None)] * 2
    error = ended[victim].error
    assert isinstance(error, TransportError)
    assert "left this rank out" in str(error)


def test_a_rank_that_comes_too_late_is_told() -> None:
    gone_on = threading.Event()

    def body(comm: Communicator) -> list[int]:
        if comm.rank == 2:
            comm.abort("enough")
            assert gone_on.wait(30)
        else:
            with pytest.raises(Aborted):
                comm.barrier()
        with comm.shrink(timeout=2) as smaller:
            names = members(smaller, comm.rank)
        gone_on.set()
        return names

    ended = outcomes(3, body, transport="tcp")
    assert [each.value for each in ended[:2]] == [[0, 1]] * 2
    assert isinstance(ended[2].error, TransportError)
    assert "rank 2: the other survivors" in str(ended[2].error)


@on_ranks(2)
def test_a_living_communicator_is_not_shrunk(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match=r"abort\(\)"):
        comm.shrink()
    comm.barrier()


@on_ranks(2, transport="shm")
def test_a_communicator_shrinks_once(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.abort("enough")
    else:
        with pytest.raises(Aborted, match="enough"):
            comm.barrier()
    with comm.shrink() as smaller:
        with pytest.raises(Aborted, match="enough"):
            comm.barrier()
        with pytest.raises(Aborted, match="closed"):
            comm.shrink()
        comm.close()
        smaller.barrier()
    with pytest.raises(Aborted, match="closed"):
        smaller.shrink()


@on_ranks(2, transport="shm", processes=True)
def test_work_in_flight_and_blocked_threads_end_first(comm: Communicator) -> None:
    """The memory that they used is released."""
    ended: list[BaseException] = []

    def blocked() -> None:
        try:
            comm.recv(np.empty(3), 1 - comm.rank)
        except Aborted as error:
            ended.append(error)

    thread = threading.Thread(target=blocked)
    thread.start()
    x = np.ones(1_000_000)
    works = [comm.all_reduce(x, async_op=True) for _ in range(20)]
    works[1].wait()
    if comm.rank == 0:
        comm.abort("enough")
    with pytest.raises(Aborted, match="enough"):
        works[-1].wait()
    with comm.shrink() as again:
        thread.join(10)
        assert len(ended) == 1
        assert members(again, comm.rank) == [0, 1]


def test_the_store_is_not_needed() -> None:
    """Rank 0, which hosted it, is dead."""
    with reserved_store() as store:

        def body(comm: Communicator) -> list[int]:
            rank = comm.rank
            with gradwire.init(rank=rank, ranks=3, store=store, secret="0123456789abcdef") as world:
                train_until_it_fails(world, victim=0)
                smaller = world.shrink()
            with smaller:
                return members(smaller, rank)

        ended = outcomes(3, body, transport="shm", processes=True)
    assert survivors(ended) == [[1, 2]] * 2


def simulate(rank: int, links: MortalLinks, size: int) -> Made:
    return shrink.Agreement(mesh_of(rank, size), links, made_by(links), (), 20).run()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_survivors_agree_wherever_others_crash(size: int, monkeypatch: Any) -> None:
    """Ranks are threads; those that crash do so between any two of their messages."""
    monkeypatch.setattr("gradwire._bootstrap.shrink.connect_mesh", connect)
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(60):
        mortal = dice.sample(range(size), dice.randrange(1, size))
        lives = [dice.randrange(5 * size) if rank in mortal else LIVES for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            futures = [
                pool.submit(simulate, rank, links, size)
                for rank, links in enumerate(connected(lives))
            ]
        errors = [future.exception() for future in futures]
        assert {type(error) for error in errors} <= {Crash, type(None)}, errors
        got = {futures[rank].result() for rank in range(size) if rank not in mortal}
        assert len(got) == 1, (lives, errors, got)
        assert got.pop().size >= size - len(mortal)


HEAD = b"GRS2\x01\0\x01\0\0\0\0\0"  # VIEW of round 0, ranks in one byte, no payload
NO_JOINERS = b"\x01" + bytes(8)


@pytest.mark.parametrize(
    "foreign",
    [
        bytes(12),
        b"GRS1" + HEAD[4:] + b"\x03" + NO_JOINERS,
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD[:4] + b"\x09" + HEAD[5:] + b"\x03" + NO_JOINERS,  # an unknown kind
        HEAD[:6] + b"\xff\xff" + HEAD[8:] + bytes(100),  # half a million ranks
        HEAD[:8] + b"\xff" * 4 + b"\x03" + NO_JOINERS,  # a payload of 4 GiB
        HEAD + b"\x01" + NO_JOINERS,  # a view without its sender
        HEAD + b"\x0b" + NO_JOINERS,  # of rank 3 of 2
        HEAD + b"\x03\x02" + bytes(8),  # joiners neither known nor unknown
        HEAD + b"\x03\0\x01" + bytes(7),  # an unknown joiner
    ],
)
def test_foreign_bytes_end_a_line(foreign: bytes) -> None:
    ours, theirs = socket.socketpair()
    with (
        theirs,
        contextlib.closing(_links.SurvivorLinks([(1, ours.detach(), None, b"")], 2)) as links,
    ):
        theirs.sendall(foreign)
        (gone,) = links.poll(5)
        assert isinstance(gone, _links.LinkEnded)
        assert links.peers == frozenset()
        with contextlib.suppress(ConnectionResetError):
            assert theirs.recv(1) == b""


def test_a_message_comes_in_any_pieces_after_what_the_communicator_sent() -> None:
    frame = _core.CONTROL_MAGIC.ljust(_core.CONTROL_FRAME_BYTES, b"x")
    ours, theirs = socket.socketpair()
    with (
        theirs,
        contextlib.closing(_links.SurvivorLinks([(1, ours.detach(), None, frame[:7])], 2)) as links,
    ):
        sent = frame[7:] + frame + HEAD[:8] + b"\x04\0\0\0\x03" + NO_JOINERS + b"view"
        for cut in range(0, len(sent), 11):
            theirs.sendall(sent[cut : cut + 11])
            events = links.poll(5)
        view = _links.View(frozenset({0, 1}))
        assert events == [_links.Message(1, _links.MessageKind.VIEW, view, b"view")]
        theirs.close()
        assert isinstance(links.poll(5)[0], _links.LinkEnded)


def test_a_message_comes_once_by_several_ways_of_which_any_may_fail() -> None:
    first, second = socket.socketpair(), socket.socketpair()
    ends = [[(1, pair[end].detach(), None, b"") for pair in (first, second)] for end in (0, 1)]
    cut, other = (socket.socket(fileno=os.dup(end[way][1])) for way, end in enumerate(ends))
    view = _links.View(frozenset({0, 1}))
    one, two = (_links.SurvivorLinks(each, 2) for each in ends)
    with contextlib.closing(one), contextlib.closing(two), cut, other:
        for text, fail in ((b"by both", cut), (b"by the second", other)):
            one.send(1, _links.MessageKind.VIEW, view, text)
            events: list[Any] = []
            while not events:
                events += two.poll(5)
            assert events == [_links.Message(1, _links.MessageKind.VIEW, view, text)]
            fail.shutdown(socket.SHUT_RDWR)
        assert isinstance(two.poll(5)[-1], _links.LinkEnded)


def test_a_long_word_is_sent_while_the_peer_reads_it() -> None:
    one, other = (
        _links.SurvivorLinks([(1, a.detach(), None, b"")], 2) for a in socket.socketpair()
    )
    # Both ends are named 1: each takes the other for it.
    with contextlib.closing(one), contextlib.closing(other):
        for _ in range(100):
            view = _links.View(frozenset({0, 1}))
            one.send(1, _links.MessageKind.ADDRESS, view, bytes(60_000))
        heard = 0
        while heard < 100:
            one.poll(0)
            heard += len(other.poll(0.01))


def test_survivors_that_cannot_connect_say_so(monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RendezvousError("no way")

    monkeypatch.setattr("gradwire._bootstrap.shrink.connect_mesh", refuse)
    monkeypatch.setattr("gradwire._bootstrap.shrink._DEATH_REPORT_SECONDS", 0.1)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort("enough")
        comm.shrink()

    ended = outcomes(1, body)
    assert isinstance(ended[0].error, RendezvousError)
