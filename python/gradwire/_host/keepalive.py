"""Detection of dead hosts: their kernel no longer acknowledges anything.

Keep-alive asks a silent connection for a sign of life; TCP_USER_TIMEOUT bounds how long sent bytes
may stay unacknowledged. A process that computes or is stopped has a kernel that answers, so it is
never taken for dead.
"""

from __future__ import annotations

import contextlib
import socket

from gradwire._base import environment

_VARIABLE = "GRADWIRE_TCP_TIMEOUT_SECONDS"
# The part of that time after which Linux is to give up; its timers are up to 0.6 s late.
_SILENT = 0.85


def host_timeout() -> float:
    """Seconds of silence that mean a dead host; raises InvalidArgument for a wrong setting."""
    return environment.seconds(_VARIABLE)


# Linux's TCP_RTO_MAX_MS, since 6.15; older kernels wait up to two minutes between two attempts.
_RTO_MAX = 44
_OUTAGE_SECONDS = 3600  # that a socket outlives


def outlive_outages(sock: socket.socket) -> None:
    """Has a TCP socket of one of several ways live on while nothing gets through.

    It goes on when something does. Whether the peer's host is dead is then for the core to judge,
    by all ways and by the times of fail_with_host().
    """
    with contextlib.suppress(OSError):  # it has ended already
        limit = _OUTAGE_SECONDS * 1000
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
        sock.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, 1000)


def fail_with_host(sock: socket.socket, *, always_read: bool) -> None:
    """Makes a TCP socket fail before its peer's host has been silent for host_timeout().

    `always_read` says that the peer soon reads whatever is sent. Only such sockets get
    TCP_USER_TIMEOUT: Linux counts a closed receive window as death, and the reader of a data link
    may pause. With unacknowledged bytes, Linux sends no keep-alive on a data link, so each pair
    needs one socket that is always read.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    seconds = host_timeout() * _SILENT
    idle = max(1, int(seconds / 3))
    interval = max(1, int((seconds - idle) / 5))
    probes = max(1, round((seconds - idle) / interval))
    with contextlib.suppress(OSError):  # it has ended already, which its next use will show
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
        if always_read:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
