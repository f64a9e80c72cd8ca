"""Builds the mesh: every rank publishes its address, then each pair makes its sockets.

Addresses travel by an exchange, which is either a store's or an all_gather of the parent
communicator. In each pair the higher rank connects and the lower one accepts. The listeners are
open before the address is published, and closed when the mesh is complete.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence

from gradwire._base.deadline import Deadline
from gradwire._base.environment import MOST_STREAMS
from gradwire._base.shortage import describe_shortage
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap import shared_port
from gradwire._bootstrap.authenticator import Admitted, Authenticator
from gradwire._bootstrap.handed import BACKLOG, open_listener
from gradwire._bootstrap.handshake import (
    HandshakeError,
    Hello,
    Purpose,
    SettingsError,
    client_handshake,
    dial,
)
from gradwire._bootstrap.host_info import host_identity, process_name
from gradwire._bootstrap.mesh import (
    NOWHERE,
    AddressInfo,
    Job,
    Link,
    Mesh,
    Peer,
    choose_transport,
    unpack_address_info,
)
from gradwire._bootstrap.streams import further_streams
from gradwire._errors import Error, RendezvousError
from gradwire._host.encryption import can_be_sealed, tell_unsealed
from gradwire._host.interfaces import LOOPBACK, Choice, Interface, Target, family_of, is_loopback
from gradwire._host.transport_kinds import DEFAULTS, KINDS, networks_of

# An all_gather of bytes by any means: all ranks' in rank order, on every rank, by the deadline.
Exchange = Callable[[bytes, Deadline], Sequence[bytes]]

_LANES = {"collective": Purpose.COLLECTIVE, "p2p": Purpose.P2P}
_PURPOSES = (Purpose.CONTROL, *_LANES.values())
_ACCEPT_SECONDS = 0.1  # after which the accepting thread looks whether it should stop
_RETRY_SECONDS = 0.05  # between attempts to connect to a peer that was busy
_POLL_SECONDS = 0.5  # between two looks at whether a peer has failed
_CONNECT_SECONDS = 20.0  # in which a host that can be reached answers a connection attempt
# Errors after which a retry is useless: the peer's address leads nowhere from here.
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ETIMEDOUT)

_log = logging.getLogger("gradwire")

# By peer, purpose and number: of streams, from 1.
_Sockets = dict[tuple[int, Purpose, int], socket.socket]


def connect_mesh(
    job: Job,
    exchange: Exchange,
    *,
    rank: int,
    size: int,
    communicator: int,
    deadline: Deadline,
    transports: Sequence[str] = DEFAULTS,
    interface: Choice = LOOPBACK,
    raise_if_peer_failed: Callable[[float], None] = lambda _: None,
    lost_peer_error: Callable[[int, str], Error] = lambda _, text: RendezvousError(text),
    job_ranks: Iterable[int] = (),
) -> Mesh:
    """Connects this rank with all other ranks of a communicator; every rank calls it.

    `communicator` (32 bits) differs between a job's communicators and is the same on its ranks.
    `raise_if_peer_failed(seconds)` raises when another rank has given up, or does so within these
    seconds; it is called now and then while this rank waits. `lost_peer_error(rank, text)` makes
    the error for a rank whose sockets end without a reported failure; the default does not say that
    the rank is dead. `job_ranks` are the members' numbers in the job, where those differ. Raises
    RendezvousError, which names the ranks that are missing at the deadline.
    """
    mesh = Mesh(job, rank, size, communicator, (host_identity(),) * size, {}, interface)
    mesh.job_ranks = tuple(job_ranks)
    if size > 1:
        asks = _one_at_a_time(raise_if_peer_failed)
        attempt = _Attempt(mesh, tuple(transports), deadline, asks, lost_peer_error)
        try:
            attempt.run(exchange)
        except BaseException:
            attempt.discard()
            raise
    return mesh


class _Attempt:
    """Fills one mesh: this thread connects to lower ranks, the acceptor's accepts higher ones."""

    def __init__(
        self,
        mesh: Mesh,
        transports: tuple[str, ...],
        deadline: Deadline,
        raise_if_peer_failed: Callable[[float], None],
        lost_peer_error: Callable[[int, str], Error],
    ) -> None:
        self._mesh, self._deadline = mesh, deadline
        self._raise_if_peer_failed, self._lost_peer_error = raise_if_peer_failed, lost_peer_error
        self._sockets: _Sockets = {}
        self._addresses: list[AddressInfo] = []
        listeners, self._own = listen(transports, mesh.interface)
        self._acceptor = _Acceptor(listeners, mesh)

    def run(self, exchange: Exchange) -> None:
        self._acceptor.start()
        blobs = exchange(self._own.pack(), self._deadline)
        self._addresses = [unpack_address_info(blob, peer) for peer, blob in enumerate(blobs)]
        others = (peer for peer in range(self._mesh.size) if peer != self._mesh.rank)
        transports = {peer: self._choose_route(peer) for peer in others}
        for peer in range(self._mesh.rank):
            self._connect_all(peer, transports[peer])
        self._await_higher()
        self._sockets |= self._acceptor.close()
        for peer in range(self._mesh.rank + 1, self._mesh.size):
            self._compare_source(peer)
        self._mesh.hosts = tuple(info.host for info in self._addresses)
        self._mesh.names = tuple(info.name.rpartition(":")[0] for info in self._addresses)
        self._mesh.peers = {peer: self._peer(peer, name) for peer, name in transports.items()}

    def discard(self) -> None:
        for sock in (self._sockets | self._acceptor.close()).values():
            sock.close()

    def _choose_route(self, peer: int) -> str:
        """Chooses the transport to a peer; raises RendezvousError when there is none."""
        lower, higher = sorted((self._mesh.rank, peer))
        infos = self._addresses[lower], self._addresses[higher]
        transport = choose_transport(*infos)
        if transport is None:
            raise RendezvousError(
                f"ranks {lower} ({infos[0].describe()}) and {higher} ({infos[1].describe()}) "
                "share no transport: shm and emulated need one host, emulated GRADWIRE_LINK on "
                "both, and rdma a network of both; see GRADWIRE_TRANSPORT and transports="
            )
        if not can_be_sealed(transport):
            tell_unsealed(transport, self._mesh.rank)
        if not KINDS[transport].local:
            _require_route(lower, infos[0], higher, infos[1])
        return transport

    def _connect_all(self, peer: int, transport: str) -> None:
        """Makes all sockets to a lower rank; the first one shows how long the way is."""
        control = self._sockets[peer, Purpose.CONTROL, 0] = self._connect(
            peer, Purpose.CONTROL, transport
        )
        more = further_streams(control, transport)
        for purpose, announced in ((Purpose.COLLECTIVE, more), (Purpose.P2P, 0)):
            sock = self._connect(peer, purpose, transport, announced)
            self._sockets[peer, purpose, 0] = sock
        self._connect_streams(peer, transport, more)

    def _connect_streams(self, peer: int, transport: str, count: int) -> None:
        """Makes the further streams at once, since each takes three round trips."""
        errors: list[Exception] = []

        def connect(stream: int) -> None:
            try:
                sock = self._connect(peer, Purpose.STREAM, transport, stream)
                self._sockets[peer, Purpose.STREAM, stream] = sock
            except Exception as error:
                errors.append(error)

        numbers = range(1, count + 1)
        threads = [AuthenticatingThread(target=connect, args=(number,)) for number in numbers]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]

    def _connect(
        self, peer: int, purpose: Purpose, transport: str, stream: int = 0
    ) -> socket.socket:
        info = self._addresses[peer]
        pause = threading.Event()
        while True:
            try:
                sock = open_socket(info, transport, self._mesh.interface.interface, self._deadline)
                return self._authenticate(sock, peer, purpose, stream)
            except SettingsError as error:
                raise RendezvousError(
                    f"rank {self._mesh.rank} and rank {peer} ({info.name}) cannot connect: {error}"
                ) from error
            except (ConnectionRefusedError, HandshakeError) as error:
                self._raise_if_peer_failed(_POLL_SECONDS)
                self._check_peers()
                raise RendezvousError(
                    f"rank {peer} ({info.name}, {info.where(transport)}) no longer accepts "
                    f"connections ({error}): it has probably failed; its own message says why"
                ) from error
            except OSError as error:
                if shortage := describe_shortage(error):
                    raise self._short(shortage) from error
                if error.errno in _NO_WAY or self._deadline.passed:
                    raise self._unreachable(peer, transport, error) from error
            self._check_peers()
            pause.wait(min(_RETRY_SECONDS, self._deadline.remaining))

    def _short(self, shortage: str) -> RendezvousError:
        mesh = self._mesh
        return RendezvousError(
            f"rank {mesh.rank} of {mesh.size} ({self._own.name}) cannot connect: {shortage}; it "
            f"needs {len(_PURPOSES)} for each other rank, and more for links"
        )

    def _unreachable(self, peer: int, transport: str, error: OSError) -> RendezvousError:
        info = self._addresses[peer]
        return RendezvousError(
            f"rank {self._mesh.rank} ({self._own.name}, {self._own.where(transport)}) could not "
            f"connect to rank {peer} ({info.name}, {info.where(transport)}) within "
            f"{self._deadline.seconds:g} s ({error.strerror or error}): a firewall is in between, "
            "or these are different networks; then set GRADWIRE_SOCKET_IFNAME on both hosts to an "
            "interface of a network that they share"
        )

    def _authenticate(
        self, sock: socket.socket, peer: int, purpose: Purpose, stream: int
    ) -> socket.socket:
        job, mesh = self._mesh.job, self._mesh
        listener = self._addresses[peer].listener
        numbers = mesh.communicator, job.epoch, mesh.rank, peer, stream, listener
        hello = Hello(job.name, purpose, *numbers)
        return client_handshake(sock, hello, job.secret, self._deadline)

    def _await_higher(self) -> None:
        while missing := self._acceptor.wait(self._deadline.within(_POLL_SECONDS)):
            self._check_peers()
            if self._deadline.passed:
                names = ", ".join(f"{rank} ({self._addresses[rank].name})" for rank in missing)
                raise RendezvousError(
                    f"timed out: rank {names} of {self._mesh.size} published an address and then "
                    f"did not connect to rank {self._mesh.rank} at {self._own.where('tcp')} within "
                    f"{self._deadline.seconds:g} s: it has probably failed, or a firewall keeps it "
                    "out; or give more time with timeout="
                )

    def _check_peers(self) -> None:
        """Raises when another rank has given up, or has ended without reporting a failure."""
        self._raise_if_peer_failed(0)
        for (peer, purpose, _), sock in (self._sockets | self._acceptor.accepted()).items():
            if purpose == Purpose.CONTROL and _has_ended(sock):
                # It may have reported why, or have followed another failure.
                self._raise_if_peer_failed(_POLL_SECONDS)
                raise self._lost_peer_error(
                    peer,
                    f"rank {peer} ({self._addresses[peer].name}) ended or gave up while the ranks "
                    "connected to each other; its own message says why",
                )

    def _compare_source(self, peer: int) -> None:
        """Warns when a higher rank came from another address than it listens at.

        Equal addresses prove the way back too, which later communicators may need.
        """
        sock, info = self._sockets[peer, Purpose.CONTROL, 0], self._addresses[peer]
        if sock.family == socket.AF_UNIX:
            return
        source = ipaddress.ip_address(sock.getpeername()[0].split("%")[0])
        if source != ipaddress.ip_address(info.address):
            _log.warning(
                "rank %d (%s) listens at %s and reached rank %d at %s from %s: addresses are "
                "translated on the way, and communicators in which rank %d is the lower one, as "
                "split() may make them, will fail; GRADWIRE_SOCKET_IFNAME chooses the interface",
                *(peer, info.name, info.where("tcp"), self._mesh.rank, self._own.where("tcp")),
                *(source, peer),
            )

    def _peer(self, peer: int, transport: str) -> Peer:
        links = {
            lane: Link(transport, self._sockets[peer, purpose, 0])
            for lane, purpose in _LANES.items()
        }
        links["collective"] = links["collective"]._replace(streams=self._streams(peer))
        same_host = self._addresses[peer].host == self._own.host
        return Peer(same_host, self._sockets[peer, Purpose.CONTROL, 0], links)

    def _streams(self, peer: int) -> tuple[socket.socket, ...]:
        mine = {key: sock for key, sock in self._sockets.items() if key[0] == peer}
        return tuple(mine[key] for key in sorted(mine) if key[1] == Purpose.STREAM)


