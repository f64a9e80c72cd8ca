"""SurvivorLinks: the control sockets that outlived their communicator carry shrink's messages.

    magic "GRS2", kind, round, bytes of a set of ranks, length of the payload
    the view: ranks, one bit each; 1 if joiners are known, else 0; joiners, one bit each, in 8 bytes
    the payload

Frames that the communicator itself had sent come first and are skipped. Where two ranks have
several ways to each other, each way's socket carries all messages, and the first copy counts: so
the ends need not agree on a way, and one may fail meanwhile. The peer authenticated
itself when the socket was made, but its bytes are checked all the same: a peer that sends anything
else counts as gone. Links between a leader and its joiners (`joiners`) carry the same messages.
"""

from __future__ import annotations

import enum
import json
import selectors
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire import _core
from gradwire._base.texts import read_fields
from gradwire._errors import RendezvousError
from gradwire._host.keepalive import fail_with_host
from gradwire._host.sealed_socket import take_over

MOST_JOINERS = 64  # of one leader in one resize
MAX_NUMBER = 1 << 31  # of ranks and of numbers in the job, which are below it
_HEAD = struct.Struct("<4sBBHI")
_JOINERS = struct.Struct("<BQ")
_MAX_PAYLOAD = 1 << 26  # the addresses of MOST_RANKS, of about 350 bytes each
_MAX_RANKS_BYTES = 1 << 14
MOST_RANKS = 8 * _MAX_RANKS_BYTES
_CHUNK = 1 << 16


