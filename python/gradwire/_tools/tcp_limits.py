"""What a long link needs of TCP here: its bandwidth-delay product beside the kernel's limits.

A full link has rate times round trip on its way. A stream has at most what net.ipv4.tcp_wmem and
tcp_rmem allow, which are taken to be the same on both hosts.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradwire import _core
from gradwire._base import environment
from gradwire._errors import InvalidArgument, RendezvousError
from gradwire._host import interfaces, streams

_PORT = 29500  # where none is given; a refusal tells the round trip as well
_TURNS = 4
_SECONDS = 5.0
_USUAL = 8 * streams.RATE  # bits per second, of a link whose rate nobody knows
_LARGEST = 1 << 30  # bytes, that Linux lets a socket's buffer have

# A check's name, whether it holds (None: it only informs), and its detail.
Found = tuple[str, bool | None, str]


class Way(NamedTuple):
    """A link to another host: bits per second, and seconds for a round trip."""

    rate: float
    round_trip: float

    @property
    def bytes(self) -> float:
        """The bytes on their way when the link is full."""
        return self.rate / 8 * self.round_trip


def way_of(text: str) -> Way:
    """Reads "1gbit,80ms" or "1gbit,HOST[:PORT]", to which it measures the round trip.

    Without a rate it takes that of the interface which leads to the host. Raises InvalidArgument.
    """
    rate, comma, far = text.rpartition(",")
    try:
        speed, round_trip = 0.0, _core.link_costs(f"1gbit,{far}")[1]
    except InvalidArgument:
        speed, round_trip = _measured(far)
    return Way(_capped(_core.rate_now(rate) if comma else speed or _USUAL), round_trip)


def checks(way: Way | None) -> Iterator[Found]:
    """What the limits allow, and which sysctl would help; None: no link was given."""
    window = streams.most_in_flight()
    if way is None:
        rate = _capped(_USUAL)
        reach, most = 8 * window / rate, streams.MOST_BY_ITSELF
        yield (
            "long links",
            None,
            f"{rate / 1e6:g} Mbit/s up to a round trip of {1e3 * reach:.0f} ms in one stream, and "
            f"{most * 1e3 * reach:.0f} ms in {most}; `gradwire doctor --link 1gbit,80ms` (or HOST)",
        )
        return
    asked = environment.number("GRADWIRE_TCP_STREAMS")
    count = int(asked or streams.streams_for(way.round_trip, window))
    yield "on the way", None, f"{_link(way)}: {way.bytes / 1e6:.3g} MB when it is full"
    yield _filled(f"gradwire, streams: {count}", way, count * window)
    yield _filled("one stream", way, window)
    if not _limit("ipv4.tcp_window_scaling"):
        yield "window scaling", False, "is off: `sysctl -w net.ipv4.tcp_window_scaling=1`"
    core = " and ".join(f"{each} {_limit(f'core.{each}')}" for each in ("wmem_max", "rmem_max"))
    yield "net.core", None, f"{core}: for programs that set buffers, which gradwire does not"


def _filled(name: str, way: Way, in_flight: float) -> Found:
    share = in_flight / max(1.0, way.bytes)
    if share >= 1:
        return name, True, f"up to {in_flight / 1e6:.3g} MB on the way: it can be full"
    wmem, rmem = _setting("wmem", way.bytes), _setting("rmem", 2 * way.bytes)
    return (
        name,
        False,
        f"up to {in_flight / 1e6:.3g} MB on the way, {100 * share:.0f}% of the link; on both hosts "
        f"`sysctl -w {wmem} {rmem}`",
    )


def _setting(name: str, most: float) -> str:
    """The sysctl that raises a limit to a power of two from `most` on."""
    key = f"net.ipv4.tcp_{name}"
    least, usual, now = _three(key)
    power = min(_LARGEST, 1 << math.ceil(math.log2(max(1.0, most))))
    return f"{key}='{least} {usual} {max(now, power)}'"


def _three(key: str) -> list[int]:
    try:
        found = [int(each) for each in _sysctl(key).split()]
    except ValueError:
        found = []
    return found if len(found) == 3 else [4096, 131072, 0]


def _limit(name: str) -> int:
    try:
        return int(_sysctl(f"net.{name}"))
    except ValueError:
        return 1


def _sysctl(key: str) -> str:
    try:
        return Path("/proc/sys", *key.split(".")).read_text()
    except OSError:
        return ""


def _link(way: Way) -> str:
    return f"{way.rate / 1e6:g} Mbit/s, {1e3 * way.round_trip:.3g} ms"


def _capped(rate: float) -> float:
    """The rate, or GRADWIRE_RATE's where that is less."""
    cap = environment.text("GRADWIRE_RATE")
    return min(rate, (_core.rate_now(cap) if cap else 0) or rate)


def _measured(where: str) -> tuple[float, float]:
    """The rate of the interface that leads to HOST[:PORT], 0 if unknown, and the round trip."""
    host, _, port = where.rpartition(":") if where.count(":") == 1 else (where, "", _PORT)
    try:
        if not host:
            raise ValueError("no host")
        route = interfaces.route_to(host, int(port))
        took = min(_connect(route.target, int(port)) for _ in range(_TURNS))
    except (RendezvousError, ValueError, OSError) as error:
        raise InvalidArgument(
            f"--link: {where!r} is no round trip, as 80ms, and cannot be measured as HOST[:PORT] "
            f"({error}); a port that answers or refuses tells it"
        ) from None
    return _speed_of(route.source), took


def _connect(host: str, port: int) -> float:
    """The seconds that a connection, or its refusal, takes; raises OSError without an answer."""
    start = time.perf_counter()
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((host, port), _SECONDS).close()
    return time.perf_counter() - start


def _speed_of(address: str) -> float:
    """The bits per second of the interface that has an address; 0 where it does not say."""
    names = [each.name for each in interfaces.interfaces() if each.holds(address)]
    try:
        return max(0.0, 1e6 * float(Path(f"/sys/class/net/{names[0]}/speed").read_text()))
    except (OSError, ValueError, IndexError):
        return 0.0
