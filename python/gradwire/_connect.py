"""Builds the mesh: every rank publishes an address card, then each pair makes its three sockets.

The cards travel by an exchange, which is either a store's or an all_gather of the parent
communicator. Of each pair the higher rank connects and the lower one accepts. The listeners are
open before the card is published, and closed when the mesh is complete.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from gradwire._deadline import Deadline
from gradwire._errors import RendezvousError
from gradwire._handshake import Admitted, Gate, HandshakeError, Hello, Purpose, introduce
from gradwire._interfaces import LOOPBACK, Choice, is_loopback
from gradwire._mesh import (
    DEFAULT_TRANSPORTS,
    LOCAL_TRANSPORTS,
    Card,
    Job,
    Link,
    Mesh,
    Peer,
    choose_transport,
    host_identity,
    process_name,
    unpack_card,
)

# Gives every rank all ranks' bytes, in rank order, before the deadline: an all_gather by any means.
Exchange = Callable[[bytes, Deadline], Sequence[bytes]]

_LANES = {"collective": Purpose.COLLECTIVE, "p2p": Purpose.P2P}
_PURPOSES = (Purpose.CONTROL, *_LANES.values())
_TURN = 0.1  # seconds after which the accepting thread looks whether it should stop
_RETRY = 0.05  # seconds between attempts to connect to a peer that was busy

_Sockets = dict[tuple[int, Purpose], socket.socket]


def connect_mesh(
    job: Job,
    exchange: Exchange,
    *,
    rank: int,
    size: int,
    communicator: int,
    deadline: Deadline,
    transports: Sequence[str] = DEFAULT_TRANSPORTS,
    interface: Choice = LOOPBACK,
) -> Mesh:
    """Connects this rank with all others of a communicator; every rank calls it.

    `communicator` (32 bits) differs between a job's communicators and is the same on its ranks.
    Raises RendezvousError, which names the ranks that are missing at the deadline.
    """
    mesh = Mesh(job, rank, size, communicator, (host_identity(),) * size, {}, interface)
    if size > 1:
        attempt = _Attempt(mesh, tuple(transports), deadline)
        try:
            attempt.run(exchange)
        except BaseException:
            attempt.discard()
            raise
    return mesh


class _Attempt:
    """Fills one mesh: this thread connects to the lower ranks, the entrance's the higher ones."""

    def __init__(self, mesh: Mesh, transports: tuple[str, ...], deadline: Deadline) -> None:
        self._mesh, self._deadline = mesh, deadline
        self._sockets: _Sockets = {}
        self._cards: list[Card] = []
        listeners, self._own = _listen(transports, mesh.interface)
        self._entrance = _Entrance(listeners, mesh)

    def run(self, exchange: Exchange) -> None:
        self._entrance.start()
        blobs = exchange(self._own.pack(), self._deadline)
        self._cards = [unpack_card(blob, peer) for peer, blob in enumerate(blobs)]
        transports = {peer: self._route(peer) for peer in self._others()}
        for peer in range(self._mesh.rank):
            for purpose in _PURPOSES:
                sock = self._connect(peer, purpose, transports[peer])
                self._sockets[peer, purpose] = sock
        self._await_higher()
        self._sockets |= self._entrance.close()
        self._mesh.hosts = tuple(card.host for card in self._cards)
        self._mesh.peers = {peer: self._peer(peer, name) for peer, name in transports.items()}

    def discard(self) -> None:
        for sock in (self._sockets | self._entrance.close()).values():
            sock.close()

    def _others(self) -> list[int]:
        return [peer for peer in range(self._mesh.size) if peer != self._mesh.rank]

    def _route(self, peer: int) -> str:
        """The transport to a peer; raises RendezvousError when there is none."""
        lower, higher = sorted((self._mesh.rank, peer))
        cards = self._cards[lower], self._cards[higher]
        transport = choose_transport(*cards)
        if transport is None:
            raise RendezvousError(
                f"ranks {lower} ({cards[0].describe()}) and {higher} ({cards[1].describe()}) "
                "share no transport: shm needs one host; see GRADWIRE_TRANSPORT and transports="
            )
        if (
            transport not in LOCAL_TRANSPORTS
            and cards[0].host != cards[1].host
            and is_loopback(cards[0].address)
        ):
            raise RendezvousError(
                f"rank {lower} on {cards[0].name} listens on loopback only, which rank {higher} on "
                f"{cards[1].name} cannot reach: set GRADWIRE_SOCKET_IFNAME on rank {lower}'s host"
            )
        return transport

    def _connect(self, peer: int, purpose: Purpose, transport: str) -> socket.socket:
        card = self._cards[peer]
        pause = threading.Event()
        while True:
            try:
                return self._introduce(_open(card, transport, self._deadline), peer, purpose)
            except (ConnectionRefusedError, HandshakeError) as error:
                raise RendezvousError(
                    f"rank {peer} ({card.name}) no longer takes us ({error}): "
                    "it has probably failed; its own message says why"
                ) from error
            except OSError as error:
                if self._deadline.passed:
                    raise RendezvousError(
                        f"could not connect to rank {peer} ({card.name}, {card.where(transport)}) "
                        f"within {self._deadline.seconds:g} s ({error}): it refuses us, see its "
                        "log, or a firewall is in between"
                    ) from error
            pause.wait(min(_RETRY, self._deadline.remaining))

    def _introduce(self, sock: socket.socket, peer: int, purpose: Purpose) -> socket.socket:
        job = self._mesh.job
        hello = Hello(job.name, purpose, self._mesh.communicator, job.epoch, self._mesh.rank, peer)
        try:
            introduce(sock, hello, job.secret, self._deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    def _await_higher(self) -> None:
        missing = self._entrance.wait(self._deadline)
        if missing:
            names = ", ".join(f"{rank} ({self._cards[rank].name})" for rank in missing)
            raise RendezvousError(
                f"rank {names} of {self._mesh.size} published an address and then did not connect "
                f"to rank {self._mesh.rank} within {self._deadline.seconds:g} s: "
                "it has probably failed, or a firewall keeps it out"
            )

    def _peer(self, peer: int, transport: str) -> Peer:
        links = {
            lane: Link(transport, self._sockets[peer, purpose]) for lane, purpose in _LANES.items()
        }
        same_host = self._cards[peer].host == self._own.host
        return Peer(peer, same_host, self._sockets[peer, Purpose.CONTROL], links)


class _Entrance:
    """Accepts the higher ranks' sockets in a thread of its own, until all are there or close()."""

    def __init__(self, listeners: Sequence[socket.socket], mesh: Mesh) -> None:
        self._mesh = mesh
        self._accepted: _Sockets = {}
        higher = range(mesh.rank + 1, mesh.size)
        self._expected = {(rank, purpose) for rank in higher for purpose in _PURPOSES}
        self._gate = Gate(listeners, mesh.job.name, mesh.job.secret, self._check)
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="gradwire-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, deadline: Deadline) -> list[int]:
        """Waits for the sockets; returns the ranks of which some are missing at the deadline."""
        with self._changed:
            self._changed.wait_for(self._complete, deadline.remaining)
            return sorted({rank for rank, _ in self._expected - self._accepted.keys()})

    def close(self) -> _Sockets:
        """Stops listening; returns what was accepted and not returned before."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        self._gate.close()
        accepted, self._accepted = self._accepted, {}
        return accepted

    def _complete(self) -> bool:
        return self._accepted.keys() == self._expected

    def _run(self) -> None:
        while not self._stopped and not self._complete():
            for admitted in self._gate.poll(_TURN):
                self._accept(admitted)

    def _accept(self, admitted: Admitted) -> None:
        key = admitted.hello.source, admitted.hello.purpose
        with self._changed:
            if key in self._accepted:  # it tried again because it missed our welcome
                self._accepted[key].close()
            self._accepted[key] = admitted.sock
            self._changed.notify_all()

    def _check(self, hello: Hello, _: socket.socket) -> None:
        mesh = self._mesh
        if (hello.communicator, hello.epoch) != (mesh.communicator, mesh.job.epoch):
            raise HandshakeError("it belongs to another communicator or restart of the job")
        if hello.target != mesh.rank or (hello.source, hello.purpose) not in self._expected:
            raise HandshakeError(
                f"rank {mesh.rank} does not expect rank {hello.source} to connect to rank "
                f"{hello.target} for {hello.purpose.name.lower()}"
            )


def _listen(transports: tuple[str, ...], interface: Choice) -> tuple[list[socket.socket], Card]:
    """The listeners that the transports need, and the card that says where they are."""
    listeners, unix, port = [], "", 0
    if set(transports) & set(LOCAL_TRANSPORTS):
        unix = f"gradwire-{secrets.token_hex(8)}"
        listeners.append(_bind(socket.AF_UNIX, "\0" + unix))
    if set(transports) - set(LOCAL_TRANSPORTS):
        listeners.append(_bind(interface.interface.family, (interface.interface.address, 0)))
        port = listeners[-1].getsockname()[1]
    address = interface.interface.address
    return listeners, Card(host_identity(), process_name(), transports, unix, address, port)


def _bind(family: socket.AddressFamily, target: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(target)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"cannot listen on {target!r}: {error}") from error
    return listener


def _open(card: Card, transport: str, deadline: Deadline) -> socket.socket:
    family = socket.AF_INET6 if ":" in card.address else socket.AF_INET
    local = transport in LOCAL_TRANSPORTS
    sock = socket.socket(socket.AF_UNIX if local else family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining, 1e-3))
        if local:
            sock.connect("\0" + card.unix)
        else:
            sock.connect((card.address, card.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock
