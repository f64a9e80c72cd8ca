"""The tables of sandblaster.py, from what its json holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.common import report
from bench.common.report import Found


def document(found: Found, _: str) -> str:
    """The md file."""
    return report.document(
        "Sandblaster L-BFGS beside SGD, Adam and L-BFGS in one process",
        report.origin(found),
        "A pass is one gradient of all samples; L-BFGS counts all evaluations of its line search. "
        "SGD and Adam have the best of four rates; SGD's falls to zero, by the last pass.",
        summary(found),
        "Virtual time, five batches: seconds over the bound of the sum of the replicas' speeds.",
        stragglers(found),
    )


def summary(found: Found) -> list[str]:
    """The loss of each way after some passes, a table a problem."""
    lines: list[str] = []
    for problem in found["problems"]:
        curves = problem["curves"]
        last = max(done for curve in curves.values() for done, _ in curve)
        at = [max(1, round(last * share)) for share in (0.1, 0.25, 0.5, 1)]
        passes = " | ".join(f"{each} passes" for each in at)
        rows = ([name, *(_loss(curve, each) for each in at)] for name, curve in curves.items())
        head = f"{problem['name']}, {problem['samples']:,} samples | {passes}"
        lines += ["", *report.table(head, rows)]
    return lines[1:]


def stragglers(found: Found) -> list[str]:
    """What slow and stopped replicas cost."""

    def row(each: Found) -> Iterator[str | int]:
        yield from (each["case"], each["portions"])
        for way in ("backups", "none", "equal"):
            yield "never ends" if each[way] is None else f"{each[way]:.2f}"

    head = "replicas | portions | copies of late portions | no copies | one part each"
    return report.table(head, map(row, found["stragglers"]))


def _loss(curve: Sequence[Sequence[float]], passes: int) -> str | None:
    """The loss when so many passes were over."""
    known = [loss for done, loss in curve if done <= passes]
    return f"{known[-1]:.6g}" if known else None
