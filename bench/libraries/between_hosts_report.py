"""The page and the table of what between_hosts.py has measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.common import report
from bench.common.report import median_ratio, size
from bench.libraries.peer_teams import GRADWIRE, TITLES

Case = Mapping[str, Any]
SEALED = "sealed"
_TITLES = {**TITLES, SEALED: "gradwire, encrypted"}


def document(found: Mapping[str, Any], stem: str) -> str:
    """The page of the results."""
    return report.document(
        "all_reduce between two hosts",
        f"{report.origin(found)} {stem}.json. Microseconds of a call on the slower of two ranks in "
        "network namespaces, joined by a veth pair: median of the turns (middle half).",
        table(found),
    )


def table(found: Mapping[str, Any]) -> list[str]:
    """The median times, by congestion control, load and size."""
    names = list(found["cases"][0]["seconds"])
    rows = [
        [
            case["congestion_control"] + f", {case['busy']} busy loops" * bool(case["busy"]),
            size(case["bytes"]),
            *(_shown(case["seconds"][name]) for name in names),
            f"{to_best(case):.2f}×",
        ]
        for case in found["cases"]
    ]
    head = ["TCP", "bytes", *(_TITLES[name] for name in names), "against the best other"]
    return report.table(" | ".join(head), rows, "ll")


def to_best(case: Case) -> float:
    """How many times faster gradwire was than the fastest other, in turns of the same round."""
    others = [name for name in case["seconds"] if name not in (GRADWIRE, SEALED)]
    best = min(others, key=lambda name: statistics.median(case["seconds"][name]))
    return median_ratio(case["seconds"][best], case["seconds"][GRADWIRE])


def one_line(case: Case) -> str:
    """A case as it is printed while others are measured."""
    times = ", ".join(f"{name} {_shown(each)}" for name, each in case["seconds"].items())
    return f"{case['congestion_control']}, {case['busy']} busy, {size(case['bytes'])}: {times}"


def _shown(seconds: Sequence[float]) -> str:
    low, middle, high = map(_microseconds, statistics.quantiles(seconds, n=4))
    return f"{middle} ({low} to {high})"


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
