"""The table and the picture of stragglers.py, from what its json holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.report import Found

REPLICAS = 4
WAYS = ("copies of late portions", "no copies", "one part each")
_DRAWN = "one of four 20× slower"
_SHOWN_BATCHES = 2  # in the picture
_DID_NOT_COUNT: Found = {"facecolor": "#dddddd", "edgecolor": report.NEUTRAL, "hatch": "////"}


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    return report.document(
        "Sandblaster with slow and stopped replicas, in real time",
        report.origin(found),
        f"Seconds of batches over the bound of the sum of the replicas' speeds. {REPLICAS} "
        f"replicas are processes that sleep {found['portion_seconds']:g} s for a portion.",
        summary(found),
        f"![Portions by replica over time]({stem}.png)",
    )


def summary(found: Found) -> list[str]:
    """Ratios to the bound by case and way, and how much was computed for nothing."""
    by_name: dict[str, dict[str, Any]] = {}
    for each in found["cases"]:
        by_name.setdefault(each["name"], {})[each["way"]] = each
    rows = (
        (name, found["portions"], *map(_cell, map(ways.get, WAYS)), f"{wasted(ways[WAYS[0]]):.1%}")
        for name, ways in by_name.items()
    )
    head = f"replicas | portions | {' | '.join(WAYS)} | portions computed twice"
    return report.table(head, rows)


def ratio(case: Mapping[str, Any]) -> float:
    """The seconds of all batches over their bound."""
    return float(sum(case["seconds"]) / case["bound"])


def wasted(case: Mapping[str, Any]) -> float:
    """The share of what was computed that did not count."""
    spans = case["spans"]
    return sum(not counts for *_, counts in spans) / max(1, len(spans))


def line(case: Mapping[str, Any]) -> str:
    """One case, for the terminal."""
    return (
        f"{case['name']}, {case['way']}: {ratio(case):.3f} of the bound, {case['batches']} batches"
    )


def _cell(case: Mapping[str, Any] | None) -> str:
    return "never ends" if case is None else f"{ratio(case):.2f}"


def draw(found: Found, path: Path) -> None:
    """Portions by replica over time, for each way and one that stops."""
    from matplotlib import patches

    drawn = [each for each in found["cases"] if each["name"] == _DRAWN or each["stops"]]
    marks = [
        patches.Patch(facecolor="C0", edgecolor="white", label="a portion of the first batch"),
        patches.Patch(facecolor="C1", edgecolor="white", label="of the second"),
        patches.Patch(**_DID_NOT_COUNT, label="did not count"),
    ]
    with report.picture(path, report.PAGE, 1.8 * len(drawn), len(drawn)) as (figure, panels):
        for panel, case in zip(panels[:, 0], drawn, strict=True):
            _draw_case(panel, case, found["portion_seconds"])
        panels[-1, 0].set_xlabel("seconds")
        figure.legend(handles=marks, loc="outside upper center", ncols=3, fontsize=9.5)


def _draw_case(panel: Any, case: Mapping[str, Any], portion_seconds: float) -> None:
    batches = min(_SHOWN_BATCHES, case["batches"])
    ends = [sum(case["seconds"][: i + 1]) for i in range(batches)]
    for number, batch, began, ended, counts in case["spans"]:
        if batch >= batches:
            continue
        style = {"facecolor": f"C{batch}", "edgecolor": "white"} if counts else _DID_NOT_COUNT
        panel.barh(number, ended - began, left=began, height=0.8, linewidth=0.5, **style)
    if case["stops"]:
        half = case["portions"] / REPLICAS / 2 * portion_seconds
        panel.plot(half, REPLICAS - 1, "x", color="black", markersize=9)
        panel.annotate("  stopped", (1.06 * half, REPLICAS - 1), va="center", fontsize=9)
    for end in ends:
        panel.axvline(end, color="black", linewidth=0.8)
    panel.set(yticks=range(REPLICAS), xlim=(0, 1.03 * ends[-1]))
    panel.invert_yaxis()
    panel.set_ylabel("replica")
    panel.set_title(f"{case['name']}, {case['way']}: {ratio(case):.2f} of the bound", fontsize=10)
