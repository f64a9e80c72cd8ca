"""The mesh: three authenticated sockets to every peer, ready to be handed to the C++ core.

One carries control frames, two carry data ("collective", "p2p"), and over a long way further ones
do, too. `connect` builds the mesh for ranks that are processes, `inproc_meshes` for ranks that are
threads.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._base.texts import read_fields
from gradwire._errors import RendezvousError
from gradwire._host.identity import host_identity
from gradwire._host.interfaces import LOOPBACK, MOST_WAYS, Choice
from gradwire._host.tcp_sockets import TcpSocket
from gradwire._host.transport_kinds import KINDS

LANES = ("collective", "p2p")
NOWHERE = "none"  # advertised by a rank to which no other host can connect


@dataclass(frozen=True)
class Job:
    """One start of a program: its name, its secret, and a number that no other start has."""

    name: str
    secret: bytes = field(repr=False)
    epoch: int = 0  # 32 random bits of rank 0
    privacy: str = ""  # for messages: what keeps strangers out

    @property
    def tag(self) -> int:
        """64 bits that tell jobs of one name apart, and reveal nothing of the secret."""
        what = f"gradwire/1 status {self.epoch} {self.name}".encode()
        key = hashlib.sha256(self.secret).digest()
        return int.from_bytes(hashlib.blake2b(what, key=key, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Membership:
    """The number of changes of a mesh's ranks so far, and the means for others to join."""

    epoch: int = 0
    joined: int = 0  # the last ranks, so many of them, joined at this epoch
    store: str | None = None  # URL of the store in which its join listener is found; None: unknown
    secret: bytes | None = field(default=None, repr=False)  # that the ranks were given, if any
    offered: tuple[str, ...] = ()  # transports

    def next(self, joined: int) -> Membership:
        """The membership after a change."""
        return replace(self, epoch=self.epoch + 1, joined=joined)


class WaySocket(NamedTuple):
    """A socket on a way: a stream of messages, or one of acknowledgements."""

    sock: socket.socket
    way: int
    acknowledges: bool


class Link(NamedTuple):
    """One lane's data socket to a peer, and its transport; over a long way, further streams.

    Where there are several ways, also the streams of these, and what acknowledges on all.
    """

    transport: str
    sock: socket.socket
    streams: tuple[socket.socket, ...] = ()
    by_ways: tuple[WaySocket, ...] = ()

    def sockets(self) -> tuple[socket.socket, ...]:
        """The data socket, the further streams, and the sockets of further ways."""
        return (self.sock, *self.streams, *(each.sock for each in self.by_ways))

    def roles(self) -> list[tuple[int, bool]]:
        """The way of each of the sockets(), and whether it acknowledges."""
        first = [(0, False)] * (1 + len(self.streams))
        return first + [(each.way, each.acknowledges) for each in self.by_ways]


class Dial(NamedTuple):
    """What connects a way of a peer anew."""

    listener: int  # the peer's, see `shared_port`
    connect: Callable[[Deadline], socket.socket]


@dataclass
class Peer:
    """All sockets between this rank and another."""

    same_host: bool
    control: socket.socket
    links: dict[str, Link]
    controls: tuple[socket.socket, ...] = ()  # of further ways
    ways: tuple[str, ...] = ()  # names of all ways, where there are several
    dials: tuple[Dial, ...] = ()  # by way; empty where the peer makes the ways

    def sockets(self) -> Iterable[socket.socket]:
        """All of the peer's sockets; `detach()` hands one over."""
        return (
            self.control,
            *self.controls,
            *(sock for link in self.links.values() for sock in link.sockets()),
        )


