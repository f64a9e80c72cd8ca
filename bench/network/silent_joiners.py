"""Steps that an elastic job loses to a joiner that proves itself and then says nothing.

    python -m bench.network.silent_joiners [--seconds 200] [--turns 2] [--ranks 3]

The joiner knows the job's secret. A *silent* one says nothing once it has proved that; one that has
*asked* to join falls silent when the ranks let it in, which costs them 5 s. Each comes again as
soon as it is sent away. Jobs take turns: with no joiner, and with each of the two. The bound is 5 %
of the steps; 5 s are more than that where a turn takes less than 100 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import threading
import time
from typing import Any

from bench.common import job, machine

_JOINERS = ("none", "silent", "asked")
_BOUND = 0.05
_REACH_SECONDS = 5.0  # in which the join listener answers


def main() -> int:
    """Measures, and prints a table; the status is 1 beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", default=200.0, type=float, help="of each turn")
    parser.add_argument("--turns", default=2, type=int, help="with each kind of joiner")
    parser.add_argument("--ranks", default=3, type=int)
    parser.add_argument("--joiners", nargs="+", default=_JOINERS[1:], choices=_JOINERS[1:])
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.meet:
        _run_rank(asked.meet, asked.seconds)
        return 0
    print(f"{machine.describe()}; {asked.ranks} ranks, medians of {asked.turns} turns\n")
    return _print_table(_take_turns(asked))


def _take_turns(asked: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    kinds = (_JOINERS[0], *asked.joiners)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for turn in range(asked.turns):
        for kind in kinds[:: -1 if turn % 2 else 1]:
            found[kind].append(_one_turn(kind, asked.ranks, asked.seconds))
    return found


def _print_table(found: dict[str, list[dict[str, float]]]) -> int:
    rates = {
        kind: statistics.median(each["rate"] for each in turns) for kind, turns in found.items()
    }
    print("| joiner | steps a second | lost, % | visits |")
    print("|---|---:|---:|---:|")
    lost = {kind: 1 - rate / rates[_JOINERS[0]] for kind, rate in rates.items()}
    for kind, turns in found.items():
        visits = sum(each["visits"] for each in turns)
        print(f"| {kind} | {rates[kind]:.1f} | {100 * lost[kind]:.1f} | {visits:.0f} |", flush=True)
    return int(max(lost.values()) > _BOUND)


def _one_turn(kind: str, ranks: int, seconds: float) -> dict[str, float]:
    """Runs a job for so many seconds, and a joiner of this kind beside it."""
    from gradwire._bootstrap.launch_info import DEFAULT_JOB
    from gradwire._bootstrap.store import parse_address
    from gradwire._bootstrap.store_server import StoreServer

    secret = secrets.token_hex().encode()
    setting = {
        "GRADWIRE_SECRET": secret.decode(),
        "GRADWIRE_STORE": f"unix://{secrets.token_hex(8)}",
    }
    ends, visits = threading.Event(), [0]
    joiner = threading.Thread(target=_come_again, args=(kind, setting, ends, visits))
    if kind != _JOINERS[0]:
        joiner.start()
    try:
        arguments = ["--seconds", str(seconds)]
        with StoreServer(parse_address(setting["GRADWIRE_STORE"]), DEFAULT_JOB, secret):
            found: dict[str, Any] = job.run(
                "bench.network.silent_joiners", arguments, ranks, setting
            )
    finally:
        ends.set()
        if joiner.ident is not None:
            joiner.join()
    if kind != _JOINERS[0] and not visits[0]:
        raise RuntimeError("the joiner was never let in to ask")
    return {"rate": found["rate"], "visits": float(visits[0])}


def _come_again(
    kind: str, setting: dict[str, str], ends: threading.Event, visits: list[int]
) -> None:
    from gradwire import Error
    from gradwire._bootstrap.join_listener import JOIN_REQUEST

    while not ends.is_set():
        with contextlib.suppress(Error, OSError):
            _visit(setting, JOIN_REQUEST if kind == "asked" else b"", ends, visits)
        ends.wait(0.05)  # as join() does


def _visit(setting: dict[str, str], said: bytes, ends: threading.Event, visits: list[int]) -> None:
    """Proves itself at the listener, says this, and stays until it is sent away."""
    from gradwire._base.deadline import Deadline
    from gradwire._bootstrap.connect import open_socket
    from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake
    from gradwire._bootstrap.join_listener import entry_key, unpack_entry
    from gradwire._bootstrap.joining import reader_of
    from gradwire._bootstrap.launch_info import DEFAULT_JOB
    from gradwire._host.interfaces import LOOPBACK

    secret, limit = setting["GRADWIRE_SECRET"].encode(), Deadline(_REACH_SECONDS)
    with reader_of(setting["GRADWIRE_STORE"], DEFAULT_JOB, secret, limit, _REACH_SECONDS) as read:
        entry = unpack_entry(read(entry_key(DEFAULT_JOB), limit.remaining), DEFAULT_JOB, secret)
    sock = open_socket(entry.address, "shm", LOOPBACK.interface, limit)
    with contextlib.closing(sock):
        hello = Hello(DEFAULT_JOB, Purpose.JOIN, epoch=entry.epoch, source=-1)
        sock = client_handshake(sock, hello, secret, limit)
        sock.sendall(said)
        visits[0] += 1
        sock.settimeout(0.1)
        while not ends.is_set():
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1 << 16):
                    return


def _run_rank(meet: str, seconds: float) -> None:
    """Steps until rank 0's time is over; rank 0 writes how many there were a second."""
    import gradwire
    import numpy as np

    comm = gradwire.init(timeout=120.0, elastic=True)
    x, steps, began = np.zeros(1000, np.float32), 0, time.monotonic()
    while not x[0]:
        x[:] = float(comm.rank == 0 and time.monotonic() > began + seconds)
        comm.all_reduce(x, out=x)
        steps += 1
        if comm.should_resize():
            comm = comm.resize()
    if comm.rank == 0:
        job.write(meet, {"rate": steps / (time.monotonic() - began)})
    comm.close()


if __name__ == "__main__":
    os.environ.pop("GRADWIRE_JOB", None)
    sys.exit(main())
