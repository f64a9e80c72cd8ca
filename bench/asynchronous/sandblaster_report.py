"""The tables of sandblaster.py, from what its json holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]


def document(found: Found) -> str:
    """The md file."""
    lines = [
        "# Sandblaster L-BFGS beside SGD, Adam and L-BFGS in one process",
        "",
        f"{found['date']}; {found['machine']}; `python {found['command']}`.",
        "",
        "A pass is one gradient of all samples; L-BFGS counts all evaluations of its line search. "
        "SGD and Adam have the best of four rates; SGD's falls to zero, by the last pass.",
        "",
        *summary(found),
        "",
        "Virtual time, five batches: seconds over the bound of the sum of the replicas' speeds.",
        "",
        *stragglers(found),
    ]
    return "\n".join(lines) + "\n"


def summary(found: Found) -> Iterator[str]:
    """The loss of each way after some passes."""
    for problem in found["problems"]:
        curves = problem["curves"]
        last = max(done for curve in curves.values() for done, _ in curve)
        at = [max(1, round(last * share)) for share in (0.1, 0.25, 0.5, 1)]
        passes = " | ".join(f"{each} passes" for each in at)
        yield f"| {problem['name']}, {problem['samples']:,} samples | {passes} |"
        yield "|---|" + "---:|" * len(at)
        for name, curve in curves.items():
            yield f"| {name} | {' | '.join(_loss(curve, each) for each in at)} |"
        yield ""


def stragglers(found: Found) -> Iterator[str]:
    """What slow and stopped replicas cost."""
    yield "| replicas | portions | copies of late portions | no copies | one part each |"
    yield "|---|---:|---:|---:|---:|"
    for each in found["stragglers"]:
        cells = " | ".join(_ratio(each[way]) for way in ("backups", "none", "equal"))
        yield f"| {each['case']} | {each['portions']} | {cells} |"


def _loss(curve: Sequence[Sequence[float]], passes: int) -> str:
    """The loss when so many passes were over."""
    known = [loss for done, loss in curve if done <= passes]
    return f"{known[-1]:.6g}" if known else "–"


def _ratio(value: float | None) -> str:
    return "never ends" if value is None else f"{value:.2f}"
