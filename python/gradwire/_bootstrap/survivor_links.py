"""SurvivorLinks: the control sockets that outlived their communicator carry shrink's messages.

    magic "GRS1", kind, 3 zero bytes, length of the payload; the view, one bit a rank; the payload

Frames that the communicator itself had sent come first and are skipped. The peer authenticated
itself when the socket was made, but its bytes are checked all the same: a peer that sends anything
else counts as gone.
"""

from __future__ import annotations

import enum
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire import _core

View = frozenset[int]  # ranks of the failed communicator

_HEAD = struct.Struct("<4sB3sI")
_MAGIC = b"GRS1"
_MAX_PAYLOAD = 1 << 16
_CHUNK = 1 << 16


class MessageKind(enum.IntEnum):
    """The statement that a message makes about its view."""

    VIEW = 1  # the sender takes exactly these ranks to be alive
    ADDRESS = 2  # all of them agree; the payload is the sender's AddressInfo
    READY = 3  # the sender is connected to all of them
    DONE = 4  # all of them are, and the sender is in the new communicator


class Message(NamedTuple):
    """One message of a peer."""

    peer: int
    kind: MessageKind
    view: View
    payload: bytes


class LinkEnded(NamedTuple):
    """The end of a peer's link; reported once."""

    peer: int
    reason: str


@dataclass
class _Link:
    sock: socket.socket
    incoming: bytearray
    outgoing: bytearray = field(default_factory=bytearray)


class SurvivorLinks:
    """The links of one rank, which owns them; one thread uses them."""

    def __init__(self, released: Sequence[tuple[int, int, bytes]], size: int) -> None:
        """Takes over (peer, descriptor, bytes already read of its next frame) of each survivor."""
        self._size = size
        self._links = {
            peer: _Link(socket.socket(fileno=fd), bytearray(received))
            for peer, fd, received in released
        }
        self._selector = selectors.DefaultSelector()
        for peer, link in self._links.items():
            link.sock.setblocking(False)
            self._selector.register(link.sock, selectors.EVENT_READ, peer)

    @property
    def peers(self) -> View:
        """The peers whose link has not ended."""
        return frozenset(self._links)

    def send(self, peer: int, kind: MessageKind, view: View, payload: bytes = b"") -> None:
        """Sends as much as fits now, the rest during poll(); ignores a peer that is gone."""
        link = self._links.get(peer)
        if link is not None:
            bits = sum(1 << rank for rank in view).to_bytes(self._view_bytes, "little")
            link.outgoing += _HEAD.pack(_MAGIC, kind, bytes(3), len(payload)) + bits + payload
            self._push_out(peer, link)

    def poll(self, timeout: float) -> list[Message | LinkEnded]:
        """Receives messages, in each peer's order; waits up to `timeout` seconds for the first."""
        events: list[Message | LinkEnded] = []
        for key, ready in self._selector.select(timeout):
            link = self._links[key.data]
            if ready & selectors.EVENT_WRITE:
                self._push_out(key.data, link)
            if ready & selectors.EVENT_READ:
                events += self._read(key.data, link)
        return events

    def close(self) -> None:
        """Closes every link."""
        for peer in self.peers:
            self._end(peer)
        self._selector.close()

    @property
    def _view_bytes(self) -> int:
        return (self._size + 7) // 8

    def _push_out(self, peer: int, link: _Link) -> None:
        try:
            del link.outgoing[: link.sock.send(link.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # messages sent before it ended are still to be read
            link.outgoing.clear()
        writing = selectors.EVENT_WRITE if link.outgoing else 0
        self._selector.modify(link.sock, selectors.EVENT_READ | writing, peer)

    def _read(self, peer: int, link: _Link) -> Iterator[Message | LinkEnded]:
        try:
            part = link.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            part, reason = b"", str(error)
        else:
            reason = "it ended or released the communicator"
        link.incoming += part
        try:
            yield from self._messages(peer, link.incoming)
        except ValueError as error:
            part, reason = b"", str(error)
        if not part:
            self._end(peer)
            yield LinkEnded(peer, reason)

    def _messages(self, peer: int, data: bytearray) -> Iterator[Message]:
        """Takes whole messages off the front; raises ValueError for bytes that are none."""
        while len(data) >= _HEAD.size:
            if data.startswith(_core.CONTROL_MAGIC):
                if len(data) < _core.CONTROL_FRAME_BYTES:
                    return
                del data[: _core.CONTROL_FRAME_BYTES]
                continue
            kind, length = _unpack_head(bytes(data[: _HEAD.size]))
            start = _HEAD.size + self._view_bytes
            if len(data) < start + length:
                return
            view = self._unpack_view(peer, bytes(data[_HEAD.size : start]))
            payload = bytes(data[start : start + length])
            del data[: start + length]
            yield Message(peer, kind, view, payload)

    def _unpack_view(self, peer: int, raw: bytes) -> View:
        bits = int.from_bytes(raw, "little")
        if bits >> self._size or not bits >> peer & 1:
            raise ValueError("it sent a view that cannot be its own")
        return frozenset(rank for rank in range(self._size) if bits >> rank & 1)

    def _end(self, peer: int) -> None:
        link = self._links.pop(peer)
        self._selector.unregister(link.sock)
        link.sock.close()


def _unpack_head(raw: bytes) -> tuple[MessageKind, int]:
    magic, kind, zeros, length = _HEAD.unpack(raw)
    if magic != _MAGIC or any(zeros) or length > _MAX_PAYLOAD:
        raise ValueError("it sent bytes that are no message of a shrink")
    return MessageKind(kind), length
