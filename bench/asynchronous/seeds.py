"""What benchmarks that train in several ways with several seeds have in common."""

from __future__ import annotations

import argparse
import datetime
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import result_files
from bench.common.result_files import RESULTS

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
    made.add_argument("--picture", type=Path, metavar="FILE.png")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line."""
    options = made.parse_args()
    if options.quick:
        options.seeds, options.passes = [1], 1.0
    return options


def write(
    options: argparse.Namespace,
    name: str,
    found: Mapping[str, Any],
    document: Callable[[Mapping[str, Any], str], str],
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Writes NAME-DATE.json, .md and .png, or those of --output; prints the report."""
    stem = options.output or RESULTS / f"{name}-{datetime.date.today().isoformat()}"
    text = document(found, stem.name)
    result_files.save(stem, found, text)
    picture = result_files.beside(stem, ".png")
    draw(found, picture)
    if options.picture is not None:
        shutil.copyfile(picture, options.picture)
    print(text)


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


def times(ratio: float | None) -> str:
    """A ratio of bytes for a table, as in 29.7×."""
    return "–" if ratio is None else f"{ratio:.{1 if ratio < 100 else 0}f}×"
