"""all_reduce of gradwire beside torch's gloo, MPICH and Open MPI, from Python, taking turns.

    python -m bench.libraries.peers          # p = 2, 4 and 8, 4 B to 256 MiB, shared memory, TCP
    python -m bench.libraries.peers --quick

float32, sum, in place; and barrier. MPICH and Open MPI are installed from PyPI into virtual
environments under build/peers. Every library has processes of its own, and all of a (transport, p)
stay alive: for each size they take turns, and whoever has none sleeps in the kernel. A turn checks
the result of one call, warms up, and times calls back to back; its time is one call's on the
slowest rank. Ratios are medians over rounds, of two libraries' turns in the same round. What the
machine could do at most, the wall, takes turns too, and in shared memory a program without checks
and codecs, the floor. No library is pinned to cores. Before and after each turn a cache line's
round trip between two cores is measured: where it has changed by half, the round is repeated.

Writes bench/results/peers-DATE.json, .md and .png. p = 8 with 256 MiB needs 14 GiB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.common import report
from bench.common.machine import OtherLoad, describe
from bench.libraries import peer_teams, peers_report, placement
from bench.libraries.peer_teams import GRADWIRE, LIBRARIES, Team

SIZES = tuple(4**power for power in range(1, 15))
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 9
_MOST_CALLS = 20_000
_OF_A_TURN = 8  # the part that a guess of a call's time has to last
_LEAST_WALL, _MOST_WALL = 1 << 16, 1 << 26  # bytes: Python adds to fewer; no cache holds more
_SURE = 1 << 20  # bytes of an all_reduce that no other traffic on loopback hides
_LOOPBACK = Path("/sys/class/net/lo/statistics/rx_bytes")
WALL, FLOOR = "wall", "floor"
_MOST_FLOOR = 8  # ranks
_MOST_REPEATED = 3  # rounds for each that counts


def main() -> int:
    """Installs, measures, and writes what it found, after each transport and p."""
    options = _parse()
    wanted = {name for each in options.transports for name in LIBRARIES[each]}
    libraries = [name for name in peer_teams.TITLES if name in wanted & set(options.libraries)]
    peer_teams.install(libraries)
    load = OtherLoad()
    found: dict[str, Any] = {"versions": {}, "starts": {}, "cases": []}
    pairs = [(transport, ranks) for transport in options.transports for ranks in options.ranks]
    document = ""
    with tqdm(total=len(pairs) * (1 + len(options.sizes)), unit="case") as progress:
        for transport, ranks in pairs:
            with contextlib.closing(Contest(transport, ranks, libraries)) as contest:
                found["starts"][f"{transport}, p = {ranks}"] = contest.starts
                found["versions"] |= contest.versions
                for case in contest.measure_all(options):
                    found["cases"].append(case)
                    progress.set_postfix_str(peers_report.one_line(case))
                    progress.update()
            found["machine"] = f"{describe()}, of whose time other work took {load.share():.0%}"
            document = _write(options, found)
    print(document)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--transports", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    add("-n", "--ranks", type=int, nargs="+", default=[2, 4, 8])
    add("--sizes", type=int, nargs="+", default=SIZES, help="bytes; default: powers of four")
    add("--libraries", nargs="+", choices=list(peer_teams.TITLES), default=peer_teams.TITLES)
    add("--seconds", type=float, default=12.0, help="of a case, if three rounds take no more")
    add("--quick", action="store_true", help="every second size, 3 s a case")
    add("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.sizes = min(options.seconds, 3.0), options.sizes[::2]
    if GRADWIRE not in options.libraries or len(options.libraries) < 2:
        parser.error(f"--libraries are {GRADWIRE} and another one")
    if min(options.ranks) < 2 or min(options.sizes) < 4:
        parser.error("--ranks are 2 or more, --sizes 4 bytes or more")
    return options


class Contest:
    """The libraries of one transport and number of ranks, and the wall; closes them."""

    def __init__(self, transport: str, ranks: int, libraries: list[str]) -> None:
        self.transport, self.ranks, self.starts = transport, ranks, dict[str, str]()
        self._stack, cores = contextlib.ExitStack(), len(os.sched_getaffinity(0))
        self._teams: dict[str, Team] = {}
        try:
            for name in (each for each in libraries if each in LIBRARIES[transport]):
                start = peer_teams.start_of(name, transport, ranks, cores)
                self.starts[name] = start.shown()
                self._add(Team(name, start, ranks))
            self.versions = {name: team.version for name, team in self._teams.items()}
            wall = peer_teams.wall_of(transport, ranks, cores, self._stack)
            self._walls = len(wall.processes)
            self._add(Team(WALL, wall, self._walls))
            if transport == "shm" and ranks <= _MOST_FLOOR:
                self._add(Team(FLOOR, peer_teams.floor_of(ranks, self._stack), ranks))
        except BaseException:
            self.close()
            raise

    def _add(self, team: Team) -> None:
        self._teams[team.name] = team
        self._stack.callback(team.close)

    def close(self) -> None:
        """Ends all ranks."""
        self._stack.close()

    def measure_all(self, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """The barrier, and all_reduce of each size."""
        yield self.measure("barrier", 0, options.seconds)
        for nbytes in options.sizes:
            yield self.measure("all_reduce", nbytes, options.seconds)

    def measure(self, op: str, nbytes: int, seconds: float) -> dict[str, Any]:
        """One case, as it stands in the json."""
        teams = self._prepare(op, nbytes)
        least = 2 * (self.ranks - 1) * nbytes
        turn = seconds / len(teams) / _MOST_ROUNDS
        calls = {name: fit(team, turn) for name, team in teams.items()}
        cost = sum(1.5 * team_calls * once for team_calls, once in calls.values())
        rounds = max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(seconds / cost)))
        times: dict[str, list[float]] = {name: [] for name in teams}
        trips: list[list[float]] = []
        for turns in range(rounds * _MOST_REPEATED):
            found, seen = self._round(rotated(list(teams), turns), calls, nbytes, least)
            if not placement.unchanged(seen) and rounds * _MOST_REPEATED - turns > rounds - len(
                trips
            ):
                continue
            trips.append(seen)
            for name, once in found.items():
                times[name].append(once)
            if len(trips) == rounds:
                break
        wall, floor = times.pop(WALL, None), times.pop(FLOOR, None)
        case = {"transport": self.transport, "ranks": self.ranks, "op": op, "bytes": nbytes}
        case |= {"calls": {name: calls[name][0] for name in times}, "seconds": times}
        case["round_trips"] = trips
        if floor is not None:
            case["floor"] = floor
        if wall is not None:
            bytes_, processes = self.wall_bytes(nbytes), self._walls
            case["wall"] = {"bytes": bytes_, "processes": processes, "seconds": wall}
        return case

    def _round(
        self, names: list[str], calls: dict[str, tuple[int, float]], nbytes: int, least: int
    ) -> tuple[dict[str, float], list[float]]:
        """Seconds of everybody's turn; the line's nanoseconds before, between and after."""
        found, seen = dict[str, float](), [placement.round_trip()]
        for name in names:
            before = _over_loopback()
            found[name] = timed(self._teams[name], calls[name][0])
            if self.transport == "tcp" and nbytes >= _SURE and name != WALL:
                _check_sent(name, (_over_loopback() - before) / calls[name][0], least)
            seen.append(placement.round_trip())
        return found, seen

    def wall_bytes(self, nbytes: int) -> int:
        """Of the buffer that a process of the wall copies, or sends and receives."""
        per_rank = nbytes if self.transport == "shm" else 2 * (self.ranks - 1) * nbytes
        per_rank //= 1 if self.transport == "shm" else self.ranks
        return min(max(_LEAST_WALL, per_rank // 4 * 4), _MOST_WALL)

    def _prepare(self, op: str, nbytes: int) -> dict[str, Team]:
        """Those who take part, with their buffers."""
        teams = dict(self._teams)
        if op == "barrier":
            del teams[WALL]
        for name, team in teams.items():
            team.ask(do="prepare", op=op, bytes=self.wall_bytes(nbytes) if name == WALL else nbytes)
        return teams


def rotated(names: list[str], turns: int) -> list[str]:
    """Each is the first in turn."""
    first = turns % len(names)
    return names[first:] + names[:first]


def fit(team: Team, seconds: float) -> tuple[int, float]:
    """How many calls make a turn of so many seconds, and how long one took at last."""
    calls = 1
    while True:
        once = timed(team, calls)
        if calls * once >= seconds / _OF_A_TURN or calls == _MOST_CALLS:
            return max(1, min(_MOST_CALLS, round(seconds / once))), once
        calls = min(_MOST_CALLS, max(2 * calls, math.ceil(seconds / _OF_A_TURN / once)))


def timed(team: Team, calls: int) -> float:
    """Seconds of a call on the slowest rank; RuntimeError where a result was wrong."""
    answers = team.ask(do="turn", calls=calls)
    wrong = sum(each["wrong"] for each in answers)
    if wrong:
        raise RuntimeError(f"{team.name}: {wrong} elements of an all_reduce are wrong")
    return max(float(each["seconds"]) for each in answers)


def _over_loopback() -> int:
    """Bytes so far, of all processes."""
    return int(_LOOPBACK.read_text())


def _check_sent(name: str, sent: float, least: int) -> None:
    if sent < least:
        raise RuntimeError(
            f"{name} sent {sent:,.0f} bytes over loopback in a call which sends {least:,} at "
            "least: it did not use TCP"
        )


def _write(options: argparse.Namespace, found: dict[str, Any]) -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    found["date"] = now.strftime("%Y-%m-%d %H:%M UTC")
    found["command"] = " ".join(["-m bench.libraries.peers", *sys.argv[1:]])
    stem = report.stem_of(options.output, "peers")
    document = peers_report.document(found, stem.name)
    report.save(stem, found, document)
    peers_report.draw(found, report.beside(stem, ".png"))
    return document


if __name__ == "__main__":
    sys.exit(main())
