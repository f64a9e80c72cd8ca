"""Identity of this host and process."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

_DIGITS = 8  # of a digest


def host_identity() -> str:
    """A name that is equal exactly for processes that share a kernel and a network namespace.

    Abstract Unix sockets, over which shared memory is passed, reach just as far: containers on one
    machine may or may not share the namespace. Boot ids tell cloned machines apart. The first half
    is the machine's name alone.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/net").stat().st_ino
    return _digest(boot) + _digest(f"{boot} {namespace}")


def machine_of(host: str) -> str:
    """The part of a host's identity that is equal for the hosts of one kernel."""
    return host[:_DIGITS]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def process_name() -> str:
    """Host name and process id, by which messages tell ranks apart."""
    return f"{socket.gethostname()}:{os.getpid()}"
