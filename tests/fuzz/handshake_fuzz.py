"""The handshake: what a stranger says to a listener, and what a false server answers a rank.

input: 1 byte, which of the two, and whether a genuine hello or challenge comes first; the bytes
"""

from __future__ import annotations

import logging
import socket
import sys

import atheris
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.authenticator import Authenticator
from instrument import cover

SECRET = b"0123456789abcdef"
HELLO = handshake.Hello("job", handshake.Purpose.CONTROL, 3, 1, source=2, target=0)


def expect(hello: handshake.Hello, _: socket.socket) -> None:
    """What a rank's listener does with a hello that it does not expect."""
    if hello.target != 0:
        raise handshake.HandshakeError("this is rank 0")


def to_a_listener(data: bytes) -> None:
    """Nobody gets in without the secret, and the authenticator forgets whoever tried."""
    stranger, ours = socket.socketpair()
    authenticator = Authenticator([], "job", SECRET, expect)
    authenticator.begin_handshake(ours, "fuzz")
    with stranger:
        for at in range(0, len(data), 32):
            stranger.send(data[at : at + 32])
            assert not authenticator.poll(0)
            if not authenticator.pending:
                break
    while authenticator.pending:  # it sees the end
        assert not authenticator.poll(0)
    authenticator.close()


def before_a_false_server(data: bytes) -> None:
    """A rank goes on with nobody that does not know the secret."""
    ours, stranger = socket.socketpair()
    with ours, stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        try:
            handshake.client_handshake(ours, HELLO, SECRET, Deadline(10))
        except ConnectionError:
            return
    raise AssertionError("it took a stranger for the server")


def test_one_input(data: bytes) -> None:
    """Runs one input."""
    kind, rest = data[:1], data[1:4096]
    if kind < b"\x40":
        to_a_listener(rest)
    elif kind < b"\x80":
        to_a_listener(HELLO.pack() + rest)
    else:
        before_a_false_server(rest)


logging.disable()
cover(handshake)
atheris.Setup(sys.argv, test_one_input)
atheris.Fuzz()
