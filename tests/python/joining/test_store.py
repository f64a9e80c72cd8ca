"""The store where ranks meet: values, waiting, counters, limits, and who is let in."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import store as stores
from gradwire._bootstrap import store_server
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose
from gradwire._bootstrap.store import (
    MAX_KEY,
    MAX_LAST_WILL,
    MAX_VALUE,
    Address,
    Status,
    StoreClient,
    receive_answer,
)
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import InvalidArgument, RendezvousError
from ranks import LIMIT, eventually

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    name = f"gradwire-test-{secrets.token_hex(8)}"
    address = Address("unix", name) if request.param == "unix" else Address("tcp", "127.0.0.1", 0)
    with StoreServer(address, "job", SECRET) as server:
        yield server


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    client = connect(server)
    yield client
    client.close()


def connect(server: StoreServer, secret: bytes = SECRET, job: str = "job") -> StoreClient:
    return StoreClient(server.address, job, secret, Deadline(10))


def test_a_value_comes_back_whole(client: StoreClient) -> None:
    value = os.urandom(MAX_VALUE)
    client.set("k", value)
    client.set("empty", b"")
    assert client.get("k", 1) == value
    assert client.get("empty", 1) == b""


def test_a_client_fails_with_the_stores_host(server: StoreServer, client: StoreClient) -> None:
    """A host that has lost its power closes no connection."""
    found = client._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert found == (server.address.scheme == "tcp")
    if server.address.scheme == "tcp":
        assert client._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0


def test_a_route_has_the_addresses_of_both_ends(server: StoreServer, client: StoreClient) -> None:
    local = server.address.scheme == "unix"
    assert client.route() == (None if local else ("127.0.0.1", "127.0.0.1"))


def test_a_later_value_replaces_an_earlier_one(client: StoreClient) -> None:
    client.set("k", b"first")
    client.set("k", b"second")
    assert client.get("k", 1) == b"second"


def test_get_waits_for_another_client(server: StoreServer, client: StoreClient) -> None:
    other = connect(server)
    setter = threading.Thread(target=lambda: other.set("late", b"here"))
    setter.start()
    assert client.get("late", 10) == b"here"
    setter.join()
    other.close()


def test_one_set_wakes_every_waiting_client(server: StoreServer, client: StoreClient) -> None:
    clients = [connect(server) for _ in range(8)]
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda each=each: found.append(each.get("k", 10)))
        for each in clients
    ]
    for thread in threads:
        thread.start()
    client.set("k", b"v")
    for thread, each in zip(threads, clients, strict=True):
        thread.join()
        each.close()
    assert found == [b"v"] * 8


def test_a_request_that_is_interrupted_leaves_no_answer_to_the_next_one(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set_last_will("ended", b"")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gradwire._bootstrap.store.receive_answer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.get("never", 30)
    client.set("k", b"v")
    assert client.get("k", 0) == b"v"
    with pytest.raises(TimeoutError):  # its first connection is open
        client.get("ended", 0)


def test_an_answer_that_comes_too_late_is_none_to_the_next_request(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.set("late", b"late")
    client.set("k", b"v")
    goes_on, execute = threading.Event(), StoreServer._execute

    def hold(*arguments: Any) -> None:
        goes_on.wait(LIMIT)
        execute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StoreServer, "_execute", hold)
        patch.setattr(client, "_margin", 0.01)
        with pytest.raises(RendezvousError, match="lost the store"):
            client.get("late", 0)
    monkeypatch.setattr(stores, "_RECONNECT", LIMIT)
    goes_on.set()
    assert client.get("k", 0) == b"v"


def test_what_waits_for_no_key_is_answered_within_the_margin(client: StoreClient) -> None:
    client.set("k", b"v")
    assert client._sock.gettimeout() <= client._margin


def test_get_gives_up_at_its_deadline_and_the_connection_lives(
    server: StoreServer, client: StoreClient
) -> None:
    with pytest.raises(TimeoutError, match=r"'never' within 0\.05 s"):
        client.get("never", 0.05)
    assert not server._waiting  # nothing is kept of it
    client.set("k", b"v")
    assert client.get("k", 0) == b"v"


def test_whoever_waits_without_end_gets_what_comes() -> None:
    here = Address("tcp", "127.0.0.1", 0)
    with StoreServer(here, "job", SECRET) as server, ThreadPoolExecutor(1) as pool:
        client = StoreClient(server.address, "job", SECRET, Deadline(math.inf))
        value = pool.submit(client.get, "late", math.inf)
        eventually(lambda: server._waiting)  # as long as that
        other = connect(server)
        other.set("late", b"v")
        assert value.result(10) == b"v"
        other.close()
    client.wait_closed(math.inf)
    client.close()


def test_a_deadline_takes_any_number_of_seconds_but_no_nan() -> None:
    assert Deadline(-math.inf).passed
    assert not Deadline(math.inf).within(1e300).passed
    with pytest.raises(InvalidArgument, match="timeout=nan"):
        Deadline(math.nan)


def test_wait_needs_all_keys(client: StoreClient) -> None:
    client.set("a", b"")
    with pytest.raises(TimeoutError, match="'b'"):
        client.wait(["a", "b"], 0.05)
    client.set("b", b"")
    client.wait(["a", "b"], 0.05)


def test_add_counts_over_all_clients(server: StoreServer, client: StoreClient) -> None:
    other = connect(server)
    assert client.add("n") == 1
    assert other.add("n", 41) == 42
    assert client.add("n", -50) == -8
    other.close()


def test_the_last_will_of_a_client_that_ends_is_set(
    server: StoreServer, client: StoreClient
) -> None:
    other = connect(server)
    other.set_last_will("first", b"too early")
    other.set_last_will("last", b"gone")
    with pytest.raises(TimeoutError):
        client.get("last", 0)
    other.close()
    assert client.get("last", 10) == b"gone"
    with pytest.raises(TimeoutError):
        client.get("first", 0)


def test_a_last_will_yields_to_a_value_and_can_be_withdrawn(
    server: StoreServer, client: StoreClient
) -> None:
    client.set("taken", b"value")
    ends = [connect(server) for _ in range(3)]
    ends[0].set_last_will("taken", b"gone")
    ends[1].set_last_will("withdrawn", b"gone")
    ends[1].set_last_will("", b"")
    ends[2].set_last_will("last", b"gone")
    for end in ends:
        end.close()
    assert client.get("last", 10) == b"gone"
    assert client.get("taken", 0) == b"value"
    with pytest.raises(TimeoutError):
        client.get("withdrawn", 0)


def test_a_last_will_that_is_too_long_ends_the_connection(client: StoreClient) -> None:
    client.set_last_will("k", bytes(MAX_LAST_WILL))
    with pytest.raises(RendezvousError, match="lost the store"):
        client.set_last_will("k", bytes(MAX_LAST_WILL + 1))


def test_too_long_keys_and_values_are_refused_before_they_travel(client: StoreClient) -> None:
    with pytest.raises(InvalidArgument, match="keys to 512 bytes"):
        client.set("k" * (MAX_KEY + 1), b"")
    with pytest.raises(InvalidArgument, match=str(MAX_VALUE + 1)):
        client.set("k", bytes(MAX_VALUE + 1))


def test_the_longest_key_travels(client: StoreClient) -> None:
    client.set("k" * MAX_KEY, b"v")
    assert client.get("k" * MAX_KEY, 0) == b"v"


def test_a_key_that_is_no_text_is_a_key(server: StoreServer, client: StoreClient) -> None:
    client._sock.sendall(struct.pack("<BHII", 1, 2, 1, 0) + b"\xff\xfev")
    receive_answer(client._sock, Deadline(LIMIT))
    client.set("k", b"v")


@pytest.mark.parametrize("drops", [False, True])
def test_who_sends_without_end_while_it_waits_fills_no_memory(
    server: StoreServer, client: StoreClient, drops: bool
) -> None:
    most = MAX_KEY + 2 * MAX_VALUE
    sent = most + 3 * store_server._PART if drops else most
    with contextlib.closing(connect(server)) as other:
        other._sock.settimeout(LIMIT)
        other._sock.sendall(struct.pack("<BHII", 2, 1, 0, 60_000) + b"k")
        with contextlib.suppress(ConnectionError):
            other._sock.sendall(bytes(sent))
        if drops:
            with contextlib.suppress(ConnectionError):
                assert other._sock.recv(1) == b""
        else:
            eventually(lambda: sent in [len(each.inbox) for each in list(server._clients)])
            client.set("k", b"v")
            assert receive_answer(other._sock, Deadline(LIMIT))[1] == b"v"


def test_a_value_reaches_a_slow_reader_whole(server: StoreServer, client: StoreClient) -> None:
    value = os.urandom(MAX_VALUE)
    client.set("big", value)
    slow = connect(server)
    slow._sock.sendall(3 * (struct.pack("<BHII", 2, 3, 0, 0) + b"big"))
    for _ in range(3):
        client.set("k", b"v")  # others are served meanwhile
        assert receive_answer(slow._sock, Deadline(LIMIT))[1] == value
    slow.close()


def test_the_thread_of_a_store_waits_for_nobody(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does it hold a program that ends, nor do its descriptors reach another."""
    waits: list[float] = []
    poll = server._authenticator.poll
    monkeypatch.setattr(
        server._authenticator, "poll", lambda wait: waits.append(wait) or poll(wait)
    )
    client.set("k", b"v")
    client.set("k", b"v")
    assert set(waits) == {0}
    assert (server._thread.name, server._thread.daemon) == ("gradwire-store", True)
    assert not os.get_inheritable(server._wake)


