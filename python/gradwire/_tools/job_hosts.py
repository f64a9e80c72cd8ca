"""`gradwire doctor --job` under a launcher: the hosts of its ranks, and what lies between them.

Ranks meet as those of a training would, so that what is measured is what a training gets. Ranks of
other jobs that run on these hosts are shown too, those of all hosts in one table.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire import _core
from gradwire._base.packages import installed
from gradwire._base.tables import table
from gradwire._communicator import Communicator
from gradwire._host.identity import host_identity, machine_of
from gradwire._init import init
from gradwire._tools import status

if TYPE_CHECKING:
    from gradwire._core import RankStatus

_SIOCGIFMTU = 0x8921
_PINGS = 11
_LEAST_SECONDS = 0.2  # of the transfer by which a rate is measured
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 64 << 20
_MOST_ROWS = 28  # of links: all those of 8 hosts
_SLOW = 0.5  # of the median rate


@dataclass(frozen=True)
class Host:
    """What a training's ranks find on one host."""

    name: str
    ranks: list[int]
    interface: str
    address: str
    mtu: int  # bytes; 0: unknown
    cores: int
    settings: dict[str, str]  # which should be the same on all hosts


@dataclass(frozen=True)
class Link:
    """What was measured between two hosts, by their numbers."""

    hosts: tuple[int, int]
    transport: str
    round_trip: float  # seconds, of one byte there and back
    rate: float  # bytes a second, each way at once


@dataclass(frozen=True)
class Found:
    """The hosts of a job, the links between them, and the ranks of other jobs there."""

    hosts: list[Host]
    links: list[Link]
    jobs: list[status.LocalRanks]


def run(*, as_json: bool) -> int:
    """Meets the launcher's other ranks and measures; rank 0 prints. Returns the exit code."""
    with init() as comm:
        found = survey(comm)
        if found is not None:
            print(to_json(found) if as_json else as_text(found))
    return 0


def survey(comm: Communicator) -> Found | None:
    """What is found, on rank 0; every rank calls it."""
    leader = any(comm.rank == ranks[0] for ranks in comm.hosts)
    leaders = comm.split(0 if leader else None)
    if leaders is None:
        comm.barrier()
        return None
    with leaders:
        links = list(_links(leaders))
        told = leaders.gather_object((_host(comm), links, _other_ranks(comm)))
    comm.barrier()
    if told is None:
        return None
    seen = {key: each for *_, ranks in told for key, each in ranks.items()}
    names = f"these {len(told)} hosts" if len(told) > 1 else status.THIS_HOST
    return Found(
        _told_apart([host for host, *_ in told]),
        sorted((each for _, links, _ in told for each in links), key=lambda each: each.hosts),
        status.communicators(list(seen.values()), where=names),
    )


def _host(comm: Communicator) -> Host:
    interface = comm._mesh.interface.interface
    return Host(
        name=socket.gethostname(),
        ranks=next(list(each) for each in comm.hosts if comm.rank in each),
        interface=interface.name,
        address=interface.address,
        mtu=_mtu(interface.name),
        cores=len(os.sched_getaffinity(0)),
        settings=_settings(),
    )


def _told_apart(hosts: list[Host]) -> list[Host]:
    """The hosts, those of one name with their addresses in it."""
    names = Counter(each.name for each in hosts)
    return [
        replace(each, name=f"{each.name} {each.address}") if names[each.name] > 1 else each
        for each in hosts
    ]


def _settings() -> dict[str, str]:
    versions = {name: installed(name) or "none" for name in ("gradwire", "numpy", "torch")}
    ipv4 = Path("/proc/sys/net/ipv4")
    limits = {
        name: " ".join((ipv4 / name).read_text().split())
        for name in ("tcp_congestion_control", "tcp_wmem", "tcp_rmem")
        if (ipv4 / name).exists()
    }
    return {
        **versions,
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "instruction set": _core.active_instruction_set(),
        **limits,
    }


def _mtu(interface: str) -> int:
    request = struct.pack("16si", interface.encode()[:15], 0)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFMTU, request.ljust(40, b"\0"))
    except OSError:
        return 0
    return int(struct.unpack_from("16si", found)[1])


def _other_ranks(comm: Communicator) -> dict[Any, RankStatus]:
    """The ranks of other jobs on this host; hosts may be namespaces of one machine."""
    machine = machine_of(host_identity())
    return {
        (machine, each["pid"], each["communicator"], each["rank"]): each
        for each in _core.ranks_on_this_host()
        if each["tag"] != comm._mesh.job.tag or each["job"] != comm._mesh.job.name
    }


