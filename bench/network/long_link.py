"""How full gradwire's all_reduce makes a long link, beside plain TCP streams, in turns.

    make test-cpp && sudo .venv/bin/python -m bench.network.long_link     # 8 minutes

Two namespaces are joined by long_link.cc, with a rate, a delay and a loss. Mbit/s are payload each
way: an all_reduce of two ranks moves all bytes of the array in both directions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python" / "support"))
import gradwire
import namespaces
from hosts import Rank

from bench.network.long_link_report import document
from bench.network.rates import all_reduce_rates, write

PROGRAM = Path(__file__).parents[2] / "build" / "release" / "bench_long_link"
ADDRESSES = "10.99.0.1", "10.99.0.2"
PORT = 29500
PLAIN = (1, 4, 8)  # streams
WARM_UP = 3  # turns in which windows open
SETTINGS = ("1", "auto")  # of GRADWIRE_TCP_STREAMS
# Mbit/s, round trip in ms, loss.
LINKS = ((1000, 80, 0.0), (1000, 80, 0.001), (200, 60, 0.0), (1000, 0.1, 0.0))


@contextlib.contextmanager
def long_link(mbit: float, round_trip: float, loss: float) -> Iterator[list[namespaces.Namespace]]:
    """Two hosts with a link of so many Mbit/s between them, and a round trip in ms."""
    sites = [namespaces.Namespace() for _ in ADDRESSES]
    with contextlib.ExitStack() as stack:
        for site in sites:
            stack.callback(site.close)
        stack.enter_context(carried(sites, mbit, round_trip, loss))
        for site, address in zip(sites, ADDRESSES, strict=True):
            site.ip(f"addr add {address}/24 dev far0")
        yield sites


@contextlib.contextmanager
def carried(
    spaces: list[namespaces.Namespace], mbit: float, round_trip: float, loss: float
) -> Iterator[None]:
    """Meanwhile two namespaces have a device far0 each, and a link of this kind between them."""
    if not PROGRAM.exists():
        sys.exit(f"no {PROGRAM}: `make test-cpp` builds it")
    queue = max(20.0, round_trip)
    numbers = [f"{each:g}" for each in (mbit, round_trip / 2, loss, queue)]
    command = [PROGRAM, *(each.path for each in spaces), *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as carrier:
        try:
            assert carrier.stdout is not None
            assert carrier.stdout.readline() == "up\n"
            for each in spaces:
                each.ip("link set far0 mtu 9000 txqueuelen 5000 up")
            yield
        finally:
            carrier.kill()


def values(hosts: Sequence[namespaces.Namespace], body: Callable[[int, Any], Any]) -> list[Any]:
    """What `body(rank, pipe)` returns on each host; raises the first rank's error."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(hosts):
            ranks.append(Rank(host, lambda pipe, rank=rank: body(rank, pipe)))
            stack.callback(ranks[-1].close)
        found = [rank.outcome() for rank in ranks]
    for each in found:
        if each.error is not None:
            raise each.error
    return [each.value for each in found]


def all_reduces(
    sites: list[namespaces.Namespace], setting: str, size: int, turns: int
) -> list[float]:
    """The Mbit/s each way of each of some all_reduces of `size` bytes."""

    def body(rank: int, pipe: Any) -> list[float]:
        os.environ["GRADWIRE_TCP_STREAMS"] = setting
        store, secret = f"tcp://{ADDRESSES[0]}:{PORT}", "0123456789abcdef"
        with gradwire.init(rank=rank, ranks=2, store=store, secret=secret) as comm:
            return all_reduce_rates(comm, size, turns, WARM_UP)

    return list(values(sites, body)[0])


def plain(sites: list[namespaces.Namespace], streams: int, size: int, turns: int) -> list[float]:
    """The same of plain streams, each of which carries its part of `size` bytes both ways."""
    part = size // streams

    def move(sock: socket.socket, data: memoryview) -> None:
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        room, left = bytearray(1 << 20), part
        while left:
            got = sock.recv_into(room, min(left, len(room)))
            assert got
            left -= got
        sender.join()

    def body(rank: int, pipe: Any) -> list[float]:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(each) for each in connected(rank, streams)]
            data, found = memoryview(bytes(part)), []
            for _ in range(WARM_UP + turns):
                socks[0].sendall(b"x")  # neither begins before the other is there
                assert socks[0].recv(1)
                start = time.perf_counter()
                movers = [threading.Thread(target=move, args=(sock, data)) for sock in socks]
                for each in movers:
                    each.start()
                for each in movers:
                    each.join()
                found.append(size * 8e-6 / (time.perf_counter() - start))
            return found[WARM_UP:]

    return list(values(sites, body)[0])


def connected(rank: int, count: int) -> list[socket.socket]:
    """This rank's ends of so many connections between the two."""
    if rank == 0:
        with socket.create_server((ADDRESSES[0], PORT + 1), backlog=count) as server:
            return [server.accept()[0] for _ in range(count)]
    found: list[socket.socket] = []
    deadline = time.monotonic() + 10
    while len(found) < count:
        try:
            found.append(socket.create_connection((ADDRESSES[0], PORT + 1)))
        except ConnectionRefusedError:  # rank 0 does not listen yet
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All links' rates, each program's turns after each other's."""
    cases = []
    for link in LINKS:
        rates: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            with long_link(*link) as sites:
                for setting in SETTINGS:
                    found = all_reduces(sites, setting, options.bytes, options.turns)
                    rates.setdefault(f"gradwire, {setting}", []).extend(found)
                for streams in PLAIN:
                    found = plain(sites, streams, options.bytes, options.turns)
                    rates.setdefault(f"plain, {streams}", []).extend(found)
        cases.append({"link": link, "mbit": rates})
        print(f"{link}: { {name: round(statistics.median(each)) for name, each in rates.items()} }")
    return {"bytes": options.bytes, "cases": cases}


def main() -> None:
    """Measures on the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    write("long-link", parser, measure, document, bytes=64 << 20, turns=3, rounds=2)


if __name__ == "__main__":
    main()
