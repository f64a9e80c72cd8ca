"""Builds the mesh: every rank publishes an address card, then each pair makes its three sockets.

The cards travel by an exchange, which is either a store's or an all_gather of the parent
communicator. Of each pair the higher rank connects and the lower one accepts. The listeners are
open before the card is published, and closed when the mesh is complete.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.handshake import (
    BACKLOG,
    Admitted,
    Gate,
    HandshakeError,
    Hello,
    Purpose,
    introduce,
)
from gradwire._bootstrap.keepalive import end_with_host, limit
from gradwire._bootstrap.mesh import (
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
from gradwire._errors import Error, RendezvousError
from gradwire._host import rdma
from gradwire._host.interfaces import LOOPBACK, Choice, Interface, Target, family_of, is_loopback

# Gives every rank all ranks' bytes, in rank order, before the deadline: an all_gather by any means.
Exchange = Callable[[bytes, Deadline], Sequence[bytes]]

_LANES = {"collective": Purpose.COLLECTIVE, "p2p": Purpose.P2P}
_PURPOSES = (Purpose.CONTROL, *_LANES.values())
_TURN = 0.1  # seconds after which the accepting thread looks whether it should stop
_RETRY = 0.05  # seconds between attempts to connect to a peer that was busy
_NEWS = 0.5  # seconds between looks at how the others fare
_ANSWER = 20.0  # seconds within which a host that can be reached answers a connection attempt
# Trying again would not help: the peer's address leads nowhere from here.
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ETIMEDOUT)

_log = logging.getLogger("gradwire")

_Sockets = dict[tuple[int, Purpose], socket.socket]


def no_news(_: float) -> None:
    """For a mesh whose ranks cannot tell each other why they gave up."""


def gave_up(_: int, text: str) -> Error:
    """For a mesh whose ranks may give up without a word: then it proves no death."""
    return RendezvousError(text)


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
    hear: Callable[[float], None] = no_news,
    ended: Callable[[int, str], Error] = gave_up,
) -> Mesh:
    """Connects this rank with all others of a communicator; every rank calls it.

    `communicator` (32 bits) differs between a job's communicators and is the same on its ranks.
    `hear` raises where another rank has given up, or does so within some seconds; it is called now
    and then while this one waits. `ended` makes the error for a rank whose sockets end, and of
    which nothing is heard.
    Raises RendezvousError, which names the ranks that are missing at the deadline.
    """
    limit()  # a wrong setting is told here, not by the accepting thread
    mesh = Mesh(job, rank, size, communicator, (host_identity(),) * size, {}, interface)
    if size > 1:
        attempt = _Attempt(mesh, tuple(transports), deadline, hear, ended)
        try:
            attempt.run(exchange)
        except BaseException:
            attempt.discard()
            raise
    return mesh


class _Attempt:
    """Fills one mesh: this thread connects to the lower ranks, the entrance's the higher ones."""

    def __init__(
        self,
        mesh: Mesh,
        transports: tuple[str, ...],
        deadline: Deadline,
        hear: Callable[[float], None],
        ended: Callable[[int, str], Error],
    ) -> None:
        self._mesh, self._deadline, self._hear, self._ended = mesh, deadline, hear, ended
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
        for peer in range(self._mesh.rank + 1, self._mesh.size):
            self._compare_source(peer)
        self._mesh.hosts = tuple(card.host for card in self._cards)
        self._mesh.names = tuple(card.name.rpartition(":")[0] for card in self._cards)
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
                "share no transport: shm and emulated need one host, emulated GRADWIRE_LINK on "
                "both, and rdma a network of both; see GRADWIRE_TRANSPORT and transports="
            )
        if transport not in LOCAL_TRANSPORTS:
            _require_route(lower, cards[0], higher, cards[1])
        return transport

    def _connect(self, peer: int, purpose: Purpose, transport: str) -> socket.socket:
        card = self._cards[peer]
        pause = threading.Event()
        while True:
            try:
                sock = _open(card, transport, self._mesh.interface.interface, self._deadline)
                return self._introduce(sock, peer, purpose)
            except (ConnectionRefusedError, HandshakeError) as error:
                self._hear(_NEWS)
                self._look_around()
                raise RendezvousError(
                    f"rank {peer} ({card.name}, {card.where(transport)}) no longer takes us "
                    f"({error}): it has probably failed; its own message says why"
                ) from error
            except OSError as error:
                if error.errno in _NO_WAY or self._deadline.passed:
                    raise self._unreachable(peer, transport, error) from error
            self._look_around()
            pause.wait(min(_RETRY, self._deadline.remaining))

    def _unreachable(self, peer: int, transport: str, error: OSError) -> RendezvousError:
        card = self._cards[peer]
        return RendezvousError(
            f"rank {self._mesh.rank} ({self._own.name}, {self._own.where(transport)}) could not "
            f"connect to rank {peer} ({card.name}, {card.where(transport)}) within "
            f"{self._deadline.seconds:g} s ({error.strerror or error}): a firewall is in between, "
            "or these are different networks; then set GRADWIRE_SOCKET_IFNAME on both hosts to an "
            "interface of a network that they share"
        )

    def _introduce(self, sock: socket.socket, peer: int, purpose: Purpose) -> socket.socket:
        job = self._mesh.job
        hello = Hello(job.name, purpose, self._mesh.communicator, job.epoch, self._mesh.rank, peer)
        try:
            introduce(sock, hello, job.secret, self._deadline)
        except BaseException:
            sock.close()
            raise
        return _watched(sock, purpose)

    def _await_higher(self) -> None:
        while missing := self._entrance.wait(self._deadline.within(_NEWS)):
            self._look_around()
            if self._deadline.passed:
                names = ", ".join(f"{rank} ({self._cards[rank].name})" for rank in missing)
                raise RendezvousError(
                    f"timed out: rank {names} of {self._mesh.size} published an address and then "
                    f"did not connect to rank {self._mesh.rank} at {self._own.where('tcp')} within "
                    f"{self._deadline.seconds:g} s: it has probably failed, or a firewall keeps it "
                    "out"
                )

    def _look_around(self) -> None:
        """Raises where another rank has given up, or has ended without a word."""
        self._hear(0)
        for (peer, purpose), sock in (self._sockets | self._entrance.accepted()).items():
            if purpose == Purpose.CONTROL and _has_ended(sock):
                self._hear(_NEWS)  # why, or that it only followed another
                raise self._ended(
                    peer,
                    f"rank {peer} ({self._cards[peer].name}) ended or gave up while the ranks "
                    "connected to each other; its own message says why",
                )

    def _compare_source(self, peer: int) -> None:
        """A higher rank listens at the address it came from, so the way back is proved too."""
        sock, card = self._sockets[peer, Purpose.CONTROL], self._cards[peer]
        if sock.family == socket.AF_UNIX:
            return
        source = ipaddress.ip_address(sock.getpeername()[0].split("%")[0])
        if source != ipaddress.ip_address(card.address):
            _log.warning(
                "rank %d (%s) listens at %s and reached rank %d at %s from %s: addresses are "
                "translated on the way, and communicators in which rank %d is the lower one, as "
                "split() may make them, will fail; GRADWIRE_SOCKET_IFNAME chooses the interface",
                *(peer, card.name, card.where("tcp"), self._mesh.rank, self._own.where("tcp")),
                *(source, peer),
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

    def accepted(self) -> _Sockets:
        """What was accepted so far; remains the entrance's."""
        with self._changed:
            return dict(self._accepted)

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
            self._accepted[key] = _watched(admitted.sock, admitted.hello.purpose)
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


def _require_route(lower: int, listens: Card, higher: int, connects: Card) -> None:
    """Raises RendezvousError where no packet can get from one rank's address to the other's."""
    why = ""
    if family_of(listens.address) != family_of(connects.address):
        why = "one is IPv4 and one IPv6"
    elif listens.host == connects.host:
        return
    elif is_loopback(listens.address) or is_loopback(connects.address):
        why = "they are on different hosts, and loopback only leads back to its own"
    elif listens.address == connects.address:
        why = "both hosts have this address for themselves, as those of containers' bridges"
    if why:
        raise RendezvousError(
            f"rank {lower} ({listens.name}) uses {listens.where('tcp')} and rank {higher} "
            f"({connects.name}) {connects.where('tcp')}, and {why}: set GRADWIRE_SOCKET_IFNAME on "
            "their hosts to an interface of a network that they share"
        )


def _listen(transports: tuple[str, ...], choice: Choice) -> tuple[list[socket.socket], Card]:
    """The listeners that the transports need, and the card that says where they are."""
    listeners, unix, port = [], "", 0
    name, address = choice.interface
    if set(transports) & set(LOCAL_TRANSPORTS):
        unix = f"gradwire-{secrets.token_hex(8)}"
        listeners.append(_bind(socket.AF_UNIX, "\0" + unix))
    if set(transports) - set(LOCAL_TRANSPORTS):
        target = choice.interface.target(address, 0)
        listeners.append(_bind(choice.interface.family, target))
        port = listeners[-1].getsockname()[1]
    networks = () if _share_memory(transports, choice) else rdma.networks(transports)
    where = (unix, address, port, name, networks)
    return listeners, Card(host_identity(), process_name(), transports, *where)


def _share_memory(transports: tuple[str, ...], choice: Choice) -> bool:
    """Whether all ranks are on this host, and shm joins them: no RDMA device need be opened."""
    return choice.interface.loopback and "shm" in transports


def _bind(family: socket.AddressFamily, target: str | Target) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"cannot listen on {target!r}: {error}") from error
    return listener


def _open(card: Card, transport: str, own: Interface, deadline: Deadline) -> socket.socket:
    """Connects, over TCP from the own address that the peers know: so the pair is proved."""
    local = transport in LOCAL_TRANSPORTS
    sock = socket.socket(socket.AF_UNIX if local else own.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(min(deadline.remaining, _ANSWER), 1e-3))
        if local:
            sock.connect("\0" + card.unix)
        else:
            sock.bind(own.target(own.address, 0))
            _connect_within(sock, own.target(card.address, card.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_within(sock: socket.socket, target: Target) -> None:
    try:
        sock.connect(target)
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, f"no answer in {sock.gettimeout():.2g} s") from error


def _has_ended(sock: socket.socket) -> bool:
    """Nobody says goodbye before the mesh is complete, so an end is a failure."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _watched(sock: socket.socket, purpose: Purpose) -> socket.socket:
    """The socket, which from now on fails when the peer's host is dead."""
    end_with_host(sock, always_read=purpose == Purpose.CONTROL)
    return sock
