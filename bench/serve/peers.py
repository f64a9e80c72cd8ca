"""The parameter server beside raw sockets, gloo, torch's rpc and the machine's limit, in turns.

    python -m bench.serve.peers            # 4 kB, 4 MB and 100 MB: 10 minutes on an idle machine
    python -m bench.serve.peers --quick    # to 4 MB, three rounds

Two clients pull all values from two servers and push as many, at the same time. The servers of
gradwire apply each push by SGD; the others only take it. All processes stay alive; for each size
the teams take turns, and who has none sleeps. Ratios are medians over rounds, of turns in the same
round. "copies alone" is a memcpy of what a pull and a push must copy twice each, on two cores.

Also: 64 clients beside 4, which are threads of one process; memory and descriptors that a client
costs each of two shards; a small request beside a large push; a replica that comes again.

Writes bench/results/serve-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from gradwire import serve
from numpy.typing import NDArray
from tqdm import tqdm

from bench.common import report
from bench.common.machine import OtherLoad
from bench.serve import peer_sides, peers_report
from bench.serve.peer_sides import CLIENTS, MEET_BY_FILE, SERVERS_OF, SIDES, TOLD

SIZES = (1 << 10, 1 << 20, 25_000_000)  # float32
_MOST_TIMES = 2000
_CROWD_ELEMENTS = 250_000
_CROWDS = (4, 64)
_READY_SECONDS = 300.0


class Team:
    """The processes of one way: its servers, where it has some, and two clients."""

    def __init__(self, kind: str, sizes: Sequence[int], scratch: str) -> None:
        self.kind, self._context = kind, multiprocessing.get_context("spawn")
        self._pipes: dict[int, Any] = {}
        self._processes: list[Any] = []
        servers = range(CLIENTS, CLIENTS + SERVERS_OF[kind])
        meet = f"{scratch}/{list(SIDES).index(kind)}"
        for rank in servers:
            self._start(rank, meet, sizes)
        where: Any = meet
        if kind not in MEET_BY_FILE:
            found = [self._receive(rank) for rank in servers]
            where = found[0] if len(found) == 1 else found
        for rank in range(CLIENTS):
            self._start(rank, where, sizes)
        for rank in self._pipes if kind in MEET_BY_FILE else range(CLIENTS):
            self._receive(rank)

    def _start(self, rank: int, where: Any, sizes: Sequence[int]) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=peer_sides.run, args=(self.kind, rank, where, sizes, there), daemon=True
        )
        process.start()
        there.close()
        self._pipes[rank] = here
        self._processes.append(process)

    def _receive(self, rank: int) -> Any:
        if not self._pipes[rank].poll(_READY_SECONDS):
            raise RuntimeError(f"{self.kind}: process {rank} does not answer")
        return self._pipes[rank].recv()

    def turn(self, operation: str, size: int, times: int) -> float:
        """Seconds of one operation, on the slower client."""
        told = self._pipes if self.kind in TOLD else range(CLIENTS)
        for rank in told:
            self._pipes[rank].send((operation, size, times))
        return max([self._receive(rank) for rank in told][:CLIENTS] or [0.0]) / times

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                pipe.send(None)
        for each in self._processes:
            each.join(5)
            each.kill()


def main() -> int:
    """Measures and writes what it found."""
    options = _parse()
    load = OtherLoad()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        teams = {}
        for kind in options.teams:
            teams[kind] = Team(kind, options.sizes, scratch)
            stack.callback(teams[kind].close)
        cases = [
            _measure(teams, operation, size, options)
            for size in tqdm(options.sizes, unit="size")
            for operation in ("both", "pull")
        ]
    found = {
        "cases": cases,
        "crowds": _crowds(options),
        "beside": _small_beside_large(max(options.sizes), options.rounds),
        "rejoin": _rejoin(max(options.sizes), options.rounds),
    }
    found |= report.stamp("bench.serve.peers", load)
    report.write(options.output, "serve", found, peers_report.document)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="float32 elements, even")
    add("--teams", nargs="+", choices=list(SIDES), default=list(SIDES))
    add("--rounds", type=int, default=9)
    add("--seconds", type=float, default=0.5, help="of a turn, if one operation takes no more")
    add("--quick", action="store_true", help="small sizes, three rounds")
    add("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds, options.seconds = SIZES[:2], 3, 0.2
    return options


def _measure(
    teams: dict[str, Team], operation: str, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of an operation, by team and round."""
    times = {}
    for kind, team in teams.items():
        once = team.turn(operation, size, 1)  # warms up
        once = team.turn(operation, size, max(1, min(20, int(0.1 / once))))
        times[kind] = max(1, min(_MOST_TIMES, int(options.seconds / once)))
    seconds: dict[str, list[float]] = {kind: [] for kind in teams}
    kinds = list(teams)
    for turn in range(options.rounds):
        first = turn % len(kinds)
        for kind in (*kinds[first:], *kinds[:first]):
            seconds[kind].append(teams[kind].turn(operation, size, times[kind]))
    return {"operation": operation, "elements": size, "seconds": seconds}


