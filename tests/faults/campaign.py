"""`python -m tests.faults`: runs many random cases, some at a time, and says what went wrong."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults.cases import KINDS, make_case
from tests.faults.judge import bit, latency, problems
from tests.faults.options import add_choice, campaign_parser, numbers_of
from tests.faults.report import Result, report
from tests.faults.supervisor import run_case

_MOST_SHOWN = 3  # problems of one case; --only shows all


def main() -> int:
    """Runs the command; returns 0 when nothing went wrong."""
    options = _options()
    print(f"seed {options.seed}: {options.count} cases, {options.jobs} at a time", flush=True)
    began = time.monotonic()
    numbers = numbers_of(options)
    results = _results(options, numbers)
    if options.only is None:
        _publish(options, results, time.monotonic() - began)
    return int(any(each.problems for each in results))


def _publish(options: argparse.Namespace, results: list[Result], seconds: float) -> None:
    command = f"python -m tests.faults --count {options.count} --seed {options.seed}"
    command += f" --kind {options.kind}" if options.kind else ""
    text = report(command, options.jobs, results, seconds)
    print(text)
    if options.report:
        Path(options.report).write_text(text + "\n")


def _options() -> argparse.Namespace:
    parser = campaign_parser("tests.faults", __doc__, count=200)
    add_choice(parser, jobs=3 * (os.cpu_count() or 1))
    parser.add_argument("--kind", choices=KINDS, help="this kind of fault in every case")
    parser.add_argument("--report", metavar="FILE", help="where to write the table, too")
    return parser.parse_args()


def _results(options: argparse.Namespace, numbers: Iterable[int]) -> list[Result]:
    results = []
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.jobs, fork) as pool:
        for result in pool.map(partial(_judged, options.seed, options.kind), numbers):
            results.append(result)
            if result.problems or options.only is not None:
                _show(options, result)
    return results


def _judged(seed: int, kind: str | None, number: int) -> Result:
    case = make_case(seed, number, kind)
    finished = run_case(case)
    return Result(
        case,
        problems(case, finished),
        bit(finished),
        latency(case, finished),
        [str(each) for _, each in sorted(finished.outcomes.items())],
    )


def _show(options: argparse.Namespace, result: Result) -> None:
    case = result.case
    again = f"--seed {case.seed} --only {case.number}"
    again += f" --kind {options.kind}" if options.kind else ""
    print(f"\ncase {case.number} ({case.transport}, {case.ranks} ranks): {case.fault}")
    print(f"  again: python -m tests.faults {again}")
    if options.only is not None:
        for index, call in enumerate(case.calls):
            print(f"  call {index}: {call}")
        for line in result.outcomes:
            print(f"  {line}")
    for line in result.problems[: _MOST_SHOWN if options.only is None else None]:
        print(f"  PROBLEM {line}", flush=True)
