"""Builds the mesh: every rank publishes its address, then each pair makes its sockets.

Addresses travel by an exchange, which is either a store's or an all_gather of the parent
communicator. In each pair the higher rank connects and the lower one accepts. The listeners are
open before the address is published, and closed when the mesh is complete.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._base.environment import MOST_STREAMS
from gradwire._base.shortage import describe_shortage
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap import endpoints, relay
from gradwire._bootstrap.acceptor import PURPOSES, Acceptor, Sockets, sockets_of_ways
from gradwire._bootstrap.endpoints import listen, open_socket, open_way, require_route
from gradwire._bootstrap.handshake import (
    HandshakeError,
    Hello,
    Purpose,
    SettingsError,
    client_handshake,
)
from gradwire._bootstrap.mesh import (
    NOWHERE,
    AddressInfo,
    Dial,
    Job,
    Mesh,
    Peer,
    RelayPlace,
    choose_relay,
    choose_transport,
    unpack_address_info,
)
from gradwire._bootstrap.peer_sockets import further_ways, peer_of
from gradwire._errors import Error, RendezvousError
from gradwire._host.encryption import can_be_sealed, tell_unsealed
from gradwire._host.identity import host_identity
from gradwire._host.interfaces import LOOPBACK, Choice, Interface, ways_between
from gradwire._host.streams import further_streams
from gradwire._host.transport_kinds import DEFAULTS, KINDS
from gradwire._host.ways import TriedWays

# An all_gather of bytes by any means: all ranks' in rank order, on every rank, by the deadline.
Exchange = Callable[[bytes, Deadline], Sequence[bytes]]

_RETRY_SECONDS = 0.05  # between attempts to connect to a peer that was busy
_POLL_SECONDS = 0.5  # between two looks at whether a peer has failed
# In which a peer that cannot be reached may come itself; a relay is tried after that.
_TURN_SECONDS = 3.0
# For an attempt to connect where there may be another way. The kernel looks for a host for 3 s, so
# that the second attempt hears that it is not there.
_BRIEF_SECONDS = 2.0
_MOST_PATIENCE = 4  # times as long as usual for a busy peer to answer
_WAY_SECONDS = 1.0  # in which two interfaces reach each other, or are no way
# Errors after which a retry is useless: the peer's address leads nowhere from here.
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ETIMEDOUT)

_log = logging.getLogger("gradwire")

_unreachable: set[str] = set()  # hosts to which only the relay led from here
_tried_ways = TriedWays()
_relays: dict[int, RelayPlace] = {}  # the last one of each job, by its tag


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
        self._sockets: Sockets = {}
        self._addresses: list[AddressInfo] = []
        listeners, self._own = listen(transports, mesh.interface)
        self._acceptor = Acceptor(listeners, mesh)
        self._own = replace(self._own, relay=self._known_relay())
        if self._own.relays:
            relay.serve(mesh.job)
        self._transports: dict[int, str] = {}
        self._relay: relay.Dial | None = None
        self._relayed: set[int] = set()  # peers to which this rank connects by the relay
        self._registration: relay.Registration | None = None
        self._patience: dict[int, int] = {}  # with peers that have not answered in time
        self._ways: dict[int, dict[int, tuple[Interface, tuple[str, int]]]] = {}  # by peer

    def run(self, exchange: Exchange) -> None:
        self._acceptor.start()
        blobs = exchange(self._own.pack(), self._deadline)
        self._addresses = [unpack_address_info(blob, peer) for peer, blob in enumerate(blobs)]
        others = [peer for peer in range(self._mesh.size) if peer != self._mesh.rank]
        self._relay = self._find_relay()
        self._transports = {peer: self._choose_route(peer) for peer in others}
        mine = [peer for peer in others if self._is_mine(peer)]
        self._acceptor.let_connect(mine)
        if self._own.only_connects:
            self._register()
        for peer in mine:
            self._connect_all(peer, self._transports[peer])
        self._await_higher()
        self._mesh.listeners = self._acceptor.release()
        accepted = self._acceptor.close()
        self._sockets |= accepted
        for peer, purpose, number in accepted:
            if purpose == Purpose.CONTROL and number == 0 and self._relay is None:
                self._compare_source(peer)
        self._mesh.hosts = tuple(info.host for info in self._addresses)
        self._mesh.names = tuple(info.name.rpartition(":")[0] for info in self._addresses)
        self._mesh.site_names = tuple(info.site for info in self._addresses)
        self._mesh.peers = {peer: self._peer(peer, self._transports[peer]) for peer in others}
        self._close_unused()
        self._end_registration()

    def discard(self) -> None:
        self._end_registration()
        for sock in (self._sockets | self._acceptor.close()).values():
            sock.close()
        for listener in self._mesh.listeners:
            listener.close()

    def _is_mine(self, peer: int) -> bool:
        """Whether this rank connects: the higher one does, unless only the lower one can."""
        lower, higher = sorted((self._mesh.rank, peer))
        turned = self._addresses[lower].only_connects and self._is_beyond(peer)
        if turned and not self._addresses[higher].only_connects:
            return self._mesh.rank == lower
        return self._mesh.rank == higher

    def _is_beyond(self, peer: int) -> bool:
        return self._addresses[peer].host != self._own.host

    def _known_relay(self) -> RelayPlace | None:
        host, port = environment.place("GRADWIRE_RELAY")
        if host:
            return RelayPlace("", host, "", port)
        own = self._own
        if own.relays:
            return RelayPlace(own.host, own.advertised, own.address, own.port)
        return _relays.get(self._mesh.job.tag)

    def _find_relay(self) -> relay.Dial | None:
        """What connects to the relay; None where there is none, or this host has it."""
        place = choose_relay(self._addresses)
        if place is None:
            return None
        _relays[self._mesh.job.tag] = place  # also for groups without that rank
        if place.host == self._own.host:
            return None
        info = replace(self._own, unix="", **place._asdict())
        own = self._mesh.interface.interface
        return lambda limit: open_socket(info, "tcp", own, limit)

    def _register(self) -> None:
        """Lets others come by the relay, if there is one."""
        if self._relay is not None and self._registration is None and self._own.listener:
            who = self._mesh.job, self._mesh.rank
            self._registration = relay.Registration(*who, self._relay, self._own.listener)

    def _end_registration(self) -> None:
        if self._registration is not None:
            self._registration.close()

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
        if not KINDS[transport].local and self._relay is None:
            require_route(lower, infos[0], higher, infos[1])
        return transport

    def _connect_all(self, peer: int, transport: str) -> None:
        """Makes all sockets to a peer, unless it makes them, since this rank cannot."""
        control = self._connect(peer, Purpose.CONTROL, transport)
        if control is not None:
            self._go_on(peer, transport, control)

    def _go_on(self, peer: int, transport: str, control: socket.socket) -> None:
        """Makes the other sockets to a peer; the first one shows how long the way is."""
        self._sockets[peer, Purpose.CONTROL, 0] = control
        ways = self._find_ways(peer, transport)
        streams = {way: self._streams_of(peer, transport, way) for way in (0, *ways)}
        for purpose, announced in (
            (Purpose.COLLECTIVE, streams[0]),
            (Purpose.P2P, sum(1 << way for way in ways)),
        ):
            self._add(peer, purpose, transport, 0, announced)
        rest = sockets_of_ways(ways) if ways else []
        self._at_once(
            lambda purpose, number: self._add(
                peer,
                purpose,
                transport,
                number,
                streams[number // MOST_STREAMS] if purpose == Purpose.COLLECTIVE else None,
            ),
            rest,
        )
        self._at_once(
            lambda number: self._add(peer, Purpose.STREAM, transport, number),
            [
                (way * MOST_STREAMS + stream,)
                for way, count in streams.items()
                for stream in range(1, count + 1)
            ],
        )
        self._acceptor.settle(peer)

    def _streams_of(self, peer: int, transport: str, way: int) -> int:
        return further_streams(self._sockets[peer, Purpose.CONTROL, way * MOST_STREAMS], transport)

    def _add(
        self, peer: int, purpose: Purpose, transport: str, number: int, says: int | None = None
    ) -> None:
        """Makes a socket, whose hello says its own number where it has nothing else to say."""
        way, stream = divmod(number, MOST_STREAMS)
        sock = self._connect(peer, purpose, transport, stream if says is None else says, way)
        assert sock is not None
        self._sockets[peer, purpose, number] = sock

    def _at_once(self, call: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Makes sockets at once, since each takes three round trips."""
        errors: list[Exception] = []

        def connect(*given: Any) -> None:
            try:
                call(*given)
            except Exception as error:
                errors.append(error)

        threads = [AuthenticatingThread(target=connect, args=each) for each in arguments]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]

    def _find_ways(self, peer: int, transport: str) -> list[int]:
        """Tries other pairs of interfaces; the ways that lead to the peer, besides the first."""
        info, own = self._addresses[peer], self._own
        if not (own.further or info.further) or not self._has_ways(peer, transport):
            return []
        mine = [self._mesh.interface.interface]
        mine += [Interface(each.interface, each.address) for each in own.further]
        theirs = [(info.address, info.port), *((each.address, each.port) for each in info.further)]
        found = dict(enumerate(ways_between(mine, theirs), 1))
        self._ways[peer] = found
        self._at_once(lambda way: self._try_way(peer, way), [(way,) for way in found])
        numbers = [(way, way * MOST_STREAMS) for way in found]
        return [way for way, key in numbers if (peer, Purpose.CONTROL, key) in self._sockets]

    def _has_ways(self, peer: int, transport: str) -> bool:
        info = self._addresses[peer]
        known = not (info.advertised or self._own.advertised or peer in self._relayed)
        return transport == "tcp" and known and self._is_beyond(peer) and not info.is_unix_only

    def _try_way(self, peer: int, way: int) -> None:
        interface, place = self._ways[peer][way]
        pair = interface.name, self._addresses[peer].host, place[0]
        if _tried_ways.lead_nowhere(*pair):
            return
        try:
            limit = self._deadline.within(_WAY_SECONDS)
            sock = open_way(interface, place, limit)
            sock = self._prove(sock, peer, Purpose.CONTROL, 0, way, limit)
        except OSError as error:
            _tried_ways.failed(*pair)
            _log.debug("%s leads to no rank %d at %s port %d: %s", interface, peer, *place, error)
        else:
            _tried_ways.worked(interface.name)
            self._sockets[peer, Purpose.CONTROL, way * MOST_STREAMS] = sock

    def _connect(
        self, peer: int, purpose: Purpose, transport: str, stream: int = 0, way: int = 0
    ) -> socket.socket | None:
        """A socket to a peer; None where the peer makes all, as it may until the first is there."""
        info, first = self._addresses[peer], purpose == Purpose.CONTROL
        pause, patience = threading.Event(), self._patience_with(peer)
        # The first packets may be lost where there is no other way.
        silence = patience if self._relay is not None else Deadline(endpoints.CONNECT_SECONDS)
        while True:
            if first and self._acceptor.is_taken(peer):
                return None
            try:
                sock = self._open(peer, transport, first, way)
                return self._authenticate(sock, peer, purpose, stream, way)
            except SettingsError as error:
                raise RendezvousError(
                    f"rank {self._mesh.rank} and rank {peer} ({info.name}) cannot connect: {error}"
                ) from error
            except (ConnectionRefusedError, HandshakeError) as error:
                refused = isinstance(error, ConnectionRefusedError)
                if not (refused and self._goes_on(peer, patience, first=first)):
                    raise self._refused(peer, transport, error) from error
            except OSError as error:
                if shortage := describe_shortage(error):
                    raise self._short(shortage) from error
                limit = silence if error.errno == errno.ETIMEDOUT else patience
                vain = error.errno in _NO_WAY and not self._goes_on(peer, limit, first=first)
                if vain or self._deadline.passed:
                    raise self._unreachable(peer, transport, error) from error
            self._check_peers()
            pause.wait(min(_RETRY_SECONDS, self._deadline.remaining))

    def _patience_with(self, peer: int) -> Deadline:
        """For how long a peer that this rank cannot reach may still come itself."""
        info = self._addresses[peer]
        in_vain = info.only_connects or (self._relay is not None and info.host in _unreachable)
        return Deadline(_TURN_SECONDS if self._is_beyond(peer) and not in_vain else 0.0)

    def _goes_on(self, peer: int, patience: Deadline, *, first: bool) -> bool:
        """Whether to try again where a peer cannot be reached; by the relay, in the end."""
        if not patience.passed or peer in self._relayed:
            return not self._deadline.passed
        if not first or self._relay is None or not self._is_beyond(peer):
            return False
        self._relayed.add(peer)
        _unreachable.add(self._addresses[peer].host)
        return True

    def _open(self, peer: int, transport: str, first: bool, way: int) -> socket.socket:
        if way:
            return open_way(*self._ways[peer][way], self._deadline.within(_BRIEF_SECONDS))
        info, relayed = self._addresses[peer], peer in self._relayed
        if first and info.only_connects and self._is_beyond(peer) and not relayed:
            raise OSError(errno.EHOSTUNREACH, "it accepts no connections from other hosts")
        if relayed and self._relay is not None:
            return self._relay(self._deadline)
        brief = first and self._is_beyond(peer)
        limit = self._deadline.within(_BRIEF_SECONDS) if brief else self._deadline
        return open_socket(info, transport, self._mesh.interface.interface, limit)

    def _refused(self, peer: int, transport: str, error: OSError) -> RendezvousError:
        self._raise_if_peer_failed(_POLL_SECONDS)
        self._check_peers()
        info = self._addresses[peer]
        return RendezvousError(
            f"rank {peer} ({info.name}, {info.where(transport)}) no longer accepts "
            f"connections ({error}): it has probably failed; its own message says why"
        )

    def _short(self, shortage: str) -> RendezvousError:
        mesh = self._mesh
        return RendezvousError(
            f"rank {mesh.rank} of {mesh.size} ({self._own.name}) cannot connect: {shortage}; it "
            f"needs {len(PURPOSES)} for each other rank, and more for links"
        )

    def _unreachable(self, peer: int, transport: str, error: OSError) -> RendezvousError:
        info = self._addresses[peer]
        if info.only_connects:
            return RendezvousError(
                f"neither rank {self._mesh.rank} ({self._own.name}) nor rank {peer} ({info.name}) "
                f"accepts connections, by GRADWIRE_ADVERTISE={NOWHERE}, and no rank can relay: set "
                "GRADWIRE_PORT on a host that both can reach"
            )
        return RendezvousError(
            f"rank {self._mesh.rank} ({self._own.name}, {self._own.where(transport)}) could not "
            f"connect to rank {peer} ({info.name}, {info.where(transport)}) within "
            f"{self._deadline.seconds:g} s ({error.strerror or error}): a firewall is in between, "
            "or these are different networks; then set GRADWIRE_SOCKET_IFNAME on both hosts to an "
            "interface of a network that they share"
        )

    def _authenticate(
        self,
        sock: socket.socket,
        peer: int,
        purpose: Purpose,
        stream: int = 0,
        way: int = 0,
    ) -> socket.socket | None:
        """Proves this rank on a socket; None where the peer has made the first one of the pair."""
        if purpose != Purpose.CONTROL:
            return self._prove(sock, peer, purpose, stream, way, self._deadline)
        if not self._acceptor.claim(peer):
            sock.close()
            return None
        try:
            return self._prove(sock, peer, purpose, stream, way, self._deadline)
        except BaseException:
            self._acceptor.give_up(peer)
            raise

    def _prove(
        self,
        sock: socket.socket,
        peer: int,
        purpose: Purpose,
        stream: int,
        way: int,
        limit: Deadline,
    ) -> socket.socket:
        job, mesh = self._mesh.job, self._mesh
        listener = self._addresses[peer].listener
        numbers = mesh.communicator, job.epoch, mesh.rank, peer, stream, listener, way
        hello = Hello(job.name, purpose, *numbers)
        patience = self._patience.get(peer, 1)
        try:
            return client_handshake(sock, hello, job.secret, limit, patience)
        except TimeoutError:  # a busy peer's work grows with each attempt that is given up
            self._patience[peer] = min(2 * patience, _MOST_PATIENCE)
            raise

    def _await_higher(self) -> None:
        """Waits for the peers that connect to this rank, and turns to those that do not."""
        pause = _TURN_SECONDS / 2
        patience = Deadline(pause)
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
            if patience.passed:
                self._register()
                for peer in missing:
                    self._turn_to(peer)
                # Each refuses the other while both try: so leave the peers more and more time.
                pause *= 2
                patience = Deadline(pause)

    def _turn_to(self, peer: int) -> None:
        """Connects to a peer that should do so and does not: perhaps there is only this way."""
        info, transport = self._addresses[peer], self._transports[peer]
        if not self._is_beyond(peer) or info.only_connects or self._acceptor.is_taken(peer):
            return
        limit = self._deadline.within(_BRIEF_SECONDS)
        with contextlib.suppress(OSError):  # it is busy, or there is no way
            sock = open_socket(info, transport, self._mesh.interface.interface, limit)
            control = self._authenticate(sock, peer, Purpose.CONTROL)
            if control is not None:
                self._go_on(peer, transport, control)

    def _check_peers(self) -> None:
        """Raises when another rank has given up, or has ended without reporting a failure."""
        self._raise_if_peer_failed(0)
        for (peer, purpose, number), sock in (self._sockets | self._acceptor.accepted()).items():
            if purpose == Purpose.CONTROL and number == 0 and _has_ended(sock):
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
                "split() may make them, take longer to make: GRADWIRE_ADVERTISE says where it is "
                "reached, and GRADWIRE_SOCKET_IFNAME chooses the interface",
                *(peer, info.name, info.where("tcp"), self._mesh.rank, self._own.where("tcp")),
                *(source, peer),
            )

    def _peer(self, peer: int, transport: str) -> Peer:
        same_host = self._addresses[peer].host == self._own.host
        made = peer_of(self._sockets, peer, transport, same_host=same_host)
        if made.ways and peer in self._ways:  # this rank has connected
            made.dials = self._dials(peer)
        return made

    def _dials(self, peer: int) -> tuple[Dial, ...]:
        """What connects each way anew."""
        info = self._addresses[peer]
        first = partial(open_socket, info, "tcp", self._mesh.interface.interface)
        pairs = (self._ways[peer][way] for way in further_ways(self._sockets, peer))
        calls = [first, *(partial(open_way, *pair) for pair in pairs)]
        return tuple(Dial(info.listener, call) for call in calls)

    def _close_unused(self) -> None:
        """Closes the first sockets of ways on which the peer gave up."""
        used = {id(sock) for peer in self._mesh.peers.values() for sock in peer.sockets()}
        for sock in self._sockets.values():
            if id(sock) not in used:
                sock.close()


def _one_at_a_time(call: Callable[[float], None]) -> Callable[[float], None]:
    """The call for threads that connect streams: what it asks need not be for several threads."""
    lock = threading.Lock()

    def locked(seconds: float) -> None:
        with lock:
            call(seconds)

    return locked


def _has_ended(sock: socket.socket) -> bool:
    """Whether the peer closed the socket, which before the mesh is complete is a failure."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
