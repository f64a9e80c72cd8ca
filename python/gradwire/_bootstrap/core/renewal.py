"""Ways whose sockets have ended are made anew, while their communicator lives.

The rank that had connected connects again, to where the other one listened at the start and goes on
listening. It makes all sockets of the way, each authenticated as the first ones were, and both
ranks hand theirs to the core, which takes them between messages. What fails is tried again later.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.acceptor import LANES, check_hello
from gradwire._bootstrap.authenticator import Admitted, Authenticator
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake
from gradwire._bootstrap.mesh import Mesh, Peer
from gradwire._errors import Error
from gradwire._host.keepalive import outlive_outages
from gradwire._host.sealed_socket import hand_over
from gradwire._host.tcp_sockets import watched

_LOOK_SECONDS = 0.5
_CONNECT_SECONDS = 2.0  # in which an interface reaches the peer's, or it is tried again later
_ALL_SECONDS = 30.0  # for all sockets of a way
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 10.0  # before the first attempt, and between later ones
_STABLE_SECONDS = 60.0  # after which a way that failed again is as one that never had

_open: set[Authenticator] = set()  # of this process

_log = logging.getLogger("gradwire")


def watch(mesh: Mesh, ways: dict[int, _core.Ways]) -> None:
    """Starts the threads that log the news of peers' ways, and make ways anew, while links live."""
    listeners, mesh.listeners = mesh.listeners, ()
    if ways:
        AuthenticatingThread(
            target=_Watch(mesh, ways).run, name="gradwire-ways", daemon=True
        ).start()
    accepted = {peer: each for peer, each in ways.items() if not mesh.peers[peer].dials}
    if accepted:
        AuthenticatingThread(
            target=_accept,
            args=(mesh, accepted, listeners),
            name="gradwire-ways-accept",
            daemon=True,
        ).start()
    else:
        for listener in listeners:
            listener.close()


def _parts(peer: Peer, way: int) -> list[int]:
    """The parts of a way's sockets, as both ends order them: control is 0, a lane 1 more."""
    lanes = enumerate((peer.links[name] for name in LANES), 1)
    return [0, *(part for part, link in lanes for its_way, _ in link.roles() if its_way == way)]


def _hand_over(
    mesh: Mesh, ways: _core.Ways, hello: Hello, peer: int, sockets: Sequence[socket.socket]
) -> None:
    """Hands all sockets of a way to the core."""
    for sock in sockets:
        outlive_outages(sock)
    # Another thread may change the list, too, but hands over no sockets to this peer.
    for each in [each for each in mesh.tcp_sockets if each.peer == peer and each.info() is None]:
        mesh.tcp_sockets.remove(each)
    mesh.tcp_sockets += [each for sock in sockets for each in watched(sock, peer)]
    parts = _parts(mesh.peers[peer], hello.way)
    given = [(*hand_over(sock), part) for sock, part in zip(sockets, parts, strict=True)]
    ways.renew(hello.way, hello.generation, given)


class _Attempts:
    """The attempts to make one way anew; the first one is after a pause, as the peer may end."""

    def __init__(self) -> None:
        self._generation = 0  # of the last one; the peer may have what failed here
        self.forget()

    def forget(self) -> None:
        """Leaves as little time to the next one as if there had been none."""
        self._pause = _FIRST_PAUSE
        self._rest, self._counts = Deadline(self._pause), Deadline(_STABLE_SECONDS)

    def next_generation(self, last: int) -> int:
        """The number of the next one, where the way has sockets of the last generation."""
        self._generation = 1 + max(self._generation, last)
        return self._generation

    @property
    def is_due(self) -> bool:
        """Whether to try now."""
        return self._rest.passed

    @property
    def is_old(self) -> bool:
        """Whether the last one was long ago: the way has worked since."""
        return self._counts.passed

    def ended(self) -> None:
        """Leaves more and more time to the next one, also where the way fails again."""
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._rest, self._counts = Deadline(self._pause), Deadline(_STABLE_SECONDS)