@dataclass
class Mesh:
    """The sockets of one rank of one communicator."""

    job: Job
    rank: int
    size: int
    communicator: int
    hosts: tuple[str, ...]  # by rank; equal for ranks of one host
    peers: dict[int, Peer]
    interface: Choice
    names: tuple[str, ...] = ()  # of the hosts, by rank, for messages; empty when unknown
    site_names: tuple[str, ...] = ()  # by rank: what GRADWIRE_SITE says; empty where it does not
    sites: tuple[tuple[int, ...], ...] = ()  # the ranks of each; empty: all are in one
    model: _core.CostModel | None = None  # rank 0's, the same on all ranks
    job_ranks: tuple[int, ...] = ()  # the number in the job of each rank; empty: the same numbers
    membership: Membership = Membership()
    progress: _core.ProgressThread = field(default_factory=_core.ProgressThread)  # its groups' too
    tcp_sockets: list[TcpSocket] = field(default_factory=list)  # that the core has, for metrics
    listeners: tuple[socket.socket, ...] = ()  # at which peers may make their ways anew

    def job_rank(self, rank: int) -> int:
        """The number in the job of a rank of this mesh."""
        return self.job_ranks[rank] if self.job_ranks else rank

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports in use, best first."""
        used = {link.transport for peer in self.peers.values() for link in peer.links.values()}
        return tuple(name for name in KINDS if name in used)

    def close(self) -> None:
        """Closes every socket that was not handed over."""
        for peer in self.peers.values():
            for sock in peer.sockets():
                sock.close()
        for listener in self.listeners:
            listener.close()


class WayPlace(NamedTuple):
    """Where a rank listens at a further interface."""

    interface: str
    address: str
    port: int


class RelayPlace(NamedTuple):
    """Where a relay listens."""

    host: str  # its identity; empty where GRADWIRE_RELAY names the relay
    advertised: str  # the host that others connect to, where it is not the address
    address: str
    port: int


@dataclass(frozen=True)
class AddressInfo:
    """A rank's addresses and transports, which it publishes for the other ranks."""

    host: str
    name: str  # for messages: host name and process id
    transports: tuple[str, ...]
    unix: str
    address: str
    port: int
    interface: str = ""  # for messages: the name of the interface that has the address
    networks: tuple[str, ...] = ()  # of transports, by which they reach other hosts
    advertised: str = ""  # the host that others connect to, where it is not the address; NOWHERE
    listener: int = 0  # its number at a shared port and at relays
    relays: bool = False  # whether it relays for others at its port
    site: str = ""
    relay: RelayPlace | None = None  # that it knows, be it its own one
    further: tuple[WayPlace, ...] = ()  # interfaces besides that of the address

    def pack(self) -> bytes:
        """Encodes all fields as JSON."""
        return json.dumps(self.__dict__).encode()

    def describe(self) -> str:
        """The process and its transports, for messages."""
        return f"{self.name}: {','.join(self.transports) or 'none'}"

    @property
    def is_unix_only(self) -> bool:
        """Whether it listens on a Unix socket alone, as all do where they are on one host."""
        return bool(self.unix) and not self.port

    @property
    def only_connects(self) -> bool:
        """Whether other hosts cannot connect to it."""
        return self.advertised == NOWHERE

    def where(self, transport: str) -> str:
        """The address that a transport connects to, for messages."""
        if KINDS[transport].local or self.is_unix_only:
            return f"@{self.unix}"
        if self.only_connects:
            return f"{self.interface} {self.address}, with GRADWIRE_ADVERTISE={NOWHERE}".lstrip()
        host = f", which advertises {self.advertised}," if self.advertised else ""
        return f"{self.interface} {self.address}{host} port {self.port}".lstrip()


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "host": str,
    "name": str,
    "transports": list,
    "unix": str,
    "address": str,
    "port": int,
    "interface": str,
    "networks": list,
    "advertised": str,
    "listener": int,
    "relays": bool,
    "site": str,
    "relay": (list, NoneType),
    "further": list,
}
_MAX_BYTES = 4096
_MAX_CHARACTERS = 255


def unpack_address_info(data: bytes, rank: int) -> AddressInfo:
    """Decodes another rank's AddressInfo; raises RendezvousError for anything else."""
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError("it is too long")
        return _read_address_info(read_fields(data, **_FIELDS))
    except ValueError as error:
        raise RendezvousError(
            f"rank {rank} published no address information ({error}): another gradwire version?"
        ) from None


