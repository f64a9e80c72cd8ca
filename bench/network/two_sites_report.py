"""The page and the table of what two_sites.py has measured."""

from __future__ import annotations

import statistics
from typing import Any

from bench.common import report


def document(found: dict[str, Any], stem: str) -> str:
    """The page of the results."""
    mbit, milliseconds = found["link"]
    return report.document(
        "Two sites",
        f"{report.origin(found)} {stem}.json. Median seconds, and the range, of a step of DDP with "
        f"{report.size(found['bytes'])} of gradients, on 2 sites of {found['hosts']} ranks, with "
        f"{mbit:g} Mbit/s and a round trip of {milliseconds:g} ms between them; the gradients of "
        f"one site alone take {found['least']:.2f} s over that.",
        table(found),
    )


def table(found: dict[str, Any]) -> list[str]:
    """The median step of each setting, and how many times longer it takes than the bytes do."""
    rows = []
    for name, each in found["seconds"].items():
        median = statistics.median(each)
        seconds = f"{median:.2f} ({min(each):.2f} to {max(each):.2f})"
        rows.append([name, seconds, f"{median / found['least']:.2f}"])
    return report.table("the ranks take hosts for | seconds of a step | × the bytes alone", rows)