class _Acceptor:
    """Accepts the higher ranks' sockets in its own thread, until all are there or close()."""

    def __init__(self, listeners: Sequence[socket.socket], mesh: Mesh) -> None:
        self._mesh = mesh
        self._accepted: _Sockets = {}
        higher = range(mesh.rank + 1, mesh.size)
        self._expected = {(rank, purpose, 0) for rank in higher for purpose in _PURPOSES}
        self._authenticator = Authenticator(listeners, mesh.job.name, mesh.job.secret, self._check)
        self._changed = threading.Condition()
        self._stopped = False
        self._error: Exception | None = None  # that ended the thread
        self._thread = AuthenticatingThread(target=self._run, name="gradwire-accept", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, deadline: Deadline) -> list[int]:
        """Waits for the sockets; returns the ranks of which some are missing at the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete() or self._error, deadline.remaining)
            if isinstance(self._error, RendezvousError):
                raise self._error
            if self._error is not None:
                shortage = isinstance(self._error, OSError) and describe_shortage(self._error)
                raise RendezvousError(
                    f"rank {self._mesh.rank} can accept no connections any more "
                    f"({shortage or repr(self._error)})"
                ) from self._error
            return sorted({rank for rank, *_ in self._expected - self._accepted.keys()})

    def accepted(self) -> _Sockets:
        """The sockets accepted so far, which the acceptor still owns."""
        with self._changed:
            return dict(self._accepted)

    def close(self) -> _Sockets:
        """Stops listening; returns the sockets that were accepted and not returned before."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()
        self._authenticator.close()
        accepted, self._accepted = self._accepted, {}
        return accepted

    def _complete(self) -> bool:
        return self._accepted.keys() == self._expected

    def _run(self) -> None:
        try:
            while not self._stopped and not self._complete():
                for admitted in self._authenticator.poll(_ACCEPT_SECONDS):
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
            if hello.purpose == Purpose.COLLECTIVE:
                numbers = range(1, hello.stream + 1)
                self._expected |= {(hello.source, Purpose.STREAM, number) for number in numbers}
            if key in self._accepted:  # the peer tried again because it missed our welcome
                self._accepted[key].close()
            self._accepted[key] = admitted.sock
            self._changed.notify_all()

    def _check(self, hello: Hello, _: socket.socket) -> None:
        mesh = self._mesh
        if (hello.communicator, hello.epoch) != (mesh.communicator, mesh.job.epoch):
            raise HandshakeError("it belongs to another communicator, or another start of the job")
        expected = _key(hello) in self._expected and hello.stream < MOST_STREAMS
        if hello.target != mesh.rank or not expected:
            raise HandshakeError(
                f"rank {mesh.rank} does not expect rank {hello.source} to connect to rank "
                f"{hello.target} for {hello.purpose.name.lower()}"
            )


