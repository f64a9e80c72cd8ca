"""The page and the table of what relayed.py has measured."""

from __future__ import annotations

import statistics
from typing import Any

from bench.common import report


def document(found: dict[str, Any], stem: str) -> str:
    """The page of the results."""
    return report.document(
        "A relayed pair",
        f"{report.origin(found)} {stem}.json. Mbit/s each way of {len(found['rates'])} all_reduces "
        f"of {report.size(found['bytes'])} between two ranks that only a third one's host joins.",
        table(found),
    )


def table(found: dict[str, Any]) -> list[str]:
    """The median rate and the lowest one, and their parts of the share."""
    rates, share = found["rates"], found["mbit"] / 2
    cells = [f"{each:.0f} ({each / share:.2f})" for each in (statistics.median(rates), min(rates))]
    head = "the relay's link, Mbit/s | each way's share | median (of the share) | lowest"
    return report.table(head, [[f"{found['mbit']:g}", f"{share:g}", *cells]])
