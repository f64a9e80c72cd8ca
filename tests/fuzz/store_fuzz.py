"""The store: requests of clients that speak as they like, and answers of a server that does.

input: 1 byte, which of the two; then for each client in turn 1 byte number of bytes, the bytes
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import atheris
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import store, store_server
from instrument import cover

ADDRESS = store.Address("unix", f"gradwire-fuzz-{os.getpid()}")
GET = store.REQUEST.pack(store.Operation.GET, 6, 0, 0) + b"honest"
SET = store.REQUEST.pack(store.Operation.SET, 6, 5, 0) + b"honestvalue"


class Table:
    """A server without its thread, and clients that it let in."""

    def __init__(self) -> None:
        self._server = store_server.StoreServer(ADDRESS, "job", b"0123456789abcdef")
        self._server._selector.register(self._server._wake, 1)

    def seat(self) -> tuple[socket.socket, store_server._Client]:
        """A connection and what the server keeps of it."""
        ours, theirs = socket.socketpair()
        client = store_server._Client(theirs)
        self._server._add_client(client)
        ours.setblocking(False)
        return ours, client

    def say(self, sock: socket.socket, client: store_server._Client, data: bytes) -> None:
        """One client speaks, the server takes its turn."""
        with contextlib.suppress(OSError):  # the server dropped it
            sock.send(data)
        if client in self._server._clients:
            self._server._handle(client)

    def held(self) -> int:
        """The bytes that all clients together make the server keep for them."""
        return sum(len(each.inbox) + len(each.outbox) for each in self._server._clients)

    def close(self) -> None:
        """Ends it."""
        self._server.close()


def before_hostile_clients(data: bytes) -> None:
    """Checks that a third client is served, whatever two send, and that they fill no memory."""
    table = Table()
    seats = [table.seat(), table.seat()]
    turn = 0
    while data:
        size, data = 1 + data[0], data[1:]
        table.say(*seats[turn % 2], data[:size])
        data, turn = data[size:], turn + 1
        assert table.held() < 4 * store.MAX_VALUE
    seats.append(table.seat())
    table.say(*seats[2], SET)
    table.say(*seats[2], GET)
    answers = store.ANSWER.pack(0, 0) + store.ANSWER.pack(0, 5) + b"value"
    assert seats[2][0].recv(64) == answers
    for sock, client in seats:
        sock.close()
        table.say(sock, client, b"")
    table.close()


def before_a_hostile_server(data: bytes) -> None:
    """An answer is one of ours, or an error that a client reports as a lost store."""
    ours, server = socket.socketpair()
    with ours, server:
        server.sendall(data)
        server.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            status, value = store.receive_answer(ours, Deadline(10))
            assert status in list(store.Status)
            assert len(value) <= store.MAX_VALUE


def test_one_input(data: bytes) -> None:
    """Runs one input."""
    kind, rest = data[:1], data[1:4096]
    if kind < b"\xc0":
        before_hostile_clients(rest)
    else:
        before_a_hostile_server(rest)


cover(store, store_server)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()
