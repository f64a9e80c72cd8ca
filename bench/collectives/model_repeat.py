"""How far do two runs of `model_check` differ in the same cases?

    python -m bench.collectives.model_repeat FIRST.json SECOND.json

No model predicts times better than they repeat: a case that takes 20 % longer in another run is
beyond 20 % for one of the two. It prints for each link in how many of the cases that both files
have the measured times differ by more than that, between the files and between the repetitions of
one, which have ranks and a tuned model of their own. It measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.collectives import model_check
from bench.collectives.model_check import CLOSE, Case


def main() -> int:
    """Compares, and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs=2, help="json files of model_check")
    files = parser.parse_args().files
    first, second = (json.loads(each.read_text(encoding="utf-8"))["cases"] for each in files)
    print("\n".join(report(first, second)))
    return 0


def report(first: Sequence[Case], second: Sequence[Case]) -> list[str]:
    """A line over all cases, and one for each link and number of ranks."""
    pairs = list(_pairs(first, second))
    groups = dict.fromkeys((case["link"], case["ranks"]) for case, _ in pairs)
    lines = [_line("all", pairs)]
    for link, ranks in groups:
        those = [each for each in pairs if (each[0]["link"], each[0]["ranks"]) == (link, ranks)]
        lines.append(_line(f"{link}, p = {ranks}", those))
    return lines


def _pairs(first: Sequence[Case], second: Sequence[Case]) -> Iterator[tuple[Case, Case]]:
    """The same case in both files."""
    keys = ("link", "ranks", "bytes", "algorithm")
    known = {tuple(case[key] for key in keys): case for case in model_check.fixed(second)}
    for case in model_check.fixed(first):
        other = known.get(tuple(case[key] for key in keys))
        if other is not None:
            yield case, other


def _line(name: str, pairs: Sequence[tuple[Case, Case]]) -> str:
    between = [_apart(model_check.measured(a), model_check.measured(b)) for a, b in pairs]
    within = [
        _apart(*(model_check._of_run(run) for run in two))
        for pair in pairs
        for case in pair
        for two in itertools.combinations(case["runs"], 2)
    ]
    far, inside = (
        f"{sum(each > CLOSE for each in found) / max(1, len(found)):.0%} "
        f"(median {statistics.median(found or [0.0]):.0%})"
        for found in (between, within)
    )
    return (
        f"{name}: beyond {CLOSE:.0%} of each other in {far} of {len(pairs)} cases; "
        f"repetitions of a run in {inside}"
    )


def _apart(one: float, other: float) -> float:
    """How much more the longer time is."""
    return max(one, other) / min(one, other) - 1


if __name__ == "__main__":
    sys.exit(main())