def _links(leaders: Communicator) -> Iterator[Link]:
    """The links of this host to those of higher numbers; pairs of other hosts go beside it."""
    for pairs in rounds(leaders.size):
        color = next((i for i, pair in enumerate(pairs) if leaders.rank in pair), None)
        pair = leaders.split(color)
        if pair is None or color is None:
            continue
        with pair:
            round_trip, rate = _round_trip(pair), _rate(pair)
        if pair.rank == 0:
            yield Link(pairs[color], leaders.transports[pairs[color][1]], round_trip, rate)


def rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of hosts in rounds: each host is in one of a round at most (the circle method)."""
    places = [*range(hosts), *([-1] if hosts % 2 else [])]
    half = len(places) // 2
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def _round_trip(pair: Communicator) -> float:
    byte, took = np.zeros(1, np.uint8), []
    for _ in range(_PINGS):
        began = time.perf_counter()
        if pair.rank == 0:
            pair.send(byte, 1)
        pair.recv(byte, 1 - pair.rank)
        if pair.rank == 1:
            pair.send(byte, 0)
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def _rate(pair: Communicator) -> float:
    """Bytes a second each way at once, of a transfer that lasts long enough."""
    size = _LEAST_BYTES
    while True:
        x, before = np.zeros(size // 4, np.float32), pair.traffic.bytes_sent
        began = time.perf_counter()
        pair.all_reduce(x)
        seconds = np.array([time.perf_counter() - began])
        sent = pair.traffic.bytes_sent - before
        pair.all_reduce(seconds, op="max")  # so that both end with the same transfer
        if seconds[0] >= _LEAST_SECONDS or size >= _MOST_BYTES:
            return float(sent / seconds[0])
        size *= 4


def as_text(found: Found) -> str:
    """Formats what was found for people."""
    parts = [_hosts_table(found.hosts), _links_table(found), *_differences(found.hosts)]
    parts += ["Ranks of jobs that run there:"] if found.jobs else []
    parts += [each.as_table() for each in found.jobs]
    return "\n\n".join(filter(None, parts))


def _hosts_table(hosts: Sequence[Host]) -> str:
    rows = [["host", "ranks", "interface", "address", "MTU", "cores", "gradwire", "torch"]]
    for each in hosts:
        ranks = ",".join(map(str, each.ranks))
        versions = [each.settings[name] for name in ("gradwire", "torch")]
        numbers = [str(each.mtu or "?"), str(each.cores)]
        rows.append([each.name, ranks, each.interface, each.address, *numbers, *versions])
    return table(rows, left=4)


def _links_table(found: Found) -> str:
    if not found.links:
        return "All ranks are on one host: there is nothing between hosts."
    rates = [each.rate for each in found.links]
    slowest = sorted(found.links, key=lambda each: each.rate)[:_MOST_ROWS]
    rows = [("between", "and", "over", "round trip", "each way")]
    for link in sorted(slowest, key=lambda each: each.hosts):
        one, other = (found.hosts[each].name for each in link.hosts)
        mark = " (slow)" if link.rate < _SLOW * statistics.median(rates) else ""
        trip = f"{link.round_trip * 1e3:.3f} ms"
        rows.append((one, other, link.transport, trip, f"{_mbit(link.rate)}{mark}"))
    left_out = len(rates) - len(slowest)
    more = f"\n{left_out} faster ones; median {_mbit(statistics.median(rates))}" if left_out else ""
    return table(rows, left=3) + more


def _mbit(rate: float) -> str:
    return f"{rate * 8 / 1e6:,.0f} Mbit/s"


def _differences(hosts: Sequence[Host]) -> Iterator[str]:
    """What should be the same on all hosts and is not."""
    for name, values in differing(hosts).items():
        told = "; ".join(f"{value} on {', '.join(where)}" for value, where in values.items())
        yield f"{name} differs: {told}"


def differing(hosts: Sequence[Host]) -> dict[str, dict[str, list[str]]]:
    """The settings that differ: which hosts have which value."""
    found: dict[str, dict[str, list[str]]] = {}
    for each in hosts:
        for name, value in {"MTU": str(each.mtu), **each.settings}.items():
            found.setdefault(name, {}).setdefault(value, []).append(each.name)
    return {name: values for name, values in found.items() if len(values) > 1}


def to_json(found: Found) -> str:
    """Formats what was found as a JSON object; times are in seconds, rates in bytes a second."""
    shown = {
        "hosts": [asdict(each) for each in found.hosts],
        "links": [asdict(each) for each in found.links],
        "differing": differing(found.hosts),
        "communicators": [each.as_dict() for each in found.jobs],
    }
    return json.dumps(shown, indent=2)