def _one_at_a_time(call: Callable[[float], None]) -> Callable[[float], None]:
    """The call for threads that connect streams: what it asks need not be for several threads."""
    lock = threading.Lock()

    def locked(seconds: float) -> None:
        with lock:
            call(seconds)

    return locked


def _key(hello: Hello) -> tuple[int, Purpose, int]:
    number = hello.stream if hello.purpose == Purpose.STREAM else 0
    return hello.source, hello.purpose, number


def _require_route(lower: int, listens: AddressInfo, higher: int, connects: AddressInfo) -> None:
    """Raises RendezvousError when no packet can get from one rank's address to the other's."""
    why = ""
    if listens.advertised:
        return
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


def listen(transports: tuple[str, ...], choice: Choice) -> tuple[list[socket.socket], AddressInfo]:
    """Opens the listeners that the transports need; returns them and their AddressInfo.

    Only a Unix socket where all ranks are on this host, and the best transport is made over one: a
    peer that offers tcp alone connects there, too.
    """
    here = choice.interface.loopback and KINDS[transports[0]].local
    listeners, unix, port, number = [], "", 0, 0
    name, address = choice.interface
    advertised = "" if here else shared_port.advertised_host()
    if advertised or any(KINDS[name].local for name in transports):
        unix = f"gradwire-{secrets.token_hex(8)}"
        listeners.append(_bind(socket.AF_UNIX, "\0" + unix))
    if not (here or advertised == NOWHERE or all(KINDS[name].local for name in transports)):
        listener, port, number = _listen_beyond(choice.interface)
        listeners.append(listener)
    share_memory = choice.interface.loopback and "shm" in transports  # all ranks are here
    networks = () if share_memory else networks_of(transports)
    where = (unix, address, port, name, networks, advertised, number)
    return listeners, AddressInfo(host_identity(), process_name(), transports, *where)