def _read_address_info(found: dict[str, Any]) -> AddressInfo:
    """Checks that all values can be connected to and printed; raises ValueError otherwise."""
    texts = [each for each in found.values() if isinstance(each, str)]
    texts += found["transports"] + found["networks"]
    if not all(_is_plain(each) for each in texts):
        raise ValueError("a text in it is too long, or not printable")
    if not 0 <= found["port"] < 1 << 16:
        raise ValueError("its port is out of range")
    if not 0 <= found["listener"] < 1 << 64:
        raise ValueError("its listener's number is out of range")
    ipaddress.ip_address(found["address"])
    lists = {name: tuple(each) for name, each in found.items() if isinstance(each, list)}
    relay = None if found["relay"] is None else _read_relay(found["relay"])
    if len(found["further"]) >= MOST_WAYS:
        raise ValueError("it has more interfaces than are used")
    further = tuple(map(_read_way_place, found["further"]))
    return AddressInfo(**{**found, **lists, "relay": relay, "further": further})


def _read_way_place(found: Any) -> WayPlace:
    """Checks a further interface alike; raises ValueError."""
    if not isinstance(found, list) or len(found) != 3:
        raise ValueError("an interface of it has other fields")
    name, address, port = found
    if not _is_plain(name) or type(address) is not str:
        raise ValueError("a text of its interfaces is too long, or not printable")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError("an interface's port is out of range")
    ipaddress.ip_address(address)
    return WayPlace(name, address, port)


def _read_relay(found: list[Any]) -> RelayPlace:
    """Checks it alike; raises ValueError."""
    host, advertised, address, port = found
    if not all(_is_plain(each) for each in (host, advertised, address)):
        raise ValueError("a text of its relay is too long, or not printable")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ValueError("its relay's port is out of range")
    if not advertised:
        ipaddress.ip_address(address)
    return RelayPlace(host, advertised, address, port)


def _is_plain(text: object) -> bool:
    return (
        isinstance(text, str)
        and len(text) <= _MAX_CHARACTERS
        and text.isascii()
        and text.isprintable()
    )


def choose_transport(lower: AddressInfo, higher: AddressInfo) -> str | None:
    """The first of the lower rank's transports that both have and that joins the two hosts."""
    both = (name for name in lower.transports if name in higher.transports)
    return next((name for name in both if _joins(name, lower, higher)), None)


def _joins(transport: str, one: AddressInfo, other: AddressInfo) -> bool:
    kind = KINDS.get(transport)  # None: both offer one that this version does not have
    if kind is None:
        return False
    if kind.reach == "network":
        common = set(one.networks) & set(other.networks)
        return any(network.startswith(f"{transport} ") for network in common)
    return kind.reach == "all" or one.host == other.host


def choose_relay(infos: Iterable[AddressInfo]) -> RelayPlace | None:
    """The relay of these ranks, the same on all: one that a user named, or else a member's, or else
    any that a member knows; of equals the lowest rank's.
    """
    known = [(each.relay, each.relays) for each in infos if each.relay is not None]
    by_rank = sorted(known, key=lambda each: (each[0].host != "", not each[1]))
    return by_rank[0][0] if by_rank else None


def inproc_meshes(size: int) -> list[Mesh]:
    """Makes a mesh for each rank that is a thread of this process, joined by socket pairs."""
    job = Job("threads", secrets.token_bytes(32))
    hosts = (host_identity(),) * size
    meshes = [Mesh(job, rank, size, 0, hosts, {}, LOOPBACK) for rank in range(size)]
    for lower in range(size):
        for higher in range(lower + 1, size):
            ends = zip(*(socket.socketpair() for _ in ("control", *LANES)), strict=True)
            for (owner, other), sockets in zip(
                ((lower, higher), (higher, lower)), ends, strict=True
            ):
                links = [Link("inproc", sock) for sock in sockets[1:]]
                named = dict(zip(LANES, links, strict=True))
                meshes[owner].peers[other] = Peer(True, sockets[0], named)
    return meshes
