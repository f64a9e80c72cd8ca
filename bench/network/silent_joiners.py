"""Steps that an elastic job loses to a joiner that proves itself and then says nothing.

    python -m bench.network.silent_joiners [--seconds 10] [--pairs 20] [--ranks 3]

The joiner knows the job's secret. A *silent* one says nothing once it has proved that; one that has
*asked* to join falls silent when the ranks let it in, which costs them 5 s. Each comes again as
soon as it is sent away. In one job periods without a joiner and with one take turns, so that both
have the same processes on the same cores: separate jobs of three ranks on two cores differ by 20 %.
The bound is 5 % of the steps. For one that has asked it is 5 % of the time, since two long periods
differ by more; after 100 s it is reached at the soonest: `--joiner asked --seconds 400 --pairs 1`.
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
from collections.abc import Callable

from bench.common import job, machine

_JOINERS = ("silent", "asked")
_BOUND = 0.05
_REACH_SECONDS = 5.0  # in which the join listener answers
_START_SECONDS = 5.0  # in which the ranks start


def main() -> int:
    """Measures, and prints a table; the status is 1 beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", default=10.0, type=float, help="of each period")
    parser.add_argument("--pairs", default=20, type=int, help="periods without and with a joiner")
    parser.add_argument("-n", "--ranks", default=3, type=int)
    parser.add_argument("--joiner", default=_JOINERS[0], choices=_JOINERS)
    parser.add_argument("--begin", default=0.0, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.meet:
        _run_rank(asked)
        return 0
    print(f"{machine.describe()}; {asked.ranks} ranks, {asked.pairs} pairs of {asked.seconds:g} s")
    found, visits = _measure(asked)
    resizing = sum(found["resizing"][1::2])
    whole = asked.pairs * asked.seconds
    print(f"resizes in the periods with a joiner: {resizing:.1f} of {whole:g} s")
    lost = _print_loss([each / asked.seconds for each in found["steps"]], visits)
    return lost if asked.joiner == "silent" else int(resizing > _BOUND * whole)


def _print_loss(rates: list[float], visits: int) -> int:
    without, with_joiner = rates[::2], rates[1::2]
    pairs = sorted(1 - b / a for a, b in zip(without, with_joiner, strict=True))
    lost = 1 - sum(with_joiner) / sum(without)
    print(f"steps a second: {statistics.mean(without):.0f} without a joiner, ", end="")
    print(f"{statistics.mean(with_joiner):.0f} with one, which came {visits} times")
    print(f"lost: {lost:.1%}; of the pairs {pairs[0]:.1%} to {pairs[-1]:.1%}, ", end="")
    print(f"median {statistics.median(pairs):.1%}")
    return int(lost > _BOUND)


def _measure(asked: argparse.Namespace) -> tuple[dict[str, list[float]], int]:
    """Runs a job; returns what rank 0 wrote, and how often the joiner came."""
    from gradwire._bootstrap.launch_info import DEFAULT_JOB
    from gradwire._bootstrap.store import parse_address
    from gradwire._bootstrap.store_server import StoreServer

    secret = secrets.token_hex().encode()
    setting = {
        "GRADWIRE_SECRET": secret.decode(),
        "GRADWIRE_STORE": f"unix://{secrets.token_hex(8)}",
    }
    asked.begin = time.monotonic() + _START_SECONDS  # the clock of all processes of a host
    ends, visits = threading.Event(), [0]
    joiner = threading.Thread(target=_come_again, args=(asked, setting, ends, visits))
    joiner.start()
    arguments = [f"--{name}={getattr(asked, name)}" for name in ("seconds", "pairs", "begin")]
    try:
        with StoreServer(parse_address(setting["GRADWIRE_STORE"]), DEFAULT_JOB, secret):
            found = job.run("bench.network.silent_joiners", arguments, asked.ranks, setting)
    finally:
        ends.set()
        joiner.join()
    if not visits[0]:
        raise RuntimeError("the joiner was never let in to ask")
    return found, visits[0]


def _period(asked: argparse.Namespace) -> int:
    """The number of the period that is now; negative before the first."""
    return int((time.monotonic() - asked.begin) // asked.seconds)


def _come_again(
    asked: argparse.Namespace, setting: dict[str, str], ends: threading.Event, visits: list[int]
) -> None:
    from gradwire import Error
    from gradwire._bootstrap.join_listener import JOIN_REQUEST
    from gradwire._bootstrap.survivor_links import pack_message

    def over() -> bool:
        period = _period(asked)
        return ends.is_set() or period < 0 or period % 2 == 0

    said = pack_message(*JOIN_REQUEST) if asked.joiner == "asked" else b""
    while not ends.wait(0.05):  # as join() does
        if not over():
            with contextlib.suppress(Error, OSError):
                _visit(setting, said, over, visits)


def _visit(
    setting: dict[str, str], said: bytes, over: Callable[[], bool], visits: list[int]
) -> None:
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
        while not over():
            with contextlib.suppress(TimeoutError):
                if not sock.recv(1 << 16):
                    return


def _run_rank(asked: argparse.Namespace) -> None:
    """Steps until the last period is over; rank 0 writes steps and seconds in resizes of each."""
    import gradwire
    import numpy as np

    comm = gradwire.init(timeout=120.0, elastic=True)
    x, steps = np.zeros(1000, np.float32), [0] * (2 * asked.pairs)
    resizing = [0.0] * len(steps)
    while not x[0]:
        period = _period(asked)
        if 0 <= period < len(steps):
            steps[period] += 1
        x[:] = float(comm.rank == 0 and period >= len(steps))
        comm.all_reduce(x, out=x)
        if comm.should_resize():
            began = time.monotonic()
            comm = comm.resize()
            if 0 <= period < len(steps):
                resizing[period] += time.monotonic() - began
    if comm.rank == 0:
        job.write(asked.meet, {"steps": steps, "resizing": resizing})
    comm.close()


if __name__ == "__main__":
    os.environ.pop("GRADWIRE_JOB", None)
    sys.exit(main())