def test_who_wants_something_else_is_refused(server: StoreServer) -> None:
    hello = Hello("job", Purpose.STORE, epoch=0, source=-1)
    server._check(hello, mock.Mock())
    with pytest.raises(HandshakeError, match="wants something else"):
        server._check(replace(hello, purpose=Purpose.JOIN), mock.Mock())


def test_a_store_that_is_closed_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET) as server:
        client = connect(server)
        client.set("k", b"v")
    client.close()
    StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET).close()  # was never started
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_that_cannot_be_watched_is_closed() -> None:
    server = StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET)  # without a thread
    one, other = socket.socketpair()
    with one, other, contextlib.closing(server), mock.patch.object(server, "_selector") as selector:
        selector.register.side_effect = OSError("no")
        with pytest.raises(OSError, match="no"):
            server._add_client(store_server._Client(one))
        assert other.recv(1) == b""
        assert not server._clients
    server._selector.close()


def test_a_full_store_says_so(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "MAX_TOTAL", 1000 + store_server._ENTRY_BYTES)
    client.set("a", bytes(990))
    client.set("a", bytes(995))
    with pytest.raises(RendezvousError, match="full"):
        client.set("b", bytes(10))
    assert client.get("a", 1) == bytes(995)
    client.set("a", bytes(999))  # and a byte of the key
    with pytest.raises(RendezvousError, match="full"):
        client.set("a", bytes(1000))


