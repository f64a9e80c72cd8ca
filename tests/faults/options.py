"""The options that all campaigns have."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence


def campaign_parser(module: str, description: str | None, *, count: int) -> argparse.ArgumentParser:
    """Takes --count and --seed; `count` is the number of cases unless --count says another."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--count", type=_positive, default=count, help="cases to run")
    made.add_argument("--seed", type=int, default=secrets.randbits(32), help="of all cases")
    return made


def add_choice(made: argparse.ArgumentParser, *, jobs: int) -> None:
    """Adds --jobs and --only."""
    made.add_argument("--jobs", type=_positive, default=jobs, help="at a time")
    made.add_argument("--only", type=int, metavar="CASE", help="this one, and show all of it")


def numbers_of(options: argparse.Namespace) -> Sequence[int]:
    """The numbers of the cases to run."""
    return range(options.count) if options.only is None else [options.only]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: a campaign of no cases shows nothing")
    return value
