"""Links held to a rate: one network namespace per rank, joined by veth pairs to a bridge.

    python -m bench.network.links --rate 100mbit --rate 1gbit     # measures the links, and no more

`tc … tbf` holds both ends of every pair, so a rank has one rate for all that it sends and one for
all that it receives, as with a NIC and a switch. A token bucket that was left alone lets a
burst through at once: 1 MB of it shows a 200 kB message 2.6 Gbit/s whatever the rate. So bursts are
a few packets, and `check()` measures the links by plain sockets, with the message sizes that
matter, before anything is believed that was measured on them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench.common import report
from tests.python.support import namespaces

MESSAGES = (10_000, 40_000, 200_000, 1_000_000)  # bytes
TOLERANCE = 0.08  # of the time
_SENDS, _RECEIVES = 1, 2  # bursts: an end that receives does not hold up a sender that is on time
_PAUSE = 1.0  # seconds between attempts
_HEADERS, _PAYLOAD = 66, 1448  # bytes of a TCP packet on Ethernet
_PACKET = _HEADERS + _PAYLOAD
_CONGESTION_CONTROL = "cubic"  # what most machines use, whatever this one does
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMEOUT = 60
_REST = 2e-3  # seconds, after which a bucket is full again
_WAKING = 1e-4  # seconds, until as many threads as a pattern has are awake
_SECONDS = 0.3  # of one figure, but for the largest messages
_WARM_UP = 2  # messages, in which TCP opens its window


class Rate(NamedTuple):
    """What tc's token buckets are told."""

    name: str  # as tc writes it
    bits: float  # per second, headers included

    @property
    def burst(self) -> int:
        """Bytes that may go at once: three packets at 100 Mbit/s, 20 kB at 1 Gbit/s.

        Fewer do not make up for timers that are late: a machine with two busy cores loses rate.
        """
        return int(3 * _PACKET * max(1, self.bits / 1e8) ** 0.65)

    def credit(self) -> str:
        """What the bursts are worth."""
        return (
            f"bursts of {self.burst:,} bytes, {_RECEIVES * self.burst:,} where received: a link "
            f"that was idle sends {self.burst * 8e3 / self.bits:.2f} ms' worth at once"
        )

    @property
    def queue(self) -> int:
        """Bytes that wait before packets are dropped: 60 ms, as a switch may hold."""
        return max(256_000, int(self.bits * 0.06 / 8))

    def bucket(self, bursts: int) -> list[str]:
        """As arguments of tc, for so many bursts at once."""
        return f"tbf rate {self.name} burst {bursts * self.burst} limit {self.queue}".split()


def rate(name: str) -> Rate:
    """A rate by tc's name for it, 100mbit or 1gbit; raises ValueError."""
    with contextlib.suppress(ValueError):
        for unit, scale in _UNITS.items():
            if name.endswith(unit):
                return Rate(name, float(name[: -len(unit)]) * scale)
    raise ValueError(f"{name!r} is no rate: say 100mbit or 1gbit")


class ShapedLinks(namespaces.Switch):
    """Hosts 0 … n - 1 at 10.77.0.1 … n, whose eth0 sends and receives at a rate."""

    def __init__(self, count: int, held_to: Rate) -> None:
        super().__init__(count, addresses=["10.77.0.{}/24"])
        self.rate = held_to
        sends, receives = held_to.bucket(_SENDS), held_to.bucket(_RECEIVES)
        for number, host in enumerate(self.hosts):
            host.ip(f"link set eth0 gso_max_size {max(held_to.burst // 2, _PACKET)}")
            source = self.address(number)
            host.ip(
                f"route replace 10.77.0.0/24 dev eth0 src {source} congctl {_CONGESTION_CONTROL}"
            )
            host.command("tc", "qdisc", "add", "dev", "eth0", "root", *sends)
            self.switch.command("tc", "qdisc", "add", "dev", f"eth0-{number}", "root", *receives)

    @staticmethod
    def address(host: int) -> str:
        """Of the host's eth0."""
        return f"10.77.0.{host + 1}"

    def dropped(self) -> int:
        """Packets that found a queue full, so far."""
        shown = [
            each.command("tc", "-json", "-s", "qdisc", "show")
            for each in (self.switch, *self.hosts)
        ]
        return sum(queue.get("drops", 0) for text in shown for queue in json.loads(text))

    def connect(self, source: int, target: int) -> tuple[socket.socket, socket.socket]:
        """Both ends of a TCP connection; the source's first."""
        with self.hosts[target].run(lambda: socket.create_server((self.address(target), 0))) as to:
            place = to.getsockname()
            near = self.hosts[source].run(lambda: socket.create_connection(place, _TIMEOUT))
            far, _ = to.accept()
        for end in (near, far):
            end.settimeout(None)  # so that one call moves a whole message
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TIMEOUT, 0))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return near, far


