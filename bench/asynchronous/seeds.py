"""What benchmarks that train in several ways with several seeds have in common."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import report

Runs = Sequence[Mapping[str, Any]]  # each with "way" and "curve", whose points end with an accuracy


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all have; `doc` is the module's."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    made.add_argument("--passes", type=float, default=3.0, help="through the training images")
    made.add_argument("--gradient-ms", type=float, default=10.0)
    made.add_argument("--data", type=Path, help="directory of other IDX files")
    made.add_argument("--quick", action="store_true", help="--seeds 1 --passes 1")
    made.add_argument("--output", type=Path, help="a path without suffix")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line."""
    options = made.parse_args()
    if options.quick:
        options.seeds, options.passes = [1], 1.0
    return options


def runs_of(found: Mapping[str, Any], way: str) -> Runs:
    """The runs of a way, by its name."""
    return [each for each in found["runs"] if each["way"] == way]


def final(runs: Runs) -> float:
    """Percent at the end, mean over seeds."""
    return statistics.fmean(_ends(runs))


def accuracy(runs: Runs) -> str:
    """Percent at the end, with the standard deviation over seeds."""
    return report.spread(_ends(runs), 2)


def seconds(value: float | None) -> str:
    """Seconds until the target accuracy."""
    return "not reached" if value is None else f"{value:.1f}"


def _ends(runs: Runs) -> list[float]:
    return [100 * each["curve"][-1][2] for each in runs]
