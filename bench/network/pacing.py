"""TCP connections that the kernel holds to a rate, for any user: SO_MAX_PACING_RATE, on Linux.

It holds back all that goes through a process's sockets, of any library alike, but each connection
by itself and only where it sends: `links.py` has links with two ends and a switch.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_SO_MAX_PACING_RATE = 47
_MOST = 2**31 - 1  # bytes a second, of setsockopt's int


def pace_connections(bits: float) -> None:
    """Holds every TCP connection that this process has now to so many bits a second."""
    for connection in tcp_connections():
        with connection:
            pace(connection, bits)


def pace(connection: socket.socket, bits: float) -> None:
    """Holds what is sent on one connection."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, min(int(bits / 8), _MOST))


def paced_pair(bits: float) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback; the first one's sending is held."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        with contextlib.suppress(OSError):
            pace(near, bits)
        return near, server.accept()[0]


def tcp_connections() -> Iterator[socket.socket]:
    """Every open TCP socket of this process, as a duplicate to be closed."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed since it was listed
            continue
        internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        if internet and duplicate.type == socket.SOCK_STREAM:
            yield duplicate
        else:
            duplicate.close()
