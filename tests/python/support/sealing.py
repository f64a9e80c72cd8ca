"""Sealed ends of sockets, and a program in between that changes what passes."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
from collections.abc import Callable

from gradwire import _core
from gradwire._host.encryption import Setting, setting
from gradwire._host.sealed_socket import SealedSocket

Pair = tuple[socket.socket, socket.socket]
# What becomes of the bytes of one piece; None: the connection ends after what was passed on.
Attack = Callable[[bytes], list[bytes | None]]


def seals() -> tuple[_core.Seal, _core.Seal]:
    """The keys of two ends, as their handshake makes them."""
    one, other = (_core.Noise(first, b"", bytes(32)) for first in (True, False))
    other.read(one.write(b""))
    one.read(other.write(b""))
    cipher = _core.Cipher.AES_128_GCM
    return one.seal(cipher), other.seal(cipher)


def sealed(one: socket.socket, other: socket.socket) -> Pair:
    """Two sockets that lead to each other, with keys."""
    here, there = seals()
    return SealedSocket(one, here), SealedSocket(other, there)


def as_set(one: socket.socket, other: socket.socket) -> Pair:
    """The same, where GRADWIRE_ENCRYPTION is on and they are TCP; else as they are."""
    tcp = one.family != socket.AF_UNIX
    return sealed(one, other) if tcp and setting() is Setting.ON else (one, other)


def tcp_pair() -> Pair:
    """Two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def flip(data: bytes) -> list[bytes | None]:
    """One bit in the middle."""
    at = len(data) // 2
    return [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]]


def drop(data: bytes) -> list[bytes | None]:
    """A byte in the middle is missing."""
    at = len(data) // 2
    return [data[:at] + data[at + 1 :]]


def repeat(data: bytes) -> list[bytes | None]:
    """All of it, twice."""
    return [data, data]


def reorder(data: bytes) -> list[bytes | None]:
    """The second half first."""
    at = len(data) // 2
    return [data[at:], data[:at]]


def truncate(data: bytes) -> list[bytes | None]:
    """The last byte is missing, and nothing follows."""
    return [data[:-1], None]


ATTACKS = (flip, drop, repeat, reorder, truncate)


class Middle:
    """Passes on what two sockets receive; once armed, attacks the next piece of the first's."""

    def __init__(self, from_first: socket.socket, from_second: socket.socket) -> None:
        self._ends = from_first, from_second
        self._attack: Attack | None = None
        self.attacked = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def arm(self, attack: Attack) -> None:
        """Has the next piece from the first end attacked."""
        self._attack = attack

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
            for end, other in (self._ends, self._ends[::-1]):
                selector.register(end, selectors.EVENT_READ, other)
            while True:
                for key, _ in selector.select():
                    source, target = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    if not self._pass_on(source, target):
                        raise ConnectionResetError
        for end in self._ends:
            end.close()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> bool:
        data = source.recv(1 << 16)
        pieces: list[bytes | None] = [data]
        if data and source is self._ends[0] and self._attack is not None:
            pieces, self._attack = self._attack(data), None
            self.attacked.set()
        for piece in pieces:
            if not piece:
                return False
            target.sendall(piece)
        return True


def sealed_with_middle() -> tuple[Pair, Middle]:
    """Two sealed ends, and a program between them: what the first end sends can be attacked."""
    (one, near), (far, other) = tcp_pair(), tcp_pair()
    return sealed(one, other), Middle(near, far)


class Impostor:
    """Listens, and puts a Middle between each client and the server at an address."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.middles: queue.SimpleQueue[Middle] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.middles.put(Middle(client, socket.create_connection(self._server)))

    def close(self) -> None:
        """Accepts no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
