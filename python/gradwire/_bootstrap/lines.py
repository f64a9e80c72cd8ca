"""Lines: the control sockets that outlived their communicator, as messages between survivors.

    magic "GRS1", kind, 3 zero bytes, length of the payload; the view, one bit a rank; the payload

What the communicator itself sent comes first and is skipped. The other end has authenticated
itself once, but its bytes are checked all the same: who sends others counts as gone.
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


class Kind(enum.IntEnum):
    """What a message tells of the view that it carries."""

    VIEW = 1  # the sender takes exactly these ranks for alive
    CARD = 2  # all of them agree; the payload says where the sender listens
    READY = 3  # the sender is connected to all of them
    DONE = 4  # all of them are, and the sender is in the new communicator


class Message(NamedTuple):
    """What a peer said."""

    peer: int
    kind: Kind
    view: View
    payload: bytes


class Gone(NamedTuple):
    """A peer's line ended; told once."""

    peer: int
    reason: str


@dataclass
class _Line:
    sock: socket.socket
    incoming: bytearray
    outgoing: bytearray = field(default_factory=bytearray)


class Lines:
    """The lines of one rank, which owns them; one thread uses them."""

    def __init__(self, released: Sequence[tuple[int, int, bytes]], size: int) -> None:
        """Takes over (peer, descriptor, what was read of its next frame)."""
        self._size = size
        self._lines = {
            peer: _Line(socket.socket(fileno=fd), bytearray(received))
            for peer, fd, received in released
        }
        self._selector = selectors.DefaultSelector()
        for peer, line in self._lines.items():
            line.sock.setblocking(False)
            self._selector.register(line.sock, selectors.EVENT_READ, peer)

    @property
    def peers(self) -> View:
        """Whose line has not ended."""
        return frozenset(self._lines)

    def send(self, peer: int, kind: Kind, view: View, payload: bytes = b"") -> None:
        """Sends as much as fits now, the rest during poll(); nothing to who is gone."""
        line = self._lines.get(peer)
        if line is not None:
            bits = sum(1 << rank for rank in view).to_bytes(self._view_bytes, "little")
            line.outgoing += _HEAD.pack(_MAGIC, kind, bytes(3), len(payload)) + bits + payload
            self._push_out(peer, line)

    def poll(self, timeout: float) -> list[Message | Gone]:
        """What has arrived, each peer's in its order; waits at most so many seconds for some."""
        events: list[Message | Gone] = []
        for key, ready in self._selector.select(timeout):
            line = self._lines[key.data]
            if ready & selectors.EVENT_WRITE:
                self._push_out(key.data, line)
            if ready & selectors.EVENT_READ:
                events += self._read(key.data, line)
        return events

    def close(self) -> None:
        """Closes every line."""
        for peer in self.peers:
            self._end(peer)
        self._selector.close()

    @property
    def _view_bytes(self) -> int:
        return (self._size + 7) // 8

    def _push_out(self, peer: int, line: _Line) -> None:
        try:
            del line.outgoing[: line.sock.send(line.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # what it said before it went is still to be read
            line.outgoing.clear()
        writing = selectors.EVENT_WRITE if line.outgoing else 0
        self._selector.modify(line.sock, selectors.EVENT_READ | writing, peer)

    def _read(self, peer: int, line: _Line) -> Iterator[Message | Gone]:
        try:
            part = line.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            part, reason = b"", str(error)
        else:
            reason = "it ended or let go of the communicator"
        line.incoming += part
        try:
            yield from self._messages(peer, line.incoming)
        except ValueError as error:
            part, reason = b"", str(error)
        if not part:
            self._end(peer)
            yield Gone(peer, reason)

    def _messages(self, peer: int, data: bytearray) -> Iterator[Message]:
        """Takes whole messages off the front; raises ValueError for what is none."""
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
        line = self._lines.pop(peer)
        self._selector.unregister(line.sock)
        line.sock.close()


def _unpack_head(raw: bytes) -> tuple[Kind, int]:
    magic, kind, zeros, length = _HEAD.unpack(raw)
    if magic != _MAGIC or any(zeros) or length > _MAX_PAYLOAD:
        raise ValueError("it sent bytes that are no message of a shrink")
    return Kind(kind), length
