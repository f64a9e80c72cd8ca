"""Two hosts with two interfaces each, and what fails on one of them."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import hosts
from gradwire import Communicator
from hosts import Network, Rank

_ADDRESSES = {"eth0": "10.77.", "eth1": "10.78."}
_libc = ctypes.CDLL(None, use_errno=True)

LIMIT = "2"  # GRADWIRE_TCP_TIMEOUT_SECONDS
NAMED = {"GRADWIRE_SOCKET_IFNAME": "eth", "GRADWIRE_TCP_TIMEOUT_SECONDS": LIMIT}


def with_two_interfaces(count: int) -> Network:
    """Hosts with eth0 and eth1, each at a switch of its own."""
    made = Network(count)
    made.add_bridge("br1")
    for host in range(count):
        made.plug(host, "eth1", [f"10.78.0.{host + 1}/24"], "br1")
    for each in made.hosts:
        each.await_states()
    return made


def bytes_sent(interface: str) -> int:
    """Bytes that this host has sent by an interface."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (fields,) = [line.split() for line in lines if line.strip().startswith(f"{interface}:")]
    return int(fields[9])


@contextlib.contextmanager
def apart(network: Network, interface: str, host: int) -> Iterator[None]:
    """Meanwhile no packet gets through a host's interface, and nobody is told."""
    network.switch.ip(f"link set {interface}-{host} nomaster")
    yield
    network.switch.ip(f"link set {interface}-{host} master br{interface[-1]}")


def log_lines(level: int = logging.INFO) -> list[str]:
    """The lines of gradwire's log, from now on, as they come."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname} {record.getMessage()}"
    )
    log = logging.getLogger("gradwire")
    log.addHandler(handler)
    log.setLevel(level)
    return lines


def await_line(rank: Rank, word: str) -> str:
    """The next line of the log with a word, of those that the rank sends."""
    while True:
        assert rank.pipe.poll(hosts.LIMIT), word
        line = rank.pipe.recv()
        assert isinstance(line, str), line
        if word in line:
            return line


def sockets_on(comm: Communicator, interface: str) -> list[socket.socket]:
    """Copies of the sockets that a communicator has on an interface."""
    alive = [each for each in comm._mesh.tcp_sockets if each.info() is not None]
    copies = [socket.socket(fileno=os.dup(each.fd)) for each in alive]
    return [each for each in copies if each.getsockname()[0].startswith(_ADDRESSES[interface])]


def reset(comm: Communicator, interface: str) -> int:
    """Resets a communicator's sockets on an interface; how many these were."""
    sockets = sockets_on(comm, interface)
    for each in sockets:
        with each:
            nowhere = bytes(16)  # AF_UNSPEC
            assert _libc.connect(each.fileno(), nowhere, len(nowhere)) == 0
    return len(sockets)
