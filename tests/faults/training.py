"""`python -m tests.faults.training`: faults in training over the backend of torch.distributed.

Four ranks train on one group or on a 2-D mesh; see `torch_cases`.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from torch_cases import Case, make_case, outcomes, problems

from tests.faults.options import add_choice, campaign_parser, numbers_of


class _Result(NamedTuple):
    case: Case
    problems: list[str]
    seconds: float  # until the last rank knew


def _judged(case: Case) -> _Result:
    try:
        found = outcomes(case)
    except AssertionError as error:  # a rank died or hung
        return _Result(case, [str(error)], 0.0)
    known = [each.seconds for each in found if each is not None]
    return _Result(case, problems(case, found), max(known, default=0.0))


def main() -> int:
    """Runs the command; returns 0 when nothing went wrong."""
    parser = campaign_parser("tests.faults.training", __doc__, count=100)
    add_choice(parser, jobs=2)
    options = parser.parse_args()
    numbers = numbers_of(options)
    print(f"seed {options.seed}: {len(numbers)} cases, {options.jobs} at a time", flush=True)
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        cases = [make_case(options.seed, number) for number in numbers]
        results = []
        for number, result in zip(numbers, pool.map(_judged, cases), strict=True):
            results.append(result)
            for line in result.problems:
                print(f"case {number}, {result.case}: {line}", flush=True)
    _print_table(results)
    bad = sum(bool(each.problems) for each in results)
    print(f"{len(results)} cases in {time.monotonic() - began:.0f} s, {bad} with problems")
    return int(bad > 0)


def _print_table(results: list[_Result]) -> None:
    by_kind: dict[str, list[_Result]] = defaultdict(list)
    for each in results:
        by_kind[each.case.fault.__name__].append(each)
    print("| fault | cases | problems | median s | longest s |\n|---|---|---|---|---|")
    for kind, those in sorted(by_kind.items()):
        times = sorted(each.seconds for each in those)
        bad = sum(bool(each.problems) for each in those)
        print(f"| {kind} | {len(those)} | {bad} | {times[len(times) // 2]:.2f} | {times[-1]:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
