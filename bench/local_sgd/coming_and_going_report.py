"""The report of coming_and_going.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.common import report
from bench.common.report import Found

GOODPUT, DELAY = 0.88, 2.0  # the goals: share of the steps, and inner steps


def document(found: Found) -> str:
    """The md file."""
    return report.document(
        "DiLoCo among ranks that come and go",
        f"{report.origin(found)} {found['ranks']} ranks, {found['steps']:,} inner steps of "
        f"{1e3 * found['step_seconds']:.0f} ms a rank, a round of {found['every']} of them, grace "
        f"{1e3 * found['grace']:.0f} ms; an event every {found['between']:g} s: a rank is killed "
        "and started again at once, or stopped for one to three seconds.",
        summary(found),
    )


def summary(found: Found) -> list[str]:
    """Undisturbed and disturbed trainings, means over seeds, and the goals."""
    head = (
        "| seconds | kills and restarts, stops | test loss | test accuracy, % | rounds | "
        "pushes | mean staleness"
    )
    goals = report.table("goal | measured | reached", _goals(found), "lrl")
    return [*report.table(head, _rows(found)), "", *goals]


def goodputs(found: Found) -> list[float]:
    """The inner steps a second beside the undisturbed ones, by seed."""
    plain, disturbed = _runs(found, False), _runs(found, True)
    return [a["seconds"] / b["seconds"] for a, b in zip(plain, disturbed, strict=True)]


def delays(found: Found) -> list[float]:
    """By how many inner steps the longest of another rank's was late, for each stop."""
    step = found["step_seconds"]
    return [each / step - 1 for run in _runs(found, True) for each in run["stops"]]


def _runs(found: Found, disturbed: bool) -> list[Found]:
    return [run for run in found["runs"] if run["disturbed"] is disturbed]


def _rows(found: Found) -> Iterator[str]:
    for name, disturbed in (("undisturbed", False), ("disturbed", True)):
        runs = _runs(found, disturbed)

        def of(key: str, digits: int, scale: float = 1.0, runs: list[Found] = runs) -> str:
            return report.spread([scale * run[key] for run in runs], digits)

        events = (
            f"{sum(run['kills'] for run in runs)}, {sum(len(run['stops']) for run in runs)}"
            if disturbed
            else "–"
        )
        yield (
            f"{name} | {of('seconds', 1)} | {events} | {of('loss', 4)} | "
            f"{of('accuracy', 2, 100)} | {of('rounds', 0)} | {of('pushes', 0)} | "
            f"{of('mean_staleness', 2)}"
        )


def _goals(found: Found) -> Iterator[str]:
    goodput = statistics.fmean(goodputs(found))
    yield (
        f"inner steps a second of the undisturbed ones, at least {GOODPUT:.0%} | {goodput:.1%} | "
        f"{report.yes(goodput >= GOODPUT)}"
    )
    late = max(delays(found), default=0.0)
    yield (
        f"inner steps by which a stopped rank delays the others, at most {DELAY:g} | {late:.2f} | "
        f"{report.yes(late <= DELAY)}"
    )
    plain, disturbed = ([run["loss"] for run in _runs(found, each)] for each in (False, True))
    more = statistics.fmean(disturbed) - statistics.fmean(plain)
    noise = max(statistics.stdev(plain), statistics.stdev(disturbed)) if len(plain) > 1 else 0.0
    yield (
        f"loss more than undisturbed, at most the spread of seeds ({noise:.4f}) | {more:+.4f} | "
        f"{report.yes(more <= noise)}"
    )
