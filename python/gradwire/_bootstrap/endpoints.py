"""Where a rank listens, and how another one connects to it."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from dataclasses import replace

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import shared_port
from gradwire._bootstrap.authenticator import BACKLOG, open_listener
from gradwire._bootstrap.handshake import bind_to_device, dial
from gradwire._bootstrap.mesh import NOWHERE, AddressInfo, WayPlace
from gradwire._errors import RendezvousError
from gradwire._host.identity import host_identity, process_name
from gradwire._host.interfaces import (
    Choice,
    Interface,
    Target,
    family_of,
    further,
    is_loopback,
)
from gradwire._host.transport_kinds import KINDS, networks_of

_log = logging.getLogger("gradwire")

CONNECT_SECONDS = 20.0  # in which a host that can be reached answers a connection attempt


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
    beyond = not here and not all(KINDS[name].local for name in transports)
    shared = beyond and shared_port.chosen_port() != 0
    if beyond and advertised != NOWHERE:
        listener, port = _listen_beyond(choice.interface)
        listeners += listener
    if shared or (beyond and not choice.interface.loopback):  # else nobody comes by a relay
        number = secrets.randbits(64)
        listeners.append(open_listener(number, shared_port.chosen_port()))
    share_memory = choice.interface.loopback and "shm" in transports  # all ranks are here
    networks = () if share_memory else networks_of(transports)
    relays = shared and advertised != NOWHERE
    site = environment.text("GRADWIRE_SITE") or ""
    where = (unix, address, port, name, networks, advertised, number, relays, site)
    info = AddressInfo(host_identity(), process_name(), transports, *where)
    if not beyond or shared or advertised or "tcp" not in transports:
        return listeners, info
    more, places = _listen_further(choice.interface)
    return listeners + more, replace(info, further=places)


def _listen_further(chosen: Interface) -> tuple[list[socket.socket], tuple[WayPlace, ...]]:
    """Listens at further interfaces, where that can be."""
    listeners, places = [], []
    for each in further(chosen):
        listener = socket.socket(each.family, socket.SOCK_STREAM)
        bind_to_device(listener, each.name)
        try:
            listener.bind(each.target(each.address, 0))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            _log.debug("cannot listen on %s: %s", each, error)
            continue
        listeners.append(listener)
        places.append(WayPlace(each.name, each.address, listener.getsockname()[1]))
    return listeners, tuple(places)


def open_way(own: Interface, place: tuple[str, int], deadline: Deadline) -> socket.socket:
    """Connects to a peer's address by an interface; raises OSError."""
    target, source = own.target(*place), own.target(own.address, 0)
    return dial(own.family, target, deadline.left, source, own.name)


def _listen_beyond(interface: Interface) -> tuple[list[socket.socket], int]:
    """Listens for other hosts: the listener, unless others share its port; and the port."""
    shared = shared_port.chosen_port()
    target = interface.target(interface.address, shared)
    if not shared:
        listener = _bind(interface.family, target)
        return [listener], listener.getsockname()[1]
    try:
        shared_port.share(interface.family, target)
    except OSError as error:
        raise RendezvousError(
            f"cannot listen on {interface} port {shared}, as GRADWIRE_PORT says ({error}): "
            "end the program that has it, or choose another port"
        ) from error
    return [], shared_port.advertised_port()


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
    seconds = deadline.within(CONNECT_SECONDS).left
    near = info.unix and info.advertised and info.host == host_identity()
    if KINDS[transport].local or info.is_unix_only or near:
        return dial(socket.AF_UNIX, "\0" + info.unix, seconds)
    if info.advertised:
        return dial_by_name(info.advertised, info.port, seconds)
    target, source = own.target(info.address, info.port), own.target(own.address, 0)
    try:
        return dial(own.family, target, seconds, source)
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, f"no answer in {seconds:.2g} s") from error


def dial_by_name(host: str, port: int, seconds: float) -> socket.socket:
    """Connects to one of the addresses that a host's name stands for; raises OSError.

    Each address has its share of these seconds.
    """
    limit, last = Deadline(seconds), OSError(f"{host} has no address")
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for others, (family, *_, target) in zip(reversed(range(len(found))), found, strict=True):
        try:
            return dial(family, target, limit.left / (others + 1))
        except TimeoutError:
            last = OSError(errno.ETIMEDOUT, f"no answer in {seconds:.2g} s")
        except OSError as error:
            last = error
    raise last


def require_route(lower: int, listens: AddressInfo, higher: int, connects: AddressInfo) -> None:
    """Raises RendezvousError when no packet can get from one rank's address to the other's."""
    why = ""
    if listens.advertised or connects.advertised:
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