def _crowds(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Pulls and pushes a second of few clients and of many, in turns, over one shard."""
    values = [np.zeros(_CROWD_ELEMENTS, np.float32)]
    arrays = [np.full(_CROWD_ELEMENTS, 1e-3, np.float32) for _ in range(max(_CROWDS))]
    rows: dict[int, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        server = Team.__new__(Team)  # a server alone
        server.kind, server._context = peer_sides.GRADWIRE_SHM, multiprocessing.get_context("spawn")
        server._pipes, server._processes = {}, []
        server._start(CLIENTS, "", [_CROWD_ELEMENTS])
        stack.callback(server.close)
        store = server._receive(CLIENTS)[_CROWD_ELEMENTS]
        pid = server._processes[0].pid
        clients: list[serve.ParameterServer] = []
        for number in _CROWDS:
            before = _memory(pid), len(os.listdir(f"/proc/{pid}/fd")), len(clients)
            while len(clients) < number:
                name = f"client {len(clients)}"
                joined = serve.connect(values, serve.SGD(lr=0.1), store=store, replica=name)
                clients.append(stack.enter_context(joined))
            _work(clients, arrays, 1)
            more = len(clients) - before[2]
            rows[number] = {
                "clients": number,
                "bytes_a_client": (_memory(pid) - before[0]) / more / peer_sides.SERVERS,
                "descriptors_a_client": (len(os.listdir(f"/proc/{pid}/fd")) - before[1])
                / more
                / peer_sides.SERVERS,
                "rates": [],
            }
        for _ in range(options.rounds):
            for number in _CROWDS:
                rows[number]["rates"].append(_work(clients[:number], arrays, 64 // number * 2))
    return list(rows.values())


def _work(
    clients: Sequence[serve.ParameterServer], arrays: Sequence[NDArray[np.float32]], times: int
) -> float:
    """Pulls and pushes a second of all clients together, each on a thread.

    However many they are, they go through the same arrays in turns: a few clients' own would stay
    in the caches, those of many would not, whatever a server does.
    """

    def go(first: int) -> None:
        own = itertools.cycle(arrays[first :: len(clients)])
        for _ in range(times):
            values = [next(own)]
            clients[first].pull(values)
            clients[first].push(values)

    threads = [threading.Thread(target=go, args=(each,)) for each in range(len(clients))]
    start = perf_counter()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return len(clients) * times / (perf_counter() - start)


def _memory(pid: int) -> int:
    """Bytes of a process, of shared pages its part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel tells no Pss")


def _small_beside_large(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a small request: alone, beside a push of the same client, and of another one."""
    values = [np.zeros(size, np.float32)]
    found: dict[str, list[float]] = {"alone": [], "own push": [], "another's push": []}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve.Server(2))
        own, other = (
            stack.enter_context(
                serve.connect(values, serve.SGD(lr=0.1), store=server.store, replica=name)
            )
            for name in ("a", "b")
        )
        for _ in range(rounds):
            for what, pushing in {"alone": None, "own push": own, "another's push": other}.items():
                under_way = None if pushing is None else pushing.push(values, async_op=True)
                taken = []
                while not taken or (under_way is not None and not under_way.done()):
                    start = perf_counter()
                    own.wait(0)
                    taken.append(perf_counter() - start)
                found[what].append(statistics.median(taken))
    return found


def _rejoin(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds that a replica which comes again takes to connect, and for its first pull."""
    values = [np.zeros(size, np.float32)]
    found: dict[str, list[float]] = {"connect": [], "pull": []}
    with serve.Server(2) as server:
        options: dict[str, Any] = {"store": server.store, "replica": "a"}
        for _ in range(rounds + 1):
            start = perf_counter()
            with serve.connect(values, serve.SGD(lr=0.1), **options) as ps:
                found["connect"].append(perf_counter() - start)
                start = perf_counter()
                ps.pull(values)
                found["pull"].append(perf_counter() - start)
    return {what: seconds[1:] for what, seconds in found.items()}


if __name__ == "__main__":
    sys.exit(main())
