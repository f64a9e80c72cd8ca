"""How near gradwire's rdma comes to the device, beside perftest's programs and gradwire's tcp.

    make test-cpp && python -m bench.network.rdma  # in a virtual machine with Soft-RoCE
    python -m bench.network.rdma --machines 2      # between two
    python -m bench.network.rdma --here mlx5_0     # on a device of this machine, which has perftest

Messages of 1, 4 and 16 MiB in one direction, cut into frames of gradwire's usual size, from user
memory through staging into user memory, beside ib_write_bw, which copies nothing; and 8 bytes there
and back, beside ib_write_lat, whose receiver watches the memory, and ib_send_lat, whose receiver
waits for a completion, as gradwire's does. Programs take turns; ratios are of turns of one round.
Writes bench/results/rdma-DATE.json and .md. Under emulation only the ratios mean something.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.machine import OtherLoad
from bench.common.report import ROOT
from bench.network import rdma_turns

RDMA, TCP = rdma_turns.GRADWIRE
OF_BANDWIDTH, OF_LATENCY = 0.85, 1.5  # the goals, of ib_write_bw's and of ib_write_lat's
_SECONDS = 1500
_NOTE = (
    "ib_write_bw copies nothing and its receiver sleeps; gradwire's processes copy into staging "
    "and out of it, and poll without rest where there are two processors. tcp between two "
    "processes of one machine goes over its loopback, and not over the device."
)

Found = Mapping[str, Any]


def main() -> int:
    """Measures, writes, and prints what it found."""
    options = _parse()
    if not rdma_turns.BENCH.exists():
        print(f"rdma: no {rdma_turns.BENCH}: `make test-cpp` builds it", file=sys.stderr)
        return 1
    load = OtherLoad()
    lines = _run(options)
    if not lines:
        return 1
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": load.describe(),
        "device": options.here or _virtual(options.machines),
        "command": " ".join(["-m bench.network.rdma", *sys.argv[1:]]),
        "rounds": options.rounds,
        "cases": cases_of(lines),
    }
    suffix = "-machines" if options.machines == 2 else ""
    report.write(options.output, f"rdma{suffix}", found, document)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--here", metavar="DEVICE", help="a device of this machine, and no virtual one")
    add("--machines", type=int, choices=(1, 2), default=1, help="virtual ones")
    add("--rounds", type=int, default=7)
    add("--output", type=Path, help="a path without suffix")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every turn's line; none where it failed, which has been said."""
    turns = [sys.executable, "-m", "bench.network.rdma_turns"]
    turns += [options.here or "rxe0", str(options.rounds)]
    vm = ["tests/rdma/vm", "-n", str(options.machines), "-t", str(_SECONDS), "--"]
    command = turns if options.here else [*vm, *turns]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if ended.returncode != 0:
        return []
    return [json.loads(line[line.index("{") :]) for line in ended.stdout.splitlines()]


def _virtual(machines: int) -> str:
    """What the figures are of."""
    if machines == 2:
        return "Soft-RoCE (rdma_rxe) of two virtual machines, one emulated processor each"
    return "Soft-RoCE (rdma_rxe) of a virtual machine with two emulated processors"


def cases_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of each program, by round."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for each in lines:
        key = each["what"], each["nbytes"]
        case = found.setdefault(key, {"what": key[0], "nbytes": key[1], "numbers": {}})
        case["numbers"].setdefault(each["program"], []).append(each["number"])
    return list(found.values())


def ratio(case: Found, program: str, other: str) -> float:
    """The median over rounds, of numbers of the same round."""
    pairs = zip(case["numbers"][program], case["numbers"][other], strict=True)
    return statistics.median(one / two for one, two in pairs)


def document(found: Found, _: str) -> str:
    """The md file."""
    return report.document(
        "RDMA: gradwire beside perftest",
        f"{found['date']}; {found['device']}, on {found['machine']}; {found['rounds']} rounds, "
        f"programs in turns, medians. `python {found['command']}`.",
        report.table(
            " | gradwire rdma | perftest | gradwire tcp | rdma / perftest | goal | reached",
            (row for case in found["cases"] for row in _rows(case)),
            "lrrrrll",
        ),
        _NOTE,
    )


def _rows(case: Found) -> Iterator[str]:
    bandwidth = case["what"] == "bandwidth"
    title = (
        f"MiB/s, {report.size(case['nbytes'])}" if bandwidth else f"µs one way, {case['nbytes']} B"
    )
    for index, program in enumerate(rdma_turns.PERFTEST[case["what"]]):
        measured = ratio(case, RDMA, program)
        goal = reached = "–"
        if index == 0:
            limit = OF_BANDWIDTH if bandwidth else OF_LATENCY
            goal = f"{'≥' if bandwidth else '≤'} {limit:.2f}"
            reached = report.yes(measured >= limit if bandwidth else measured <= limit)
        numbers = [_median(case, RDMA), f"{_median(case, program)} {program}", _median(case, TCP)]
        yield f"{title} | {' | '.join(numbers)} | {measured:.2f} | {goal} | {reached}"


def _median(case: Found, program: str) -> str:
    return f"{statistics.median(case['numbers'][program]):.1f}"


if __name__ == "__main__":
    sys.exit(main())
