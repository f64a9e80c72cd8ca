"""Ways: pairs of interfaces by which two ranks reach each other, and the log of their failures."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._host.interfaces import interfaces

_LOOK_SECONDS = 0.5
_NO_WAY_SECONDS = 60.0  # in which what led nowhere is not tried again
_HOSTS_IN_VAIN = 2

_log = logging.getLogger("gradwire")


class PeersWays(NamedTuple):
    """The ways to one peer."""

    rank: int
    peer: int
    host: str  # of the peer, where it is known
    names: tuple[str, ...]
    ways: _core.Ways


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


def log_news(all_ways: Sequence[PeersWays]) -> None:
    """Logs, from a thread, which ways fail and which work again, while links use them."""
    if all_ways:
        name = "gradwire-ways"
        threading.Thread(target=_run, args=(all_ways,), name=name, daemon=True).start()


def _run(all_ways: Sequence[PeersWays]) -> None:
    while any(each.ways.in_use for each in all_ways):
        for each in all_ways:
            while news := each.ways.next():
                _tell(each, *news)
        time.sleep(_LOOK_SECONDS)


def _tell(way_to: PeersWays, way: int, works: bool, why: str) -> None:
    rank, peer, host, names, _ = way_to
    where = f"rank {rank}: {names[way]}, one of {len(names)} ways to rank {peer}"
    where += f" ({host})" * bool(host)
    if works:
        _log.info("%s, works again", where)
    else:
        _log.warning("%s, has failed (%s): the others carry its messages", where, why)