def test_many_small_keys_fill_a_store_too(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MAX_TOTAL", 100 * store_server._ENTRY_BYTES)
    set_all(client, range(50))
    with pytest.raises(RendezvousError, match="full"):
        set_all(client, range(50, 101))


def set_all(client: StoreClient, numbers: Iterable[int]) -> None:
    for number in numbers:
        client.set(str(number), b"")


def test_a_counter_wraps_and_only_counters_count(server: StoreServer, client: StoreClient) -> None:
    assert client.add("n", 2**63 - 1) == 2**63 - 1
    assert client.add("n", 1) == -(2**63)
    other = connect(server)
    other.set("text", b"no counter")
    with pytest.raises(RendezvousError, match="lost the store"):
        other.add("text")
    other.close()
    assert client.get("text", 1) == b"no counter"


def test_who_asks_without_reading_fills_no_memory(server: StoreServer, client: StoreClient) -> None:
    client.set("big", bytes(MAX_VALUE))
    greedy = connect(server)
    greedy._sock.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        greedy._sock.sendall(100_000 * (struct.pack("<BHII", 2, 3, 0, 0) + b"big"))
    assert client.get("big", 1) == bytes(MAX_VALUE)  # others are served meanwhile
    assert sum(len(each.outbox) for each in list(server._clients)) <= 2 * (5 + MAX_VALUE)
    greedy.close()


@pytest.mark.parametrize(
    "answer",
    [struct.pack("<BI", 0, MAX_VALUE + 1), struct.pack("<BI", 0, 2**32 - 1), b"HTTP/1.1 400"],
    ids=["size", "largest size", "status"],
)
def test_an_answer_that_no_store_gives_is_a_lost_store(answer: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        with pytest.raises(ConnectionError, match="it answered with"):
            receive_answer(ours, Deadline(10))


@pytest.mark.parametrize(
    "request_",
    [
        struct.pack("<BHII", 9, 1, 0, 0) + b"k",
        struct.pack("<BHII", 1, 0xFFFF, 0, 0),
        struct.pack("<BHII", 1, 1, 0xFFFFFFFF, 0),
        struct.pack("<BHII", 3, 1, 1, 0) + b"kv",
    ],
    ids=["operation", "key size", "value size", "counter size"],
)
def test_a_client_that_breaks_the_protocol_is_dropped(
    server: StoreServer, client: StoreClient, request_: bytes
) -> None:
    other = connect(server)
    other._sock.sendall(request_)
    other._sock.settimeout(10)
    assert other._sock.recv(1) == b""
    other.close()
    client.set("k", b"others go on")


def test_a_client_that_leaves_while_it_waits_is_forgotten(
    server: StoreServer, client: StoreClient
) -> None:
    other = connect(server)
    other._sock.sendall(struct.pack("<BHII", 2, 1, 0, 60_000) + b"k")
    other.close()
    client.set("k", b"v")
    assert client.get("k", 1) == b"v"


def test_who_was_refused_gets_no_value_later() -> None:
    """It would take it for the answer to its next request."""
    address = Address("tcp", "127.0.0.1", 0)
    with (
        StoreServer(address, "job", SECRET, one_rendezvous=True) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        client, other = connect(server), connect(server)
        waiting = pool.submit(client.get, "k", LIMIT)
        eventually(lambda: server._waiting)
        server._authenticator.excluded = 1, "127.0.0.1"
        other.set("next", b"")
        with pytest.raises(RendezvousError, match="cannot admit rank 1"):
            waiting.result()
        other.set("k", b"late")
        assert client.get("next", LIMIT) == b""
        client.close()
        other.close()


def test_the_secret_is_needed(server: StoreServer) -> None:
    with pytest.raises(RendezvousError, match=r"not ours.*another secret"):
        connect(server, secret=b"another-secret-of-16")


def test_a_store_that_ends_is_an_error_that_says_so() -> None:
    with StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET) as server:
        client = connect(server)
    with pytest.raises(RendezvousError, match=f"lost the store at {server.address}"):
        client.get("k", 1)
    client.close()


def test_a_host_that_gives_up_tells_waiting_clients_why() -> None:
    server = StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET).start()
    client, onlooker = connect(server), connect(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "k", 10)
        while not server._waiting:
            onlooker.set("unrelated", b"")
        server.close("rank 2 of 4 did not appear")
        with pytest.raises(RendezvousError, match="gave up: rank 2 of 4 did not appear"):
            waiting.result()
    client.close()
    onlooker.close()


def test_a_store_that_never_comes_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(RendezvousError, match=r"could not reach the store .* within 0\.1 s"):
        StoreClient(Address("tcp", "127.0.0.1", port), "job", SECRET, Deadline(0.1))


def test_a_reason_that_is_cut_off_within_a_letter_is_told(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Status.CLOSED, "ü".encode()[:1]
    monkeypatch.setattr(stores, "receive_answer", lambda *_: closed)
    with pytest.raises(RendezvousError, match="gave up: \ufffd"):
        client.get("k", 1)


def test_a_store_that_has_ended_is_gone() -> None:
    server = StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET).start()
    client = connect(server)
    assert not client.gone()
    client.wait_closed(0.01)  # returns
    assert not client.gone()
    server.close()
    client.wait_closed(LIMIT)
    assert client.gone()
    client.close()


def test_a_client_whose_answer_is_awaited_connects_to_a_store_that_is_there(
    client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    connects = mock.Mock(side_effect=ConnectionRefusedError("gone"))
    monkeypatch.setattr(client, "_connect", connects)
    client._interrupted.append(client._sock)
    with pytest.raises(RendezvousError, match="gone"):
        client.set("k", b"v")
    assert connects.call_args.kwargs == {"listens": True}


def test_a_client_may_come_before_its_store() -> None:
    address = Address("unix", f"gradwire-test-{secrets.token_hex(8)}")
    values: list[bytes] = []

    def early() -> None:
        client = StoreClient(address, "job", SECRET, Deadline(10))
        values.append(client.get("k", 10))
        client.close()

    thread = threading.Thread(target=early)
    thread.start()
    with StoreServer(address, "job", SECRET) as server:
        client = connect(server)
        client.set("k", b"v")
        thread.join()
        client.close()
    assert values == [b"v"]
