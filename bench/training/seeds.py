"""What the runs of one way to train with several seeds have in common."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Runs = Sequence[Mapping[str, Any]]  # each with "way" and "curve", whose points end with an accuracy


def runs_of(found: Mapping[str, Any], way: str) -> Runs:
    """The runs of a way, by its name."""
    return [each for each in found["runs"] if each["way"] == way]


def final(runs: Runs) -> float:
    """Percent at the end, mean over seeds."""
    return statistics.fmean(_ends(runs))


def accuracy(runs: Runs) -> str:
    """Percent at the end, with the standard deviation over seeds."""
    points = _ends(runs)
    spread = f" ± {statistics.stdev(points):.2f}" if len(points) > 1 else ""
    return f"{statistics.fmean(points):.2f}{spread}"


def seconds(value: float | None) -> str:
    """Seconds until the target accuracy."""
    return "not reached" if value is None else f"{value:.1f}"


def _ends(runs: Runs) -> list[float]:
    return [100 * each["curve"][-1][2] for each in runs]
