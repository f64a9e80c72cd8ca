"""The network address that a rank listens on, and the reason for the choice.

When ranks are on several hosts, the default is the address that reaches the store, which is known
to be routed to the others. On the store's own host that may be loopback; then it is the address at
which the others reach the store. `GRADWIRE_SOCKET_IFNAME` overrides it, in NCCL's syntax.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire._base import environment
from gradwire._errors import RendezvousError

_SIOCGIFCONF = 0x8912
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_IFF_RUNNING = 0x40  # has a carrier: a bridge without members is up but leads nowhere
_IFREQ = struct.Struct("16sHxx4s16x")  # name, family, port, IPv4 address
_IFCONF = struct.Struct("iP")
MOST_WAYS = 8  # between two ranks
_UNUSABLE = 0x40 | 0x08  # IPv6: tentative, or found to be in use by another host

# Interfaces for containers and virtual machines, often with the same address on every host.
_INTERNAL = ("docker", "podman", "virbr", "br-", "veth", "lxc", "lxd", "cni", "flannel", "cali")
# Addresses for documentation: never sent to, only looked up in the routing table.
_ANYWHERE = ("198.51.100.1", "2001:db8::1")

Target = tuple[str, int] | tuple[str, int, int, int]


class Interface(NamedTuple):
    """One address of one interface that is up and connected."""

    name: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return family_of(self.address)

    @property
    def loopback(self) -> bool:
        """Whether no other host can reach it."""
        return is_loopback(self.address)

    def target(self, address: str, port: int) -> Target:
        """A socket address that goes out by this interface; link-local ones need its index."""
        if ipaddress.ip_address(address).is_link_local and ":" in address:
            return _bare(address), port, 0, self._index(address)
        return address, port

    def holds(self, address: str) -> bool:
        """Whether this interface has the address; fe80::1%eth0 can only be eth0's."""
        scope = address.partition("%")[2]
        return self.address == _bare(address) and scope in ("", self.name)

    def _index(self, address: str) -> int:
        try:
            return socket.if_nametoindex(self.name)
        except OSError as error:
            raise RendezvousError(
                f"{address} needs the interface that it belongs to, and this host has none named "
                f"{self.name!r} ({error}): set GRADWIRE_SOCKET_IFNAME to one that is up"
            ) from error

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


class Choice(NamedTuple):
    """The address to listen on, with the reason for the log and for `gradwire doctor`."""

    interface: Interface
    reason: str

    def __str__(self) -> str:
        return f"{self.interface}: {self.reason}"


class Route(NamedTuple):
    """The own address from which a host is reached, and the address at which."""

    source: str
    target: str


LOOPBACK = Choice(Interface("lo", "127.0.0.1"), "all ranks are on this host")


def family_of(address: str) -> socket.AddressFamily:
    """AF_INET or AF_INET6, by the form of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves its host."""
    return ipaddress.ip_address(_bare(address)).is_loopback


def _bare(address: str) -> str:
    """An address without its scope: fe80::1 for fe80::1%eth0."""
    return address.partition("%")[0]


def interfaces() -> list[Interface]:
    """All addresses of the interfaces that are up and connected: IPv4 first, link-local last."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        up = {name for name in names if _flags(probe, name) == _IFF_UP | _IFF_RUNNING}
        found = [each for each in (*_ipv4(probe), *_ipv6()) if each.name in up]
    return sorted(found, key=_is_link_local)


def matches(name: str, pattern: str) -> bool:
    """Whether an interface's name fits NCCL's pattern: eth,ib · =eth0 · ^docker,lo · ^=eth3."""
    excluding = pattern.startswith("^")
    exact = pattern[excluding:].startswith("=")
    words = [word.strip() for word in pattern[excluding + exact :].split(",") if word.strip()]
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return hit != excluding


def route_to(host: str, port: int) -> Route:
    """The route of packets to host:port; nothing is sent."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise _no_way(host, error) from error
    failures = []
    for family, kind, _, _, target in known:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return Route(str(probe.getsockname()[0]), str(probe.getpeername()[0]))
        except OSError as error:
            failures.append(error)
    raise _no_way(host, failures[0])


def address_towards(host: str, port: int) -> str:
    """The own address from which packets to host:port would leave; nothing is sent."""
    return route_to(host, port).source


def choose(towards: str | None, *, several_hosts: bool, reached: Collection[str] = ()) -> Choice:
    """Chooses the address to listen on; raises RendezvousError when there is none.

    GRADWIRE_SOCKET_IFNAME overrides the choice.

    `towards` is the own address that reaches the store, None when the store is local.
    `several_hosts` says that some rank is on another host, so that loopback is useless. `reached`
    are addresses at which ranks of other hosts reach the store.
    """
    found, pattern = interfaces(), environment.text("GRADWIRE_SOCKET_IFNAME")
    if pattern is not None:
        return _by_pattern(found, pattern, towards, several_hosts, reached)
    if not several_hosts:
        if towards is not None and is_loopback(towards):
            return Choice(Interface("lo", towards), LOOPBACK.reason)
        return loopback()
    if towards is not None and not is_loopback(towards):
        return Choice(_holder(found, towards), "it reaches the store")
    for each in found:
        if each.address in map(_bare, reached) and not each.loopback:
            return Choice(each, "other hosts reach the store, which is on this one, at it")
    return guess()


