"""The report of a campaign, as Markdown."""

from __future__ import annotations

import collections
import os
import platform
from dataclasses import dataclass

from tests.faults.cases import KINDS, TRANSPORTS, Case


@dataclass(frozen=True)
class Result:
    """One case, and what must not be of it."""

    case: Case
    problems: list[str]
    bit: bool  # whether the fault did anything to anyone
    latency: float | None  # seconds until the last rank knew
    outcomes: list[str]  # a line for each rank


def report(command: str, jobs: int, results: list[Result], seconds: float) -> str:
    """The command, then a row for each kind of fault."""
    failed = [each for each in results if each.problems]
    went_on = sum(each.case.goes_on and not each.problems for each in results)
    lines = [
        f"`{command}`, {jobs} cases at a time: {seconds:.0f} s on {os.cpu_count()} cores, "
        f"Python {platform.python_version()}.",
        "",
        f"{len(results)} cases, {len(failed)} with problems; in {went_on} the survivors shrank and "
        "went on.",
        "",
        f"| fault | {' | '.join(TRANSPORTS)} | noticed | slowest to know | problems |",
        f"|---|{'---|' * (len(TRANSPORTS) + 3)}",
        *filter(None, (_row(kind, results) for kind in KINDS)),
    ]
    if failed:
        lines += ["", *(f"- case {each.case.number}: {each.problems[0]}" for each in failed)]
    return "\n".join(lines)


def _row(kind: str, results: list[Result]) -> str:
    mine = [each for each in results if each.case.fault.kind == kind]
    by_link = collections.Counter(each.case.transport for each in mine)
    slowest = max((each.latency for each in mine if each.latency is not None), default=None)
    cells = [
        kind,
        *(str(by_link[name] or "") for name in TRANSPORTS),
        str(sum(each.bit for each in mine)),
        "" if slowest is None else f"{slowest:.2f} s",
        str(sum(bool(each.problems) for each in mine)),
    ]
    return f"| {' | '.join(cells)} |" if mine else ""
