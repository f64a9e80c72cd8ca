"""What the kernel knows of TCP sockets that the core owns: round trips, retransmits, rates."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

# Where Linux's struct tcp_info has these, and how much of it is read.
_ROUND_TRIP, _RETRANSMITS, _RATE, _SIZE = 68, 100, 160, 168


class TcpInfo(NamedTuple):
    """The state of a connection."""

    round_trip: float  # seconds, smoothed
    retransmits: int  # segments
    rate: int  # bytes a second, at which data last arrived there


class TcpSocket(NamedTuple):
    """A socket that another owner may close at any time; after that nothing is known of it."""

    peer: int
    fd: int
    identity: tuple[int, int]  # device and inode, which no later socket of that number has

    def info(self) -> TcpInfo | None:
        """Asks the kernel; None when the socket is closed."""
        try:
            # Not even a copy of another file: closing that would end the program's locks on it.
            if _identity(self.fd) != self.identity:
                return None
            copy = os.dup(self.fd)
        except OSError:
            return None
        if _identity(copy) != self.identity:
            os.close(copy)
            return None
        with socket.socket(fileno=copy) as sock:
            return _info(sock)


def watched(sock: socket.socket, peer: int) -> list[TcpSocket]:
    """The socket to a peer, if it is TCP's, before its descriptor is handed over."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return []
    return [TcpSocket(peer, sock.fileno(), _identity(sock.fileno()))]


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _info(sock: socket.socket) -> TcpInfo | None:
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None
    if len(found) < _SIZE:  # an old kernel
        return None
    (round_trip,) = struct.unpack_from("=I", found, _ROUND_TRIP)
    (retransmits,) = struct.unpack_from("=I", found, _RETRANSMITS)
    (rate,) = struct.unpack_from("=Q", found, _RATE)
    return TcpInfo(round_trip / 1e6, retransmits, rate)
