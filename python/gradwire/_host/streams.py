"""How many TCP streams join two ranks: one stream fills a long link only in part.

A stream moves at most what the kernels buffer in a round trip, by net.ipv4.tcp_wmem here and
tcp_rmem there, which is taken to be as it is here. Further streams take what the first one has no
room for.
"""

from __future__ import annotations

import math
import socket
import struct
from pathlib import Path

from gradwire._base import environment

MOST_BY_ITSELF = 8
NEAR = 0.002  # seconds: in a round trip below this one stream fills every link
RATE = 1.25e8  # bytes a second, at least which links between sites are taken to have
# Where Linux's struct tcp_info has the shortest round trip, in microseconds. The mean includes
# acknowledgements that wait for a busy peer's answer.
_SHORTEST = 148
_WINDOW = 0.5  # of the receiver's buffer, the rest of which is for the kernel's own data


def further_streams(control: socket.socket, transport: str) -> int:
    """How many streams a link gets beyond its first, by the round trip of another socket to there.

    GRADWIRE_TCP_STREAMS says it for all links; "auto" takes as many as the product of round trip
    and rate needs. Raises InvalidArgument for a wrong setting.
    """
    if transport != "tcp" or control.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    asked = environment.number("GRADWIRE_TCP_STREAMS")
    if asked is not None:
        return int(asked) - 1
    return streams_for(round_trip(control), most_in_flight()) - 1


def streams_for(seconds: float, window: float) -> int:
    """How many streams fill a link of RATE whose round trip takes `seconds`."""
    if seconds < NEAR:
        return 1
    return min(MOST_BY_ITSELF, 1 + math.ceil(seconds * RATE / window))


def round_trip(sock: socket.socket) -> float:
    """The shortest round trip of a TCP socket so far, in seconds; 0 where it is unknown."""
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST + 4)
    except OSError:
        return 0.0
    return struct.unpack_from("=I", found, _SHORTEST)[0] / 1e6 if len(found) > _SHORTEST else 0.0


def most_in_flight() -> float:
    """The bytes that one stream can have on their way, by this host's limits."""
    return min(_limit("wmem"), _WINDOW * _limit("rmem"))


def _limit(name: str) -> float:
    try:
        return float(Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return 4e6
