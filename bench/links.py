"""Links held to a rate: one network namespace per rank, joined by veth pairs to a bridge.

    python bench/links.py --rate 100mbit --rate 1gbit     # measures the links, and no more

`tc … tbf` holds both ends of every pair, so a rank has one rate for all that it sends and one for
all that it receives, as with a network card and a switch. A token bucket lets a burst through at
once: 1 MB of it shows a 200 kB message 2.6 Gbit/s whatever the rate. So bursts are a few packets,
and `check()` measures the links by plain sockets, with the message sizes that matter, before
anything is believed that was measured on them.
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

import namespaces

MESSAGES = (200_000, 1_000_000, 8_000_000)  # bytes
TOLERANCE = 0.08  # of the rate
_PAUSE = 1.0  # seconds between attempts
_HEADERS, _PAYLOAD = 66, 1448  # bytes of a TCP packet on Ethernet
_PACKET = _HEADERS + _PAYLOAD
_CONGESTION_CONTROL = "cubic"  # what most machines use, whatever this one does
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMEOUT = 60
_REST = 2e-3  # seconds, after which a bucket is full again


class Rate(NamedTuple):
    """What tc's token buckets are told."""

    name: str  # as tc writes it
    bits: float  # per second, headers included

    @property
    def burst(self) -> int:
        """Bytes that may go at once: 8 kB at 100 Mbit/s, 20 kB at 1 Gbit/s.

        Enough for a timer that is late, and little beside the smallest message.
        """
        return int(8_000 * (self.bits / 1e8) ** 0.4)

    @property
    def queue(self) -> int:
        """Bytes that wait before packets are dropped: 50 ms, as a switch may hold."""
        return max(256_000, int(self.bits * 0.05 / 8))

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
        # A receiving end twice as tolerant does not hold up a sender that is on time.
        sends, receives = held_to.bucket(1), held_to.bucket(2)
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


class Measured(NamedTuple):
    """The rate that messages of a size had, headers included."""

    pattern: str
    message: int  # bytes
    mbit: float  # per second, median
    share: float  # of the rate


def check(
    links: ShapedLinks, messages: Sequence[int] = MESSAGES, attempts: int = 15
) -> list[Measured]:
    """Measures each size from one host to another, and around a ring of all hosts at once.

    Raises RuntimeError, with the figures, where one is off the links' rate by more than TOLERANCE
    in all attempts: a machine that does other work for a moment gets another one.
    """
    count = len(links.hosts)
    ring = [(host, (host + 1) % count) for host in range(count)]
    found = [
        _measure_until_right(links, pattern, edges, size, attempts)
        for pattern, edges in (("one pair", ring[:1]), ("ring", ring))
        for size in messages
    ]
    if not all(map(_is_right, found)):
        raise RuntimeError(f"the links are not held to {links.rate.name}:\n{as_table(found)}")
    return found


def _measure_until_right(
    links: ShapedLinks, pattern: str, edges: Sequence[tuple[int, int]], size: int, attempts: int
) -> Measured:
    found = _measure(links, pattern, edges, size)
    while not _is_right(found) and (attempts := attempts - 1) > 0:
        time.sleep(_PAUSE)
        found = _measure(links, pattern, edges, size)
    return found


def _is_right(found: Measured) -> bool:
    return abs(found.share - 1) <= TOLERANCE


def as_table(found: Sequence[Measured]) -> str:
    """The figures as Markdown."""
    lines = ["| sockets | message, bytes | Mbit/s | of the rate |", "|---|---:|---:|---:|"]
    lines += [
        f"| {each.pattern} | {each.message:,} | {each.mbit:.1f} | {each.share:.1%} |"
        for each in found
    ]
    return "\n".join(lines)


def wire_bytes(payload: int) -> int:
    """With the headers of its packets."""
    return payload + -(-payload // _PAYLOAD) * _HEADERS


def _measure(
    links: ShapedLinks, pattern: str, edges: Sequence[tuple[int, int]], size: int
) -> Measured:
    """Each message is sent when all of the one before have come, and buckets are full again."""
    pairs = [links.connect(*edge) for edge in edges]
    repetitions = max(5, min(40, int(0.5 / (size * 8 / links.rate.bits))))
    barrier = threading.Barrier(2 * len(pairs))
    with ThreadPoolExecutor(barrier.parties) as pool:
        starts = [pool.submit(_send, near, size, repetitions, barrier) for near, _ in pairs]
        ends = [pool.submit(_receive, far, size, repetitions, barrier) for _, far in pairs]
    for end in (end for pair in pairs for end in pair):
        end.close()
    seconds = [
        last - first
        for start, end in zip(starts, ends, strict=True)
        for first, last in list(zip(start.result(), end.result(), strict=True))[2:]
    ]
    bits = wire_bytes(size) * 8 / statistics.median(seconds)
    return Measured(pattern, size, bits / 1e6, bits / links.rate.bits)


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
                print(f"{each.name}, burst {each.burst} bytes\n{as_table(check(shaped))}")
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            print(f"packets dropped: {shaped.dropped()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
