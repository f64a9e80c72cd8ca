"""How the end of a peer's host shows: its kernel no longer acknowledges anything.

Keep-alive asks a silent connection for a sign of life; TCP_USER_TIMEOUT bounds how long sent bytes
may stay without one. A process that computes or is stopped has a kernel that answers, so it is
never taken for dead.
"""

from __future__ import annotations

import contextlib
import socket

from gradwire._base import environment

_VARIABLE = "GRADWIRE_TCP_TIMEOUT_SECONDS"
_LEAST, _MOST = 1.0, 3600.0


def limit() -> float:
    """Seconds of silence after which a host is dead; raises InvalidArgument for a wrong setting."""
    return environment.seconds(_VARIABLE, _LEAST, _MOST)


def end_with_host(sock: socket.socket, *, always_read: bool) -> None:
    """Lets a TCP socket fail once its peer's host has been silent for limit().

    `always_read` says that the peer reads soon whatever is sent. TCP_USER_TIMEOUT is for those
    only: Linux counts a closed receive window as death, and the reader of a data link may rest.
    A data link with bytes under way asks nobody, so each pair needs one socket that is always read.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    seconds = limit()
    idle = max(1, int(seconds / 3))
    interval = max(1, int((seconds - idle) / 5))
    probes = max(1, round((seconds - idle) / interval))
    with contextlib.suppress(OSError):  # it has ended already, as whoever uses it next will see
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
        if always_read:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