def missing() -> str | None:
    """Why no links can be held to a rate here; None where they can."""
    why = namespaces.missing()
    if why is not None:
        return why
    try:
        ShapedLinks(1, rate("1gbit")).close()
    except FileNotFoundError:
        return "no `tc` command: install iproute2"
    except subprocess.CalledProcessError:
        return "the kernel refuses `tc … tbf`: it needs sch_tbf (CONFIG_NET_SCH_TBF)"
    return None


class Pattern(NamedTuple):
    """Which hosts send to which, all at once."""

    name: str
    groups: Sequence[Sequence[tuple[int, int]]]  # of edges that share one end, and so its rate
    bursts: int  # of the shared end


def patterns(hosts: int) -> list[Pattern]:
    """Between them, every end of every link has to hold its rate alone."""
    ring = [(host, (host + 1) % hosts) for host in range(hosts)]
    others = range(1, hosts)
    return [
        Pattern("one pair", [ring[:1]], _SENDS),
        Pattern("ring", [[edge] for edge in ring], _SENDS),
        Pattern("one to all", [[(0, other) for other in others]], _SENDS),
        Pattern("all to one", [[(other, 0) for other in others]], _RECEIVES),
    ]


class Measured(NamedTuple):
    """How long a message took that each edge of a pattern carried, all begun at once."""

    pattern: str
    message: int  # bytes
    ms: float  # median
    fastest_ms: float
    least_ms: float  # at the rate, but for the burst that a full bucket lets through at once
    most_ms: float  # at the rate, and the latency

    @property
    def too_fast(self) -> bool:
        """Once is enough: the next message may find that large a bucket empty."""
        return self.fastest_ms < self.least_ms * (1 - TOLERANCE)

    @property
    def too_slow(self) -> bool:
        """The links are held to less, or the machine does other work."""
        return self.ms > self.most_ms * (1 + TOLERANCE)


def check(
    links: ShapedLinks, messages: Sequence[int] = MESSAGES, attempts: int = 15
) -> list[Measured]:
    """Measures each size from one host to another, around a ring, and between one and all.

    Raises RuntimeError, with the figures so far, where a message was faster than the rate lets it
    be by more than TOLERANCE; or slower in all attempts: a busy machine gets another one.
    """
    latency, found = ping_pong(links), list[Measured]()
    for pattern in patterns(len(links.hosts)):
        for size in messages:
            if pattern.name == "all to one" and not _is_held(links, pattern, size):
                continue
            found.append(_measure_until_right(links, pattern, size, latency, attempts))
            if found[-1].too_fast or found[-1].too_slow:
                raise RuntimeError(
                    f"the links are not held to {links.rate.name}:\n{as_table(found)}"
                )
    return found


def _is_held(links: ShapedLinks, pattern: Pattern, size: int) -> bool:
    """Whether the switch's queue has room for all that comes at once: it drops nothing."""
    return len(pattern.groups[0]) * wire_bytes(size) <= links.rate.queue


def _measure_until_right(
    links: ShapedLinks, pattern: Pattern, size: int, latency: float, attempts: int
) -> Measured:
    found = _measure(links, pattern, size, latency)
    while found.too_slow and (attempts := attempts - 1) > 0:
        time.sleep(_PAUSE)
        found = _measure(links, pattern, size, latency)
    return found


def as_table(found: Sequence[Measured]) -> str:
    """The figures as Markdown."""
    rows = (
        f"{each.pattern} | {each.message:,} | {each.ms:.2f} | {each.fastest_ms:.2f} | "
        f"{each.least_ms:.2f} to {each.most_ms:.2f} | {_verdict(each)}"
        for each in found
    )
    head = "sockets | message, bytes | ms | fastest | at the rate | "
    return "\n".join(report.table(head, rows, "lrrrrl"))


def _verdict(found: Measured) -> str:
    return "too fast" if found.too_fast else "too slow" if found.too_slow else "held"


