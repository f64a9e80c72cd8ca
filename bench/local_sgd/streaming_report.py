"""The report of streaming.py."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import gradwire

from bench.common import report
from bench.common.report import Found

GOAL = 1.05  # times the step without exchange


class Setting(NamedTuple):
    """How DiLoCo exchanges."""

    fragments: int
    delay: int  # inner steps
    codec: str

    def bits(self, nbytes: int) -> float:
        """What each of two ranks sends of a fragment, of a model of so many bytes as float32."""
        elements = nbytes // 4 // self.fragments
        return 8 * gradwire.codec.get(self.codec).max_bytes(elements)

    def travels(self, every: int) -> int:
        """The inner steps in which a fragment has to be there; without delay, all of a round."""
        return self.delay or every // self.fragments


def ratios(row: Found) -> list[float]:
    """A step with exchange over one without, of each turn."""
    return [a / b for a, b in zip(row["with"], row["without"], strict=True)]


def document(found: Found) -> str:
    """The md file."""
    return report.document(
        "Streaming DiLoCo on a slow link",
        f"{report.origin(found)} Two ranks, {found['parameters']:,} parameters, a round of "
        f"{found['every']} inner steps; medians of {len(found['rows'][0]['with'])} turns. The link "
        "has exactly the rate that a fragment needs to travel in `delay` steps, a step is made to "
        "last 30 ms, and counts as that of the slower rank. Goal: at most "
        f"{GOAL} times the step without exchange.",
        table(found),
    )


def table(found: Found) -> list[str]:
    """A row for each setting."""
    head = (
        "fragments, delay, codec | predicted link, Mbit/s | of what a synchronous step needs | "
        "ms a step | without exchange | ratio | least to most"
    )
    return report.table(head, map(_cells, found["rows"]))


def _cells(row: Found) -> str:
    each = ratios(row)
    control = "" if row["delay"] else " (control: training waits)"
    return (
        f"{row['fragments']}, {row['delay']}, {row['codec']}{control} | "
        f"{row['rate'] / 1e6:.1f} | 1/{row['dense_rate'] / row['rate']:.0f} | "
        f"{1e3 * statistics.median(row['with']):.2f} | "
        f"{1e3 * statistics.median(row['without']):.2f} | {statistics.median(each):.3f} | "
        f"{min(each):.2f} to {max(each):.2f}"
    )
