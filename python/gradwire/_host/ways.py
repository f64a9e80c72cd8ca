"""Ways: pairs of interfaces by which two ranks reach each other."""

from __future__ import annotations

import socket
import threading

from gradwire._base.deadline import Deadline
from gradwire._host.interfaces import interfaces

_NO_WAY_SECONDS = 60.0  # in which what led nowhere is not tried again
_HOSTS_IN_VAIN = 2


class TriedWays:
    """What own interfaces led to. One that led to none of two hosts is tried with no third.

    So a card that leads nowhere does not hold up a start by every host of a job.
    """

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str, str], Deadline] = {}
        self._worked: set[str] = set()
        self._lock = threading.Lock()

    def lead_nowhere(self, interface: str, host: str, address: str) -> bool:
        """Whether an own interface need not be tried with an address of a host now."""
        with self._lock:
            failed = [pair for pair, until in self._failed.items() if not until.passed]
            hosts = {its_host for name, its_host, _ in failed if name == interface}
            in_vain = len(hosts) >= _HOSTS_IN_VAIN and interface not in self._worked
            return in_vain or (interface, host, address) in failed

    def failed(self, interface: str, host: str, address: str) -> None:
        """Notes that an interface did not reach an address."""
        with self._lock:
            self._failed[interface, host, address] = Deadline(_NO_WAY_SECONDS)

    def worked(self, interface: str) -> None:
        """Notes that an interface reached a peer."""
        with self._lock:
            self._worked.add(interface)


def name_of_way(sock: socket.socket) -> str:
    """The interface, and the addresses that it joins: eth1 (10.0.1.1 to 10.0.1.2)."""
    try:
        here, there = (str(end[0]) for end in (sock.getsockname(), sock.getpeername()))
    except OSError:  # it has ended already
        return "a way that has ended"
    name = next((each.name for each in interfaces() if each.holds(here)), "an interface")
    return f"{name} ({here} to {there})"