class _Watch:
    """Logs the news of a mesh's ways, and connects those anew that this rank had connected."""

    def __init__(self, mesh: Mesh, ways: dict[int, _core.Ways]) -> None:
        self._mesh, self._ways = mesh, ways
        self._attempts: dict[tuple[int, int], _Attempts] = {}  # by peer and way

    def run(self) -> None:
        """Runs until no link uses the ways any more."""
        while any(each.in_use for each in self._ways.values()):
            for peer, ways in self._ways.items():
                while news := ways.next():
                    _tell(self._mesh, peer, *news)
                self._renew(peer, ways)
            time.sleep(_LOOK_SECONDS)

    def _renew(self, peer: int, ways: _core.Ways) -> None:
        ended = ways.ended() if self._mesh.peers[peer].dials else []
        for way in ended:
            made = self._attempts.setdefault((peer, way), _Attempts())
            if made.is_old:
                made.forget()
            if made.is_due:
                self._try(peer, way, ways, made.next_generation(ways.generation(way)))
                made.ended()

    def _try(self, peer: int, way: int, ways: _core.Ways, generation: int) -> None:
        """Connects all sockets of a way, or none."""
        mesh, limit = self._mesh, Deadline(_ALL_SECONDS)
        numbers = mesh.communicator, mesh.job.epoch, mesh.rank, peer
        listener, dial = mesh.peers[peer].dials[way]
        sockets: list[socket.socket] = []
        try:
            for number in range(len(_parts(mesh.peers[peer], way))):
                if not ways.in_use:
                    raise ConnectionError("the communicator has ended")
                which = number, listener, way, generation
                hello = Hello(mesh.job.name, Purpose.WAY, *numbers, *which)
                sock = dial(limit.within(_CONNECT_SECONDS))
                sockets.append(client_handshake(sock, hello, mesh.job.secret, limit))
            _hand_over(mesh, ways, hello, peer, sockets)
        except (OSError, Error) as error:
            for sock in sockets:
                sock.close()
            where = mesh.peers[peer].ways[way]
            _log.debug("rank %d: %s to rank %d, not made anew: %s", mesh.rank, where, peer, error)


class _Set(NamedTuple):
    """The sockets of one generation of a way that have come so far."""

    generation: int
    sockets: dict[int, socket.socket]


class _Renewals:
    """Admits the sockets of ways that peers make anew, and keeps them until a set is whole."""

    def __init__(self, mesh: Mesh, ways: dict[int, _core.Ways]) -> None:
        self._mesh, self._ways = mesh, ways
        self._sets: dict[tuple[int, int], _Set] = {}  # by peer and way

    def check(self, hello: Hello, _: socket.socket) -> None:
        """Raises HandshakeError for a socket of no such way."""
        check_hello(self._mesh, hello, self._may_come)

    def _may_come(self, hello: Hello) -> bool:
        if hello.purpose != Purpose.WAY or hello.source not in self._ways:
            return False
        peer = self._mesh.peers[hello.source]
        if hello.way >= len(peer.ways) or hello.stream >= len(_parts(peer, hello.way)):
            return False
        return hello.generation > self._ways[hello.source].generation(hello.way)

    def take(self, admitted: Admitted) -> None:
        """Keeps a socket, with others of its generation; hands over those that are all."""
        hello, sock = admitted
        key = hello.source, hello.way
        known = self._sets.get(key)
        if known is None or known.generation < hello.generation:
            self._drop(key)
            known = self._sets[key] = _Set(hello.generation, {})
        if known.generation > hello.generation or hello.stream in known.sockets:
            sock.close()
            return
        known.sockets[hello.stream] = sock
        if len(known.sockets) == len(_parts(self._mesh.peers[hello.source], hello.way)):
            sockets = [known.sockets[number] for number in sorted(known.sockets)]
            del self._sets[key]
            _hand_over(self._mesh, self._ways[hello.source], hello, hello.source, sockets)

    def _drop(self, key: tuple[int, int]) -> None:
        known = self._sets.pop(key, None)
        for sock in known.sockets.values() if known else ():
            sock.close()

    def close(self) -> None:
        """Closes what has not become whole."""
        for key in list(self._sets):
            self._drop(key)


def _accept(mesh: Mesh, ways: dict[int, _core.Ways], listeners: Sequence[socket.socket]) -> None:
    """Accepts the sockets of ways that peers make anew, until no link uses them any more."""
    renewals = _Renewals(mesh, ways)
    try:
        authenticator = Authenticator(listeners, mesh.job.name, mesh.job.secret, renewals.check)
    except (OSError, Error) as error:
        for listener in listeners:
            listener.close()
        _log.warning("rank %d cannot accept ways that are made anew: %s", mesh.rank, error)
        return
    _open.add(authenticator)
    try:
        while any(each.in_use for each in ways.values()):
            for admitted in authenticator.poll(_LOOK_SECONDS):
                renewals.take(admitted)
    finally:
        authenticator.close()
        renewals.close()
        _open.discard(authenticator)


def _release_in_child() -> None:
    """Closes a forked child's copies, by which its parent's ports would stay open."""
    for authenticator in list(_open):
        authenticator.close()
    _open.clear()


os.register_at_fork(after_in_child=_release_in_child)


def _tell(mesh: Mesh, peer: int, way: int, works: bool, why: str) -> None:
    names, host = mesh.peers[peer].ways, mesh.names[peer] if mesh.names else ""
    where = f"rank {mesh.rank}: {names[way]}, one of {len(names)} ways to rank {peer}"
    where += f" ({host})" * bool(host)
    if works:
        _log.info("%s, works again", where)
    else:
        _log.warning("%s, has failed (%s): the others carry its messages", where, why)
