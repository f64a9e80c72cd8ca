"""Makes the trials that a file of outcomes lacks."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from gradwire._launch import launcher

from bench.common.report import ROOT
from bench.training.trials.trial import Outcome, Trial, read


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """What all programs that make trials have in common; `name` is of the file of outcomes."""
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--data", type=Path, help="directory of other IDX files")
    parser.add_argument(
        "--runs",
        type=Path,
        default=ROOT / f"build/{name}-runs.jsonl",
        help="file of outcomes: what it lacks is added to it",
    )
    parser.add_argument("--report", action="store_true", help="only write the report")
    parser.add_argument("--output", type=Path, help="of the report, without suffix")


def data_of(options: argparse.Namespace) -> str:
    """How trials call the directory of `--data`."""
    return "" if options.data is None else str(options.data.name)


def make_all(
    sweep: Callable[[argparse.Namespace], Iterable[Trial]],
    plan: Callable[[argparse.Namespace, Sequence[Outcome]], Iterable[Trial]],
    options: argparse.Namespace,
) -> int:
    """Makes a sweep of learning rates, and what is planned after it; returns an exit code."""
    try:
        if not options.report:
            make(plan(options, make(sweep(options), options)), options)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if not read(options.runs):
        print(f"{options.runs} has no outcomes", file=sys.stderr)
        return 1
    return 0


def make(trials: Iterable[Trial], options: argparse.Namespace) -> list[Outcome]:
    """Every outcome in the file, once it has those of all these trials; raises RuntimeError."""
    done = {each.run for each in read(options.runs)}
    left = [each for each in dict.fromkeys(trials) if each not in done]
    for (ranks, link), some in groupby(left, lambda each: (each.ranks, each.link)):
        _launch(list(some), ranks, link, options.runs, options.data)
    return read(options.runs)


def _launch(trials: Sequence[Trial], ranks: int, link: str, runs: Path, data: Path | None) -> None:
    """Starts the ranks, which append to the file of outcomes."""
    runs.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.json"
        plan.write_text(json.dumps([each._asdict() for each in trials]))
        own = ["-m", "bench.training.trials.ranks", str(plan), f"{scratch}/store", str(runs)]
        own += [] if data is None else [str(data)]
        code = launcher.run(["-n", str(ranks), *(["--link", link] if link else []), *own])
    if code != 0:
        raise RuntimeError(f"the ranks ended with {code}; {runs} has what was finished before")
