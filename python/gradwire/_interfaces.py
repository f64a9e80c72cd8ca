"""Which network address a rank listens on, and why.

The default is the address that reaches the store: it is known to be routed where the job's other
ranks are. `GRADWIRE_SOCKET_IFNAME` overrides it in NCCL's syntax.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import NamedTuple

from gradwire._errors import RendezvousError

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_LINK_SCOPE = 0x20


class Interface(NamedTuple):
    """One address of one interface that is up."""

    name: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        """AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    @property
    def loopback(self) -> bool:
        """Whether no other host can reach it."""
        return is_loopback(self.address)


class Choice(NamedTuple):
    """The address to listen on, with the reason for the log and for `gradwire doctor`."""

    interface: Interface
    reason: str

    def __str__(self) -> str:
        return f"{self.interface.name} ({self.interface.address}): {self.reason}"


LOOPBACK = Choice(Interface("lo", "127.0.0.1"), "all ranks are on this host")


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves its host."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def interfaces() -> list[Interface]:
    """All addresses of the interfaces that are up: IPv4 first, without link-local IPv6."""
    names = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        up = [name for name in names if _flags(probe, name) & _IFF_UP]
        found = [(name, _ipv4(probe, name)) for name in up]
    return [Interface(name, address) for name, address in found if address] + _ipv6(up)


def matches(name: str, pattern: str) -> bool:
    """Whether an interface's name fits NCCL's pattern: eth,ib · =eth0 · ^docker,lo · ^=eth3."""
    excluding = pattern.startswith("^")
    exact = pattern[excluding:].startswith("=")
    words = [word.strip() for word in pattern[excluding + exact :].split(",") if word.strip()]
    hit = any(name == word if exact else name.startswith(word) for word in words)
    return hit != excluding


def address_towards(host: str, port: int) -> str:
    """The own address from which packets to host:port would leave; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"no network interface reaches the store's host {host!r} ({error}): "
            "check the host's name, or set GRADWIRE_SOCKET_IFNAME"
        ) from error


def choose(towards: str | None, *, pattern: str | None, several_hosts: bool) -> Choice:
    """The address to listen on.

    `towards` is the own address that reaches the store, None when the store is local;
    `several_hosts` says that some rank is known to be on another host, so that loopback is useless.
    """
    found = interfaces()
    if pattern is not None:
        return _by_pattern(found, pattern, towards, several_hosts)
    if towards is None:
        return LOOPBACK
    if not (several_hosts and is_loopback(towards)):
        named = [each for each in found if each.address == towards]
        interface = named[0] if named else Interface("lo" if is_loopback(towards) else "?", towards)
        return Choice(interface, "it reaches the store")
    beyond = [each for each in found if not each.loopback]
    if not beyond:
        raise RendezvousError(
            "some ranks are on other hosts, and this one has no interface but loopback that is up"
        )
    return Choice(
        beyond[0], "the store is on this host and some ranks are not; first one that is up"
    )


def _by_pattern(
    found: list[Interface], pattern: str, towards: str | None, several_hosts: bool
) -> Choice:
    fitting = [each for each in found if matches(each.name, pattern)]
    usable = [each for each in fitting if not (several_hosts and each.loopback)]
    if usable:
        best = min(usable, key=lambda each: (each.address != towards, each.loopback))
        return Choice(best, f"GRADWIRE_SOCKET_IFNAME={pattern}")
    have = ", ".join(sorted({each.name for each in found})) or "none"
    why = "only loopback, though some ranks are on other hosts" if fitting else "nothing"
    raise RendezvousError(
        f"GRADWIRE_SOCKET_IFNAME={pattern!r} selects {why}; the interfaces that are up: {have}"
    )


def _request(name: str) -> bytes:
    return struct.pack("16s240x", name.encode()[:15])


def _flags(probe: socket.socket, name: str) -> int:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, _request(name))
    except OSError:  # it went away since it was listed
        return 0
    return int.from_bytes(answer[16:18], "little")


def _ipv4(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _request(name))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6(names: list[str]) -> list[Interface]:
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except FileNotFoundError:  # a kernel without IPv6
        return []
    return [
        Interface(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
        for digits, _, _, scope, _, name in rows
        if name in names and int(scope, 16) != _LINK_SCOPE
    ]