def _listen_beyond(interface: Interface) -> tuple[socket.socket, int, int]:
    """A listener for other hosts; the port where they reach it, and its number there."""
    shared = shared_port.chosen_port()
    target = interface.target(interface.address, shared)
    if not shared:
        listener = _bind(interface.family, target)
        return listener, listener.getsockname()[1], 0
    number = secrets.randbits(64)
    try:
        shared_port.share(interface.family, target)
        return open_listener(number), shared_port.advertised_port(), number
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on {interface} port {shared}, as GRADWIRE_PORT says ({error}): "
            "end the program that has it, or choose another port"
        ) from error


def _bind(family: socket.AddressFamily, target: str | Target) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"cannot listen on {target!r}: {error}") from error
    return listener


def open_socket(
    info: AddressInfo, transport: str, own: Interface, deadline: Deadline
) -> socket.socket:
    """Connects to a peer; over TCP from the own address that peers know, which proves the route.

    Over its Unix socket if the transport is local, or the peer listens nowhere else.
    """
    seconds = deadline.within(_CONNECT_SECONDS).left
    near = info.unix and info.advertised and info.host == host_identity()
    if KINDS[transport].local or info.is_unix_only or near:
        return dial(socket.AF_UNIX, "\0" + info.unix, seconds)
    if info.advertised:
        return _dial_by_name(info.advertised, info.port, seconds)
    target, source = own.target(info.address, info.port), own.target(own.address, 0)
    try:
        return dial(own.family, target, seconds, source)
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, f"no answer in {seconds:.2g} s") from error


def _dial_by_name(host: str, port: int, seconds: float) -> socket.socket:
    """Connects to one of the addresses that a host's name stands for; raises OSError."""
    try:
        return socket.create_connection((host, port), seconds)
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, f"no answer in {seconds:.2g} s") from error


def _has_ended(sock: socket.socket) -> bool:
    """Whether the peer closed the socket, which before the mesh is complete is a failure."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
