"""The page and the table of what long_link.py has measured."""

from __future__ import annotations

import statistics
from typing import Any

from bench.common import report


def document(found: dict[str, Any], stem: str) -> str:
    """The page of the results."""
    return report.document(
        "A long link",
        f"{report.origin(found)} {stem}.json. Median Mbit/s each way of "
        f"{report.size(found['bytes'])} between two ranks: gradwire by GRADWIRE_TCP_STREAMS, plain "
        "TCP by the number of streams; three turns before them open the windows.",
        table(found),
    )


def table(found: dict[str, Any]) -> list[str]:
    """The median rates, by link and program."""
    names = list(found["cases"][0]["mbit"])
    rows = []
    for case in found["cases"]:
        mbit, milliseconds, loss = case["link"]
        where = f"{mbit:g} Mbit/s, {milliseconds:g} ms{f', loss {loss:.1%}' * bool(loss)}"
        rows.append([where, *(f"{statistics.median(case['mbit'][name]):.0f}" for name in names)])
    return report.table(" | ".join(["Mbit/s each way", *names]), rows)
