"""The mesh: three authenticated sockets to every peer, ready to be handed to the C++ core.

One carries control frames, two carry data ("collective", "p2p"). `connect` builds it for ranks
that are processes, `inproc_meshes` for ranks that are threads.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._errors import RendezvousError
from gradwire._host.interfaces import LOOPBACK, Choice

DEFAULT_TRANSPORTS = ("shm", "rdma", "tcp")
LOCAL_TRANSPORTS = ("inproc", "shm")  # within a host, over Unix sockets
EMULATED = "emulated"  # within a host, over TCP; see _host.emulated_link
LANES = ("collective", "p2p")


@dataclass(frozen=True)
class Job:
    """Who belongs together: a name, a secret, and how often the job was restarted."""

    name: str
    secret: bytes = field(repr=False)
    epoch: int = 0
    privacy: str = ""  # for people: what keeps strangers out

    @property
    def tag(self) -> int:
        """Tells jobs of one name apart, in 64 bits; says nothing of the secret."""
        what = f"gradwire/1 status {self.epoch} {self.name}".encode()
        return int.from_bytes(hmac.digest(self.secret, what, "sha256")[:8], "little")


class Link(NamedTuple):
    """A data lane to a peer."""

    transport: str
    sock: socket.socket


@dataclass
class Peer:
    """Everything there is between this rank and another."""

    rank: int
    same_host: bool
    control: socket.socket
    links: dict[str, Link]

    def sockets(self) -> Iterable[socket.socket]:
        """Its sockets; `detach()` hands one over."""
        return (self.control, *(link.sock for link in self.links.values()))


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
    names: tuple[str, ...] = ()  # of the hosts, for people, by rank; where they are known
    model: _core.CostModel | None = None  # rank 0's, which all ranks have

    @property
    def transports(self) -> tuple[str, ...]:
        """Those in use, best first."""
        used = {peer.links["collective"].transport for peer in self.peers.values()}
        return tuple(name for name in ("inproc", *DEFAULT_TRANSPORTS, EMULATED) if name in used)

    def close(self) -> None:
        """Closes every socket that was not handed over."""
        for peer in self.peers.values():
            for sock in peer.sockets():
                sock.close()


def host_identity() -> str:
    """Equal exactly for processes that share a kernel and a network namespace.

    Abstract Unix sockets, over which shared memory is passed, reach just as far: containers on one
    machine may or may not share the namespace. Boot ids tell cloned machines apart.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    host: str
    name: str  # for messages: host name and process id
    transports: tuple[str, ...]
    unix: str
    address: str
    port: int
    interface: str = ""  # for messages: what has the address
    networks: tuple[str, ...] = ()  # that RDMA reaches others by

    def pack(self) -> bytes:
        """As JSON."""
        return json.dumps(self.__dict__).encode()

    def describe(self) -> str:
        """For messages: who it is and what it offers."""
        return f"{self.name}: {','.join(self.transports) or 'none'}"

    def where(self, transport: str) -> str:
        """For messages: the address that a transport connects to."""
        if transport in LOCAL_TRANSPORTS:
            return f"@{self.unix}"
        return f"{self.interface} {self.address} port {self.port}".lstrip()


_FIELDS: dict[str, type] = {
    "host": str,
    "name": str,
    "transports": list,
    "unix": str,
    "address": str,
    "port": int,
    "interface": str,
    "networks": list,
}
_MAX_CARD = 4096  # bytes
_MAX_TEXT = 255  # characters


def unpack_card(data: bytes, rank: int) -> Card:
    """Reads another rank's card; raises RendezvousError for what is none."""
    try:
        if len(data) > _MAX_CARD:
            raise ValueError("it is too long")
        return _read_card(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise RendezvousError(
            f"rank {rank} published no address card ({error}): another gradwire version?"
        ) from None


def _read_card(found: Any) -> Card:
    """The card, all of whose values are fit for use and for messages; else raises ValueError."""
    if not isinstance(found, dict) or {key: type(found[key]) for key in found} != _FIELDS:
        raise ValueError("it has other fields")
    texts = [each for each in found.values() if isinstance(each, str)]
    texts += found["transports"] + found["networks"]
    if not all(_is_plain(each) for each in texts):
        raise ValueError("a text in it is too long, or not printable")
    if not 0 <= found["port"] < 1 << 16:
        raise ValueError("its port is out of range")
    ipaddress.ip_address(found["address"])
    lists = {name: tuple(each) for name, each in found.items() if isinstance(each, list)}
    return Card(**{**found, **lists})


def _is_plain(text: object) -> bool:
    return (
        isinstance(text, str) and len(text) <= _MAX_TEXT and text.isascii() and text.isprintable()
    )


def choose_transport(lower: Card, higher: Card) -> str | None:
    """The first of the lower rank's transports that both have and that joins the two."""
    both = (name for name in lower.transports if name in higher.transports)
    return next((name for name in both if _joins(name, lower, higher)), None)


def _joins(transport: str, one: Card, other: Card) -> bool:
    if transport == "rdma":
        return not set(one.networks).isdisjoint(other.networks)
    return one.host == other.host or transport not in (*LOCAL_TRANSPORTS, EMULATED)


def process_name() -> str:
    """Host name and process id, by which messages tell ranks apart."""
    return f"{socket.gethostname()}:{os.getpid()}"


def inproc_meshes(size: int) -> list[Mesh]:
    """One mesh per rank for ranks that are threads of this process, joined by socket pairs."""
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
                meshes[owner].peers[other] = Peer(other, True, sockets[0], named)
    return meshes
