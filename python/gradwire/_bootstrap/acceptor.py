"""The acceptor of a mesh: it takes the sockets that other ranks make to this one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence

from gradwire._base.deadline import Deadline
from gradwire._base.environment import MOST_STREAMS
from gradwire._base.shortage import describe_shortage
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import Admitted, Authenticator
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose
from gradwire._bootstrap.mesh import Mesh
from gradwire._errors import RendezvousError
from gradwire._host.interfaces import MOST_WAYS

LANES = {"collective": Purpose.COLLECTIVE, "p2p": Purpose.P2P}
PURPOSES = (Purpose.CONTROL, *LANES.values())
ACCEPT_SECONDS = 0.02  # after which the accepting thread looks whether it should stop

# Peer, purpose and number: of streams, from 1; of the lane that a socket acknowledges; and
# MOST_STREAMS more for each way before the socket's.
Key = tuple[int, Purpose, int]
Sockets = dict[Key, socket.socket]


class Acceptor:
    """Accepts other ranks' sockets in its own thread, until all expected ones are there or close().

    The first socket of a pair, for control, decides which of the two ranks makes all others. So a
    rank that proves itself on its own one, see `claim`, admits none of that peer's.
    """

    def __init__(self, listeners: Sequence[socket.socket], mesh: Mesh) -> None:
        self._mesh = mesh
        self._changed = threading.Condition()
        self._accepted: Sockets = {}
        self._expected: set[Key] = set()
        self.expect(range(mesh.rank + 1, mesh.size))
        self._claimed: set[int] = set()  # peers to which this rank connects
        self._unsettled: frozenset[int] = frozenset(range(mesh.rank))
        self._authenticator = Authenticator(listeners, mesh.job.name, mesh.job.secret, self._check)
        self._stopped = False
        self._error: Exception | None = None  # that ended the thread
        self._thread = AuthenticatingThread(target=self._run, name="gradwire-accept", daemon=True)

    def start(self) -> None:
        """Begins to accept."""
        self._thread.start()

    def expect(self, peers: Iterable[int]) -> None:
        """Waits for these peers' sockets, too."""
        self._expected |= {(peer, purpose, 0) for peer in peers for purpose in PURPOSES}

    def let_connect(self, mine: Iterable[int]) -> None:
        """Waits for the sockets of all others but these, to which this rank is to connect."""
        with self._changed:
            self._unsettled = frozenset(mine) - {peer for peer, *_ in self._accepted}
            others = {peer for peer in range(self._mesh.size) if peer != self._mesh.rank}
            self._expected = {each for each in self._expected if each[0] not in self._unsettled}
            self.expect(others - self._unsettled)

    def is_taken(self, peer: int) -> bool:
        """Whether the peer has made the first socket, so that it makes the others."""
        with self._changed:
            taken = (peer, Purpose.CONTROL, 0) in self._accepted
            if taken:
                self._unsettled -= {peer}
            return taken

    def claim(self, peer: int) -> bool:
        """Whether this rank may make the pair's sockets, from now on; False once the peer does."""
        with self._changed:
            if not self.is_taken(peer):
                self._claimed.add(peer)
            return peer in self._claimed

    def give_up(self, peer: int) -> None:
        """Admits the peer's own sockets again, after a claim that led to none."""
        with self._changed:
            self._claimed.discard(peer)

    def settle(self, peer: int) -> None:
        """Waits for nothing of a peer to which this rank has connected."""
        with self._changed:
            self._unsettled -= {peer}
            self._expected = {each for each in self._expected if each[0] != peer}
            self._changed.notify_all()

    def wait(self, deadline: Deadline) -> list[int]:
        """Waits for the sockets; returns the ranks of which some are missing at the deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._accepted.keys() >= self._expected or self._error, deadline.remaining
            )
            if isinstance(self._error, RendezvousError):
                raise self._error
            if self._error is not None:
                shortage = isinstance(self._error, OSError) and describe_shortage(self._error)
                raise RendezvousError(
                    f"rank {self._mesh.rank} can accept no connections any more "
                    f"({shortage or repr(self._error)})"
                ) from self._error
            return sorted({rank for rank, *_ in self._expected - self._accepted.keys()})

    def accepted(self) -> Sockets:
        """The sockets accepted so far, which the acceptor still owns."""
        with self._changed:
            return dict(self._accepted)

    def release(self) -> tuple[socket.socket, ...]:
        """Stops accepting; returns the listeners where a peer has ways that it may make anew."""
        self._end_thread()
        renews = any(number >= MOST_STREAMS for *_, number in self._accepted)
        return self._authenticator.release() if renews else ()

    def _end_thread(self) -> None:
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> Sockets:
        """Stops listening; returns the sockets that were accepted and not returned before."""
        self._end_thread()
        self._authenticator.close()
        accepted, self._accepted = self._accepted, {}
        return accepted

    def _complete(self) -> bool:
        return self._accepted.keys() >= self._expected and not self._unsettled

    def _run(self) -> None:
        try:
            while not self._stopped and not self._complete():
                for admitted in self._authenticator.poll(ACCEPT_SECONDS):
                    self._accept(admitted)
                if self._authenticator.shortage is not None:
                    raise self._authenticator.shortage
                if self._authenticator.excluded is not None:
                    rank, why = self._authenticator.excluded
                    raise RendezvousError(
                        f"rank {self._mesh.rank} cannot admit rank {rank} at {why}"
                    )
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _accept(self, admitted: Admitted) -> None:
        hello = admitted.hello
        key = _key(hello)
        with self._changed:
            if hello.purpose == Purpose.CONTROL and not hello.way:
                self.expect([hello.source])
            elif hello.purpose == Purpose.COLLECTIVE:
                numbers = range(key[2] + 1, key[2] + hello.stream + 1)
                self._expected |= {(hello.source, Purpose.STREAM, number) for number in numbers}
            elif hello.purpose == Purpose.P2P and hello.stream:
                self._expect_ways(hello)
            if key in self._accepted:  # the peer tried again because it missed our welcome
                self._accepted[key].close()
            self._accepted[key] = admitted.sock
            self._changed.notify_all()

    def _expect_ways(self, hello: Hello) -> None:
        ways = [way for way in range(1, MOST_WAYS) if hello.stream >> way & 1]
        self._expected |= {(hello.source, *each) for each in sockets_of_ways(ways)}

    def _may_come(self, hello: Hello) -> bool:
        announces_ways = hello.purpose == Purpose.P2P and hello.way == 0
        with self._changed:
            if hello.source in self._claimed or hello.way >= MOST_WAYS:
                return False
            if hello.stream >= MOST_STREAMS and not announces_ways:
                return False
            if hello.purpose == Purpose.CONTROL:
                if hello.way:  # a way is announced once its first socket is there
                    return (hello.source, Purpose.CONTROL, 0) in self._accepted
                if hello.source in self._unsettled:
                    return True
            return _key(hello) in self._expected

    def _check(self, hello: Hello, _: socket.socket) -> None:
        check_hello(self._mesh, hello, self._may_come)


def check_hello(mesh: Mesh, hello: Hello, may_come: Callable[[Hello], bool]) -> None:
    """Raises HandshakeError for a hello to another mesh, or one that may not come."""
    if (hello.communicator, hello.epoch) != (mesh.communicator, mesh.job.epoch):
        raise HandshakeError("it belongs to another communicator, or another start of the job")
    if hello.target != mesh.rank or not may_come(hello):
        raise HandshakeError(
            f"rank {mesh.rank} does not expect rank {hello.source} to connect to rank "
            f"{hello.target} for {hello.purpose.name.lower()}"
        )


def sockets_of_ways(ways: Sequence[int]) -> list[tuple[Purpose, int]]:
    """The purposes and numbers of the sockets of further ways, but for control and more streams."""
    data = [(purpose, way * MOST_STREAMS) for way in ways for purpose in LANES.values()]
    lanes = range(len(LANES))
    acks = [
        (Purpose.ACKNOWLEDGE, way * MOST_STREAMS + lane) for way in (0, *ways) for lane in lanes
    ]
    return data + acks


def _key(hello: Hello) -> Key:
    numbered = hello.purpose in (Purpose.STREAM, Purpose.ACKNOWLEDGE)
    number = hello.stream if numbered else 0
    return hello.source, hello.purpose, number + hello.way * MOST_STREAMS