def further(chosen: Interface) -> list[Interface]:
    """Interfaces that are used besides the chosen one, one address of each.

    Those that GRADWIRE_SOCKET_IFNAME names. Where it names none, network cards as fast as the
    chosen one: no VPN, no bridge, no wireless one.
    """
    if chosen.loopback:
        return []
    pattern = environment.text("GRADWIRE_SOCKET_IFNAME") or "^"
    found = {
        each.name: each
        for each in reversed(interfaces())
        if each.family == chosen.family
        and matches(each.name, pattern)
        and not (each.loopback or _is_link_local(each) or each.name == chosen.name)
    }
    if pattern.startswith("^"):
        speed = _speed(chosen.name)
        found = {name: each for name, each in found.items() if 0 < speed == _speed(name)}
    return sorted(found.values())[: MOST_WAYS - 1]


def _speed(name: str) -> int:
    """The rate of a wired network card in Mbit/s; 0 for everything else."""
    folder = Path("/sys/class/net") / name
    if not (folder / "device").exists() or (folder / "wireless").exists():
        return 0
    try:
        return max(0, int((folder / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def ways_between(
    own: Sequence[Interface], theirs: Sequence[tuple[str, int]]
) -> list[tuple[Interface, tuple[str, int]]]:
    """Pairs of own interfaces and a peer's addresses, in which each of both is, besides the first.

    An address is reached by the interface to which the routing table leads, or by one that has no
    pair yet where that one has. Whether the pairs reach each other remains to be tried.
    """
    used, found = {own[0].name}, []
    for place in theirs[1:]:
        free = [each for each in own if each.name not in used]
        routed = [each for each in own if each.holds(_source_towards(*place))]
        unused = [each for each in routed if each in free] or free or routed
        if unused:
            used.add(unused[0].name)
            found.append((unused[0], place))
    found += [(each, theirs[0]) for each in own if each.name not in used]
    return found[: MOST_WAYS - 1]


def _source_towards(host: str, port: int) -> str:
    try:
        return address_towards(host, port)
    except RendezvousError:  # no route leads there
        return ""


def loopback() -> Choice:
    """The loopback address: 127.0.0.1, but where the host has another one alone, as ::1."""
    found = [each for each in interfaces() if each.loopback]
    if not found or LOOPBACK.interface in found:
        return LOOPBACK
    return Choice(found[0], LOOPBACK.reason)


def guess() -> Choice:
    """The address at which other hosts most probably reach this one."""
    beyond = [each for each in interfaces() if not each.loopback]
    routed = [each for each in beyond if each.address in set(_default_sources())]
    if routed:
        return Choice(routed[0], "it has the default route; nothing says how others get here")
    if not beyond:
        raise RendezvousError(
            "some ranks are on other hosts, and this one has no interface but loopback that is up"
        )
    best = min(beyond, key=_is_internal)
    return Choice(best, "the first one that is up; nothing says how others get here")


def _holder(found: list[Interface], address: str) -> Interface:
    name = address.partition("%")[2] or "an interface"
    unknown = Interface(name, _bare(address))
    return next((each for each in found if each.holds(address)), unknown)


def _by_pattern(
    found: list[Interface],
    pattern: str,
    towards: str | None,
    several_hosts: bool,
    reached: Collection[str],
) -> Choice:
    fitting = [each for each in found if matches(each.name, pattern)]
    usable = [each for each in fitting if not (several_hosts and each.loopback)]
    families = {family_of(address) for address in (towards, *reached) if address}

    def rank(each: Interface) -> tuple[bool, ...]:
        known = each.holds(towards or "") or each.address in map(_bare, reached)
        odd = families and each.family not in families
        return not known, bool(odd), each.loopback, _is_link_local(each), _is_internal(each)

    if usable:
        return Choice(min(usable, key=rank), f"GRADWIRE_SOCKET_IFNAME={pattern}")
    have = ", ".join(sorted({each.name for each in found})) or "none"
    why = "only loopback, though some ranks are on other hosts" if fitting else "nothing"
    raise RendezvousError(
        f"GRADWIRE_SOCKET_IFNAME={pattern!r} selects {why}; the interfaces that are up: {have}"
    )


def _no_way(host: str, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"no network interface reaches the store's host {host!r} ({error}): "
        "check the host's name, or set GRADWIRE_SOCKET_IFNAME"
    )


def _default_sources() -> Iterator[str]:
    for address in _ANYWHERE:
        with contextlib.suppress(RendezvousError):
            yield route_to(address, 9).source


def _is_internal(interface: Interface) -> bool:
    return interface.name.startswith(_INTERNAL)


def _is_link_local(interface: Interface) -> bool:
    return ipaddress.ip_address(interface.address).is_link_local


def _flags(probe: socket.socket, name: str) -> int:
    """An interface's flags UP and RUNNING."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, struct.pack("16s24x", name.encode()))
    except OSError:  # the interface is gone since it was listed
        return 0
    return int.from_bytes(answer[16:18], "little") & (_IFF_UP | _IFF_RUNNING)


def _ipv4(probe: socket.socket) -> list[Interface]:
    """All IPv4 addresses; an alias (eth0:1) has its interface's name."""
    size, _ = _IFCONF.unpack(fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, _IFCONF.pack(0, 0)))
    rows = array.array("B", bytes(size))
    wanted = _IFCONF.pack(size, rows.buffer_info()[0])
    used, _ = _IFCONF.unpack(fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, wanted))
    return [
        Interface(label.rstrip(b"\0").decode().split(":")[0], socket.inet_ntoa(address))
        for label, _, address in _IFREQ.iter_unpack(rows.tobytes()[:used])
    ]


def _ipv6() -> list[Interface]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except FileNotFoundError:  # a kernel without IPv6
        return []
    return [
        Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
        for digits, _, _, _, flags, name in rows
        if not int(flags, 16) & _UNUSABLE
    ]
