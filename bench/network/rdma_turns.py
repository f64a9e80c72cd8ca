"""gradwire's transports and perftest's programs, in turns over one RDMA device, for rdma.py.

    python -m bench.network.rdma_turns DEVICE ROUNDS

prints a line of JSON for each turn: what was measured, of which program, and its number. Between
two virtual machines (RDMA_VM_SIZE is 2) both run it, and the second one prints. Imports nothing
that takes long under emulation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from bench.common.report import ROOT

BENCH = ROOT / "build" / "release" / "bench_rdma"
MACHINES = int(os.environ.get("RDMA_VM_SIZE", "1"))
RANK = int(os.environ.get("RDMA_VM_RANK", "0"))
GRADWIRE = ("rdma", "tcp")
PERFTEST = {"bandwidth": ("ib_write_bw",), "latency": ("ib_write_lat", "ib_send_lat")}
PATIENCE = 60.0  # seconds
PORT = "18601"
_COLUMN = {"ib_write_bw": 3, "ib_write_lat": 4, "ib_send_lat": 4}  # the average, and the medians


class Case(NamedTuple):
    """What is measured."""

    what: str  # bandwidth or latency
    nbytes: int
    count: int  # messages of a turn

    @property
    def programs(self) -> tuple[str, ...]:
        """That take turns."""
        first, *others = GRADWIRE
        return (first, *PERFTEST[self.what], *others)


_FEWEST = 5  # messages that perftest sends
_VOLUME = (128 << 20) // MACHINES**2  # bytes of a turn; between machines all is slower
CASES = [
    *(
        Case("bandwidth", size, max(_VOLUME // size, _FEWEST))
        for size in (1 << 20, 4 << 20, 16 << 20)
    ),
    Case("latency", 8, 1000 // MACHINES),
]


def main() -> None:
    device, rounds = sys.argv[1], int(sys.argv[2])
    for turn in range(rounds):
        for case in CASES:
            first = turn % len(case.programs)
            for program in case.programs[first:] + case.programs[:first]:
                number = run(program, case, device)
                if number is not None:
                    line = {"what": case.what, "nbytes": case.nbytes, "program": program}
                    print(json.dumps({**line, "number": number}), flush=True)


def run(program: str, case: Case, device: str) -> float | None:
    """Of MiB/s or microseconds; None on the machine that only listens."""
    commands = _gradwire if program in GRADWIRE else _perftest
    server, client = commands(program, case, device)
    if MACHINES == 2 and RANK == 0:
        subprocess.run(server, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
        return None
    if MACHINES == 2 or program in GRADWIRE:
        said = _ask(client)
    else:
        with subprocess.Popen(server, stdout=subprocess.DEVNULL) as listening:
            said = _ask(client)
            listening.wait(PATIENCE)
    return number_in(said, program, case.nbytes)


def _gradwire(program: str, case: Case, device: str) -> tuple[list[str], list[str]]:
    words = [str(BENCH), case.what, program, device, str(case.nbytes), str(case.count)]
    if MACHINES == 1:
        return [], words
    return [*words, "listen", PORT], [*words, "connect", os.environ["RDMA_VM_ADDR0"], PORT]


def _perftest(program: str, case: Case, device: str) -> tuple[list[str], list[str]]:
    """The queue pair's timeout is gradwire's; -F: whatever the processor's frequency."""
    words = [program, "-d", device, "-F", "-u", "18", "-p", PORT]
    words += ["-s", str(case.nbytes), "-n", str(case.count)]
    if device.startswith("rxe"):
        words += ["-x", "1"]  # the GID with the IPv4 address
    where = os.environ["RDMA_VM_ADDR0"] if MACHINES == 2 else "127.0.0.1"
    return words, [*words, where]


def _ask(client: Sequence[str]) -> str:
    """What it prints; perftest's fail at once while nobody listens yet."""
    deadline = time.monotonic() + PATIENCE
    while True:
        ended = subprocess.run(client, capture_output=True, text=True, timeout=PATIENCE)
        if ended.returncode == 0:
            return ended.stdout
        if time.monotonic() > deadline or "Couldn't connect" not in ended.stderr:
            sys.exit(f"{' '.join(client)}: {ended.stdout}{ended.stderr}")
        time.sleep(0.1)


def number_in(said: str, program: str, nbytes: int) -> float:
    """bench_rdma's only one; a column of the line of perftest's that begins with the bytes."""
    if program in GRADWIRE:
        return float(said)
    for line in said.splitlines():
        words = line.split()
        if words[:1] == [str(nbytes)]:
            return float(words[_COLUMN[program]])
    raise ValueError(f"{program} printed no line of {nbytes} bytes:\n{said}")


if __name__ == "__main__":
    main()
