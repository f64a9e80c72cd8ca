"""`gradwire simulate`: all_reduces of any number of ranks, slow ranks, failures of long runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire._base import units
from gradwire._base.tables import table
from gradwire._errors import InvalidArgument
from gradwire._schedules.schedule import Schedule
from gradwire.lab.commands import plots
from gradwire.lab.commands.progress import LateBar
from gradwire.lab.simulation import runs
from gradwire.lab.simulation.checkpoints import Failures
from gradwire.lab.simulation.exchange import EVENTS
from gradwire.lab.simulation.runs import Run, Step
from gradwire.lab.simulation.topology import Topology, parse

_TOPOLOGY = "1 per host, 10gbit"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `run`."""
    add = parser.add_argument
    add("--algorithm", nargs="+", default=["ring"], help="names, files in the text form, or all")
    add("-n", "--ranks", type=int, nargs="+", required=True, help="one number, or several")
    add("--bytes", nargs="+", default=["100M"], metavar="SIZE", help="as 64K, 1G; default: 100M")
    add("--topology", default=_TOPOLOGY, metavar="TEXT", help=f"levels; default: '{_TOPOLOGY}'")
    add("--codec", default="none", help="default: none")
    add("--slow", type=float, default=1.0, metavar="TIMES", help="how much slower rank 0 is")
    add("--compute", metavar="TIME", help="of a step, at the median rank, as 120ms")
    add(
        "--spread", type=float, default=0.0, help="standard deviation of the logarithm of --compute"
    )
    add("--failures", metavar="TIME", help="mean time between failures of one host, as 4y")
    add("--checkpoint", metavar="TIME", help="that a checkpoint takes, as 30s")
    add("--interval", metavar="TIME", help="between checkpoints, as 30m; default: the best")
    add("--restart", default=None, metavar="TIME", help="from a failure to going on, as 5m")
    add("--plot", metavar="FILE.png", help="seconds over ranks or bytes, or the fastest of both")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Prints what was simulated; returns the exit code. Raises InvalidArgument."""
    if options.plot is not None:
        plots.require()
    topology = parse(options.topology)
    found = runs.simulate(
        [_algorithm(each) for each in options.algorithm],
        options.ranks,
        [units.size(each) for each in options.bytes],
        topology,
        codec=options.codec,
        slow=options.slow,
        progress=LateBar(),
    )
    steps = _steps(found, options)
    failures = _failures(options, topology)
    interval = None if options.interval is None else units.duration(options.interval)
    if options.json:
        print(json.dumps(_plain(found, steps, failures, interval, topology), indent=2))
    else:
        print(_text(found, steps, failures, interval, topology))
    if options.plot is not None:
        plots.simulation(found, Path(options.plot))
    return 0


def _algorithm(name: str) -> str | Schedule:
    if os.path.isfile(name):
        return Schedule.parse(Path(name).read_text(encoding="utf-8"))
    return name


def _steps(found: Sequence[Run], options: argparse.Namespace) -> list[Step]:
    if options.compute is None:
        if options.spread:
            raise InvalidArgument("--spread is of --compute: give both")
        return []
    compute = units.duration(options.compute)
    return [
        runs.step(
            compute,
            each.ranks,
            each.seconds,
            slow=options.slow,
            spread=options.spread,
        )
        for each in found
    ]


def _failures(options: argparse.Namespace, topology: Topology) -> list[Failures]:
    given = options.failures, options.checkpoint
    if given == (None, None) and (options.restart, options.interval) == (None, None):
        return []
    if None in given:
        raise InvalidArgument("--failures and --checkpoint are given together: 4y and 30s")
    restart = 0.0 if options.restart is None else units.duration(options.restart)
    between, checkpoint = map(units.duration, given)
    return [
        Failures(between, -(-ranks // topology.per_host), checkpoint, restart)
        for ranks in dict.fromkeys(options.ranks)
    ]


def _plain(
    found: Sequence[Run],
    steps: Sequence[Step],
    failures: Sequence[Failures],
    interval: float | None,
    topology: Topology,
) -> dict[str, Any]:
    return {
        "topology": str(topology),
        "runs": [each.to_dict() for each in found],
        "steps": [{**vars(each), "seconds": each.seconds} for each in steps],
        "failures": [
            {
                **vars(each),
                "young_interval": each.young,
                "daly_interval": each.daly,
                "interval": interval or each.daly,
                "lost": each.lost(interval or each.daly),
            }
            for each in failures
        ],
    }


def _text(
    found: Sequence[Run],
    steps: Sequence[Step],
    failures: Sequence[Failures],
    interval: float | None,
    topology: Topology,
) -> str:
    lines = [f"all_reduce on {topology}", "", _runs_table(found, steps)]
    if len({each.algorithm for each in found}) > 1:
        best = runs.fastest(found)
        lines += ["", "the fastest:"]
        lines += [
            f"{ranks:,} ranks, {units.show_bytes(size)}: {each.algorithm}, "
            f"{units.show_seconds(each.seconds)}"
            for (ranks, size), each in best.items()
            if ranks > 1
        ]
    return "\n".join([*lines, *(_failure_text(each, interval) for each in failures)])


def _runs_table(found: Sequence[Run], steps: Sequence[Step]) -> str:
    head = ["algorithm", "ranks", "bytes", "time", "GB/s", "found by"]
    rows = [head + (["slowest rank", "step", "efficiency"] if steps else [])]
    for index, each in enumerate(found):
        row = [
            each.algorithm,
            f"{each.ranks:,}",
            units.show_bytes(each.nbytes),
            units.show_seconds(each.seconds),
            f"{each.nbytes / each.seconds / 1e9:.3g}" if each.ranks > 1 else "–",
            "events" if each.found_by == EVENTS else each.found_by,
        ]
        if steps:
            step = steps[index]
            row += [
                units.show_seconds(step.slowest),
                units.show_seconds(step.seconds),
                f"{step.efficiency:.0%}",
            ]
        rows.append(row)
    return table(rows)


def _failure_text(each: Failures, interval: float | None) -> str:
    own = ""
    if interval is not None:
        own = f"; one every {units.show_seconds(interval)} loses {each.lost(interval):.1%}"
    return (
        f"\n{each.hosts:,} hosts: a failure every {units.show_seconds(each.mean)}; a checkpoint "
        f"every {units.show_seconds(each.daly)} (Daly; Young: {units.show_seconds(each.young)}) "
        f"loses the least: {each.lost(each.daly):.1%} of the time{own}"
    )
