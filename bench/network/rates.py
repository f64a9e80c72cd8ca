"""Rates of all_reduces between two hosts, and how what was measured is written."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import report
from bench.common.machine import OtherLoad


def all_reduce_rates(comm: Any, size: int, turns: int, warm_up: int = 1) -> list[float]:
    """The Mbit/s each way of each of some all_reduces of `size` bytes of two ranks."""
    x, found = np.ones(size // 4, np.float32), []
    for _ in range(warm_up + turns):
        x[:] = 1
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(x)
        found.append(size * 8e-6 / (time.perf_counter() - start))
        assert (x == comm.size).all()
    return found[warm_up:]


def write(
    name: str,
    parser: argparse.ArgumentParser,
    measured: Callable[[argparse.Namespace], dict[str, Any]],
    page: Callable[[dict[str, Any], str], str],
    **defaults: float,
) -> None:
    """Measures on the command line's options, and writes bench/results/NAME-DATE.json and .md.

    `defaults` are those of further options, by name.
    """
    for option, default in defaults.items():
        parser.add_argument(f"--{option}", type=type(default), default=default)
    parser.add_argument("--output", type=Path, help="without suffix")
    options, load = parser.parse_args(), OtherLoad()
    found = measured(options)
    stamp = report.stamp(f"bench.network.{name.replace('-', '_')}", load)
    report.write(options.output, name, {**stamp, **found}, page)