def wire_bytes(payload: int) -> int:
    """With the headers of its packets."""
    return payload + -(-payload // _PAYLOAD) * _HEADERS


def ping_pong(links: ShapedLinks, repetitions: int = 200) -> float:
    """Seconds that one byte takes one way, median of both ways."""
    near, far = links.connect(0, 1 % len(links.hosts))
    with near, far, ThreadPoolExecutor(1) as pool:
        echo = pool.submit(_echo, far, repetitions)
        found = [_there_and_back(near) for _ in range(repetitions)]
        echo.result()
    return statistics.median(found) / 2


def _echo(sock: socket.socket, count: int) -> None:
    for _ in range(count):
        sock.sendall(sock.recv(1))


def _there_and_back(sock: socket.socket) -> float:
    start = time.perf_counter()
    sock.sendall(b"!")
    sock.recv(1)
    return time.perf_counter() - start


def payload_rate(near: socket.socket, far: socket.socket) -> float:
    """Bits of payload a second that a connection carries from one end to the other."""
    seconds = _exchange([[(near, far)]], max(MESSAGES), _WARM_UP + 3)
    return max(MESSAGES) * 8 / statistics.median(seconds[_WARM_UP:])


def _measure(links: ShapedLinks, pattern: Pattern, size: int, latency: float) -> Measured:
    """Each message is sent when all of the one before have come, and buckets are full again."""
    wire, bits = len(pattern.groups[0]) * wire_bytes(size), links.rate.bits
    groups = [[links.connect(*edge) for edge in group] for group in pattern.groups]
    seconds = _exchange(groups, size, max(7, min(40, int(_SECONDS * bits / (wire * 8)))))
    for end in (end for group in groups for pair in group for end in pair):
        end.close()
    credit = pattern.bursts * links.rate.burst
    return Measured(
        pattern.name,
        size,
        statistics.median(seconds[_WARM_UP * len(groups) :]) * 1e3,
        min(seconds) * 1e3,
        max(0, wire - credit) * 8e3 / bits,
        wire * 8e3 / bits + (latency + _WAKING) * 1e3,
    )


def _exchange(
    groups: Sequence[Sequence[tuple[socket.socket, socket.socket]]], size: int, repetitions: int
) -> list[float]:
    """Seconds of each message, from a group's first start to its last end."""
    count = sum(map(len, groups))
    barrier, found = threading.Barrier(2 * count), list[list[float]]()
    with ThreadPoolExecutor(barrier.parties) as pool:
        running = [
            [
                (
                    pool.submit(_send, near, size, repetitions, barrier),
                    pool.submit(_receive, far, size, repetitions, barrier),
                )
                for near, far in group
            ]
            for group in groups
        ]
    for group in running:
        begun = zip(*(start.result() for start, _ in group), strict=True)
        over = zip(*(end.result() for _, end in group), strict=True)
        both = zip(begun, over, strict=True)
        found.append([max(last) - min(first) for first, last in both])
    return [each for message in zip(*found, strict=True) for each in message]


def _send(sock: socket.socket, size: int, count: int, barrier: threading.Barrier) -> list[float]:
    """When each message was begun."""
    data, begun = bytes(size), []
    for _ in range(count):
        barrier.wait(_TIMEOUT)
        time.sleep(_REST)
        begun.append(time.perf_counter())
        sock.sendall(data)
    return begun


def _receive(sock: socket.socket, size: int, count: int, barrier: threading.Barrier) -> list[float]:
    """When all of each message had come."""
    room, over = bytearray(size), []
    for _ in range(count):
        barrier.wait(_TIMEOUT)
        if sock.recv_into(room, size, socket.MSG_WAITALL) != size:
            raise TimeoutError(f"a message of {size} bytes did not come within {_TIMEOUT} s")
        over.append(time.perf_counter())
    return over


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", action="append", type=rate, metavar="100mbit", required=True)
    parser.add_argument("-n", "--hosts", type=int, default=4)
    options = parser.parse_args()
    if why := missing():
        print(f"links: {why}", file=sys.stderr)
        return 1
    for each in options.rate:
        with contextlib.closing(ShapedLinks(options.hosts, each)) as shaped:
            try:
                print(f"{each.name}, {each.credit()}\n{as_table(check(shaped))}")
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            print(f"packets dropped: {shaped.dropped()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
