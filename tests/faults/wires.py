"""The sockets between the ranks of a case, with a wire in the middle of the one that is tampered.

A wire carries what arrives at either end to the other, descriptors too, and lets a tap change what
passes. Used by one thread, the supervisor's; nothing here blocks.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire._bootstrap.mesh import LANES, Job, Link, Mesh, Peer
from gradwire._host.interfaces import LOOPBACK
from sealing import as_set, tcp_pair

from tests.faults.cases import Case

_READ = 256 * 1024
_FULL = 4 * _READ  # bytes that wait in a flow before it stops reading
_ABORT_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: TCP sends RST

Pair = tuple[socket.socket, socket.socket]
Tap = Callable[[bytes], bytes]  # sees all bytes of a flow, in pieces; what it returns goes on


@dataclass
class Wiring:
    """One mesh for each rank, and the wire that the fault asked for, if any."""

    meshes: list[Mesh]
    wire: Wire | None = None

    def keep_only(self, rank: int) -> None:
        """Closes all sockets in a rank's process but its own."""
        for mesh in self.meshes:
            if mesh.rank != rank:
                mesh.close()
        if self.wire is not None:
            self.wire.close()


def connect(case: Case, *, tapped: bool) -> Wiring:
    """Joins every pair of ranks by its three sockets; the fault's own goes over a wire."""
    job = Job("faults", b"0" * 32)
    p = case.ranks
    wiring = Wiring([Mesh(job, rank, p, 7, ("here",) * p, {}, LOOPBACK) for rank in range(p)])
    for low in range(p):
        for high in range(low + 1, p):
            pairs = {lane: _pair(case.link(low, high)) for lane in ("control", *LANES)}
            if tapped and {low, high} == {case.fault.faulty, case.fault.peer}:
                pairs[case.fault.lane] = _insert_wire(wiring, case, low, pairs[case.fault.lane])
            for name, pair in pairs.items():
                pairs[name] = as_set(*pair)
            for end, (owner, other) in enumerate(((low, high), (high, low))):
                links = {lane: Link(case.link(low, high), pairs[lane][end]) for lane in LANES}
                wiring.meshes[owner].peers[other] = Peer(True, pairs["control"][end], links)
    return wiring


def _insert_wire(wiring: Wiring, case: Case, low: int, lower: Pair) -> Pair:
    higher = _pair(case.link(case.fault.faulty, case.fault.peer))
    faulty_is_low = case.fault.faulty == low
    wiring.wire = Wire(lower[1], higher[0]) if faulty_is_low else Wire(higher[0], lower[1])
    return lower[0], higher[1]


def _pair(transport: str) -> Pair:
    return tcp_pair() if transport == "tcp" else socket.socketpair()


@dataclass
class Flow:
    """One direction of a wire."""

    source: socket.socket
    target: socket.socket
    tap: Tap | None = None
    ended: bool = False  # nothing more comes; what waits is still passed on
    passed: list[int] = field(default_factory=list)  # copies of the descriptors that went through
    _waiting: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    _size: int = 0

    def push(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Queues bytes; the descriptors travel with the last of them."""
        if descriptors:
            self.push(data[:-1])
            data = data[-1:]
        if data:
            self._waiting.append((data, descriptors or []))
            self._size += len(data)

    @property
    def over(self) -> bool:
        """Ended, and all passed on."""
        return self.ended and not self._waiting

    def read(self) -> None:
        """Takes what has arrived, unless too much waits."""
        if self.ended or self._size > _FULL:
            return
        try:
            data, descriptors = self._receive()
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        self.ended = self.ended or not data
        self.push(self.tap(data) if self.tap else data, descriptors)

    def write(self) -> None:
        """Passes on what the target takes."""
        while self._waiting:
            data, descriptors = self._waiting[0]
            try:
                sent = self._send(data, descriptors)
            except BlockingIOError:
                return
            except OSError:  # the target is gone, and its own flow will say so
                self.drop()
                return
            self._waiting.popleft()
            self._size -= sent
            self.passed += descriptors
            if sent < len(data):
                self._waiting.appendleft((data[sent:], []))

    def drop(self) -> None:
        """Forgets what waits."""
        for _, descriptors in self._waiting:
            self.passed += descriptors
        self._waiting.clear()
        self._size = 0

    def events(self) -> list[tuple[socket.socket, int]]:
        """The events to poll for."""
        wanted = []
        if not self.ended and self._size <= _FULL:
            wanted.append((self.source, select.POLLIN))
        if self._waiting:
            wanted.append((self.target, select.POLLOUT))
        return wanted

    def _receive(self) -> tuple[bytes, list[int]]:
        if self.source.family != socket.AF_UNIX:
            return self.source.recv(_READ), []
        data, descriptors, _, _ = socket.recv_fds(self.source, _READ, 8)
        return data, descriptors

    def _send(self, data: bytes, descriptors: list[int]) -> int:
        if not descriptors:
            return self.target.send(data, socket.MSG_NOSIGNAL)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        return self.target.sendmsg([data], [rights], socket.MSG_NOSIGNAL)


class Wire:
    """Joins a socket of the faulty rank's with one of its peer's."""

    def __init__(self, faulty: socket.socket, peer: socket.socket) -> None:
        self.sent, self.answered = Flow(faulty, peer), Flow(peer, faulty)
        self.held = False  # carries nothing for now
        self._ends = faulty, peer
        for end in self._ends:
            end.setblocking(False)

    def register(self, poller: select.poll) -> None:
        """Has the poller wait for what can be carried."""
        wanted: dict[int, int] = {}
        for flow in (self.sent, self.answered):
            for sock, events in () if self.held or self.closed else flow.events():
                wanted[sock.fileno()] = wanted.get(sock.fileno(), 0) | events
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)

    def carry(self) -> None:
        """Moves what can be moved; ends both sides when one has ended."""
        if self.held or self.closed:
            return
        for flow in (self.sent, self.answered):
            flow.read()
            flow.write()
        if self.sent.over or self.answered.over:
            self.close()

    def cut(self, *, reset: bool) -> None:
        """Ends both sides at once; with a reset, where the link is TCP."""
        for end in self._ends if reset and not self.closed else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT_ON_CLOSE)
        self.close()

    def close(self) -> None:
        """Ends both sides and lets go of all descriptors."""
        for end in self._ends:
            end.close()
        for flow in (self.sent, self.answered):
            flow.drop()
            for descriptor in flow.passed:
                os.close(descriptor)
            flow.passed.clear()

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._ends[0].fileno() < 0
