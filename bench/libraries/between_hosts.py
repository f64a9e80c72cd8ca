"""all_reduce of gradwire beside gloo and MPICH between two network namespaces, in turns.

    sudo .venv/bin/python -m bench.libraries.between_hosts     # 10 minutes; --quick: 3

The namespaces are joined by a veth pair that nothing holds back, so the figures are those of TCP
and of the libraries. Each congestion control is measured on a quiet machine, and beside loops that
keep its cores busy. Libraries, turns and checks are those of peers.py.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.machine import OtherLoad
from bench.libraries import between_hosts_report, peer_teams
from bench.libraries.between_hosts_report import SEALED
from bench.libraries.peer_teams import GLOO, GRADWIRE, MPICH_OFI, Start, Team
from bench.libraries.peers import fit, rotated, timed
from tests.python.support import namespaces

LIBRARIES = (GRADWIRE, SEALED, GLOO, MPICH_OFI)
SIZES = (4, 1 << 12, 1 << 16, 1 << 20, 1 << 24)  # bytes
ADDRESSES = "10.78.0.1", "10.78.0.2"
PORTS = {GRADWIRE: 29500, SEALED: 29501, GLOO: 29502}  # free: the namespaces are ours
_TURN_SECONDS = 0.3


@contextlib.contextmanager
def two_hosts(congestion_control: str) -> Iterator[list[namespaces.Namespace]]:
    """Two namespaces with eth0 at ADDRESSES."""
    with contextlib.ExitStack() as stack:
        hosts = [namespaces.Namespace() for _ in ADDRESSES]
        for host in hosts:
            stack.callback(host.close)
        peer = f"peer name eth0 netns {hosts[1].path}"
        hosts[0].ip(f"link add eth0 type veth {peer}")
        for host, address in zip(hosts, ADDRESSES, strict=True):
            host.ip("link set eth0 up", f"addr add {address}/24 dev eth0")
            route = f"10.78.0.0/24 dev eth0 src {address} congctl {congestion_control}"
            host.ip(f"route replace {route}")
        yield hosts


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Meanwhile so many processes compute."""
    loop = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(loops):
            process = stack.enter_context(subprocess.Popen(loop))
            stack.callback(process.kill)
        yield


def start_of(library: str, hosts: Sequence[namespaces.Namespace], folder: str) -> Start:
    """A rank on each host."""
    inside = [["nsenter", f"--net={host.path}"] for host in hosts]
    if library == MPICH_OFI:
        return _mpich(inside, Path(folder, "start"))
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORTS[library])}
    settings |= {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_SOCKET_IFNAME": "eth0"}
    settings["GRADWIRE_STORE"] = f"tcp://{ADDRESSES[0]}:{PORTS[library]}"
    settings["GRADWIRE_SECRET"] = "0123456789abcdef"
    settings["GRADWIRE_ENCRYPTION"] = "on" if library == SEALED else "off"
    name = GRADWIRE if library == SEALED else library
    rank = [sys.executable, "-m", "bench.libraries.peer_rank", f"{name}:tcp"]
    return Start(
        [[*words, "env", f"RANK={at}", *rank] for at, words in enumerate(inside)], settings
    )


def _mpich(inside: Sequence[Sequence[str]], script: Path) -> Start:
    """By a script in place of ssh, to which mpiexec gives an address and a command."""
    places = (
        f'{address}) exec {" ".join(words)} sh -c "$*";;'
        for address, words in zip(ADDRESSES, inside, strict=True)
    )
    find = '[ "$1" = -x ] && shift; at=$1; shift'
    script.write_text("\n".join(["#!/bin/sh", find, "case $at in", *places, "esac", ""]))
    script.chmod(0o700)
    place = peer_teams.ENVIRONMENTS / "mpich" / "bin"
    command = [*inside[0], str(place / "mpiexec"), "-launcher", "ssh"]
    command += ["-launcher-exec", str(script), "-hosts", ",".join(ADDRESSES), "-iface", "eth0"]
    command += ["-bind-to", "none", "-ppn", "1", "-n", "2", str(place / "python")]
    settings = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
    return Start([[*command, "-m", "bench.libraries.peer_rank", "mpi:"]], settings)


def measure(options: argparse.Namespace, congestion_control: str) -> Iterator[dict[str, Any]]:
    """The seconds of a call on its slowest rank, by turn, of every library, size and load."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts(congestion_control))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        teams = {}
        for name in options.libraries:
            teams[name] = Team(name, start_of(name, hosts, folder), len(hosts))
            stack.callback(teams[name].close)
        for loops in options.busy:
            with busy(loops):
                for nbytes in options.sizes:
                    seconds = _case(teams, nbytes, options.rounds)
                    yield {
                        "congestion_control": congestion_control,
                        "busy": loops,
                        "bytes": nbytes,
                        "seconds": seconds,
                        "versions": {name: team.version for name, team in teams.items()},
                    }


def _case(teams: dict[str, Team], nbytes: int, rounds: int) -> dict[str, list[float]]:
    calls, found = {}, {name: list[float]() for name in teams}
    for name, team in teams.items():
        team.ask(do="prepare", op="all_reduce", bytes=nbytes)
        calls[name], _ = fit(team, _TURN_SECONDS)
    for number in range(rounds):
        for name in rotated(list(teams), number):
            found[name].append(timed(teams[name], calls[name]))
    return found


def main() -> int:
    """Measures, and writes bench/results/between-hosts-DATE.json and .md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--congestion", nargs="+", default=("cubic", "bbr"))
    parser.add_argument("--busy", type=int, nargs="+", default=(0, 4), help="loops beside them")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    peer_teams.install(options.libraries)
    load, cases = OtherLoad(), []
    for congestion_control in options.congestion:
        for case in measure(options, congestion_control):
            cases.append(case)
            print(between_hosts_report.one_line(case), file=sys.stderr, flush=True)
    found = {**report.stamp("bench.libraries.between_hosts", load), "cases": cases}
    report.write(options.output, "between-hosts", found, between_hosts_report.document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
