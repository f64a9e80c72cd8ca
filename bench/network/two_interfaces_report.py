"""The page and the table of what two_interfaces.py has measured."""

from __future__ import annotations

import statistics
from typing import Any

from bench.common import report


def document(found: dict[str, Any], stem: str) -> str:
    """The page of the results."""
    return report.document(
        "Two interfaces",
        f"{report.origin(found)} {stem}.json. Median Mbit/s each way of an all_reduce of "
        f"{report.size(found['bytes'])} between two ranks, whose hosts are joined by two links.",
        table(found),
    )


def table(found: dict[str, Any]) -> list[str]:
    """The median rates, and their ratio."""
    one, both = (statistics.median(found["rates"][name]) for name in ("one", "both"))
    row = [f"2 × {found['mbit']:g} Mbit/s", f"{one:.0f}", f"{both:.0f}", f"{both / one:.2f}"]
    return report.table("Mbit/s each way | one interface | both | ratio", [row])