class View(NamedTuple):
    """The members of a new communicator: ranks of the old one, and joiners of their leader.

    The leader is the lowest rank. `joiners` is None until it has said whom it admits; in a later
    `round` it admits others.
    """

    ranks: frozenset[int]
    joiners: frozenset[int] | None = frozenset()
    round: int = 0

    @property
    def leader(self) -> int:
        """The lowest rank."""
        return min(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks and known joiners."""
        return len(self.ranks) + len(self.joiners or ())

    def intersect(self, other: View) -> View:
        """The largest view that is within both.

        A view is within another if its ranks are, and, with the same leader, its round is later,
        or the same and its joiners are. So views get smaller at most so many times.
        """
        ranks = self.ranks & other.ranks
        if not ranks:
            return View(ranks)
        same = [each for each in (self, other) if min(each.ranks) == min(ranks)]
        if not same:
            return View(ranks, None)
        last = max(each.round for each in same)
        known = [each.joiners for each in same if each.round == last and each.joiners is not None]
        return View(ranks, frozenset.intersection(*known) if known else None, last)


class MessageKind(enum.IntEnum):
    """The statement that a message makes about its view."""

    VIEW = 1  # the sender takes exactly these ranks to be alive
    ADDRESS = 2  # all of them agree; the payload is the sender's AddressInfo
    READY = 3  # the sender is connected to all of them
    DONE = 4  # all of them are, and the sender is in the new communicator
    INVITE = 5  # to a joiner: the payload is its Invitation to them
    TOO_FEW = 6  # the leader waits no longer for more of them
    OVER = 7  # to a joiner that waits: the job has come to its end


class Message(NamedTuple):
    """One message of a peer."""

    peer: int
    kind: MessageKind
    view: View
    payload: bytes


@dataclass(frozen=True)
class Addresses:
    """Packed AddressInfos, and numbers in the job: of joiners from a leader, of all to a joiner."""

    addresses: list[bytes]
    job_ranks: list[int] = field(default_factory=list)

    def pack(self) -> bytes:
        """Encodes both as JSON."""
        texts = [each.decode() for each in self.addresses]
        return json.dumps({"addresses": texts, "job_ranks": self.job_ranks}).encode()


def unpack_addresses(data: bytes, addresses: int, job_ranks: int) -> Addresses:
    """Decodes so many addresses and numbers; raises ValueError for anything else."""
    found = read_fields(data, addresses=list, job_ranks=list)
    texts, numbers = found["addresses"], found["job_ranks"]
    if len(texts) != addresses or len(numbers) != job_ranks:
        raise ValueError("it has another number of members")
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("an address is no text")
    if not all(type(each) is int and 0 <= each < MAX_NUMBER for each in numbers):
        raise ValueError("a rank of the job is out of range")
    return Addresses([each.encode() for each in texts], numbers)


class LinkEnded(NamedTuple):
    """The end of a peer's link; reported once."""

    peer: int
    reason: str


@dataclass(eq=False)
class _Line:
    peer: int
    sock: socket.socket
    incoming: bytearray
    outgoing: bytearray = field(default_factory=bytearray)
    heard: int = 0  # messages


@dataclass
class _Link:
    lines: list[_Line] = field(default_factory=list)  # one, or one for each way
    heard: int = 0  # messages, by the line that has brought the most


class SurvivorLinks:
    """The links of one rank, which owns them; one thread uses them."""

    def __init__(
        self, released: Sequence[tuple[int, int, _core.Seal | None, bytes]], size: int
    ) -> None:
        """Takes over (peer, descriptor, keys, bytes read of its next frame) of each socket."""
        self._size = size
        self._links: dict[int, _Link] = {}
        self._selector = selectors.DefaultSelector()
        for peer, fd, seal, received in released:
            sock = take_over(fd, seal)
            fail_with_host(sock, always_read=True)  # one of several ways did not
            self.add(peer, sock, received)

    def add(self, peer: int, sock: socket.socket, received: bytes = b"") -> None:
        """Takes over a socket of a peer; those from `size` on are no ranks, but joiners."""
        sock.setblocking(False)
        line = _Line(peer, sock, bytearray(received))
        self._links.setdefault(peer, _Link()).lines.append(line)
        self._selector.register(sock, selectors.EVENT_READ, line)

    @property
    def peers(self) -> frozenset[int]:
        """The peers whose link has not ended."""
        return frozenset(self._links)

    def send(self, peer: int, kind: MessageKind, view: View, payload: bytes = b"") -> None:
        """Sends as much as fits now, the rest during poll(); ignores a peer that is gone."""
        link = self._links.get(peer)
        if link is not None:
            message = pack_message(kind, view, payload)
            for line in link.lines:
                line.outgoing += message
                self._push_out(line)

    def poll(self, timeout: float) -> list[Message | LinkEnded]:
        """Receives messages, in each peer's order; waits up to `timeout` seconds for the first."""
        events: list[Message | LinkEnded] = []
        for key, ready in self._selector.select(timeout):
            line = key.data
            if line.peer not in self._links:
                continue
            if ready & selectors.EVENT_WRITE:
                self._push_out(line)
            if ready & selectors.EVENT_READ:
                events += self._read(self._links[line.peer], line)
        return events

    def end(self, peer: int) -> None:
        """Closes the link to a peer, if it has not ended; that is not reported."""
        if peer in self._links:
            self._end(peer)

    def close(self) -> None:
        """Closes every link."""
        for peer in self.peers:
            self._end(peer)
        self._selector.close()

    def _push_out(self, line: _Line) -> None:
        try:
            del line.outgoing[: line.sock.send(line.outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # messages sent before it ended are still to be read
            line.outgoing.clear()
        writing = selectors.EVENT_WRITE if line.outgoing else 0
        self._selector.modify(line.sock, selectors.EVENT_READ | writing, line)

    def _read(self, link: _Link, line: _Line) -> Iterator[Message | LinkEnded]:
        try:
            part = line.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            part, reason = b"", str(error)
        else:
            reason = "it ended or released the communicator"
        line.incoming += part
        try:
            for message in self._messages(line.peer, line.incoming):
                line.heard += 1
                if line.heard > link.heard:
                    link.heard = line.heard
                    yield message
        except ValueError as error:
            part, reason = b"", str(error)
        if not part:
            self._close(line)
            link.lines.remove(line)
            if not link.lines:
                del self._links[line.peer]
                yield LinkEnded(line.peer, reason)

    def _messages(self, peer: int, data: bytearray) -> Iterator[Message]:
        """Takes whole messages off the front; raises ValueError for bytes that are none."""
        while len(data) >= _HEAD.size:
            if data.startswith(_core.CONTROL_MAGIC):
                if len(data) < _core.CONTROL_FRAME_BYTES:
                    return
                del data[: _core.CONTROL_FRAME_BYTES]
                continue
            kind, number, ranks_bytes, length = _unpack_head(bytes(data[: _HEAD.size]))
            start = _HEAD.size + ranks_bytes + _JOINERS.size
            if len(data) < start + length:
                return
            view = self._unpack_view(peer, number, bytes(data[_HEAD.size : start]))
            payload = bytes(data[start : start + length])
            del data[: start + length]
            yield Message(peer, kind, view, payload)

    def _unpack_view(self, peer: int, number: int, raw: bytes) -> View:
        bits = int.from_bytes(raw[: -_JOINERS.size], "little")
        known, joiners = _JOINERS.unpack(raw[-_JOINERS.size :])
        own = peer >= self._size or bits >> peer & 1
        if bits >> self._size or not bits or not own or known > 1 or (joiners and not known):
            raise ValueError("it sent a view that cannot be its own")
        return View(_members(bits), _members(joiners) if known else None, number)

    def _end(self, peer: int) -> None:
        for line in self._links.pop(peer).lines:
            self._close(line)

    def _close(self, line: _Line) -> None:
        self._selector.unregister(line.sock)
        line.sock.close()


def pack_message(kind: MessageKind, view: View, payload: bytes = b"") -> bytes:
    """Encodes a message; raises RendezvousError for a payload that no peer would accept."""
    if len(payload) > _MAX_PAYLOAD:
        raise RendezvousError(
            f"a message of {len(payload)} bytes to the others, more than {_MAX_PAYLOAD}: the ranks "
            "are too many to resize"
        )
    ranks = _bits(view.ranks)
    ranks_bytes = ranks.to_bytes((ranks.bit_length() + 7) // 8, "little")
    head = _HEAD.pack(_core.RELEASED_MAGIC, kind, view.round, len(ranks_bytes), len(payload))
    joiners = _JOINERS.pack(view.joiners is not None, _bits(view.joiners or ()))
    return head + ranks_bytes + joiners + payload


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


def _members(bits: int) -> frozenset[int]:
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)


def _unpack_head(raw: bytes) -> tuple[MessageKind, int, int, int]:
    magic, kind, number, ranks_bytes, length = _HEAD.unpack(raw)
    if magic != _core.RELEASED_MAGIC or ranks_bytes > _MAX_RANKS_BYTES or length > _MAX_PAYLOAD:
        raise ValueError("it sent bytes that are no message of a shrink")
    return MessageKind(kind), number, ranks_bytes, length
