"""Processor time of a blocking all_reduce that is like an earlier one, on one rank alone.

    python -m bench.collectives.calls

Prints the median of rounds, in microseconds of one call, for a NumPy array and a torch tensor of
the CPU, which take turns; and for calls that go through all of Python's checks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import gradwire
import numpy as np
import torch

ROUNDS = 9
CALLS = 3000  # of a round


def main() -> None:
    """Prints a line for each kind of call."""
    with gradwire.init(rank=0, ranks=1) as comm:
        array, tensor = np.ones(256, np.float32), torch.ones(256)
        calls: dict[str, Callable[[], object]] = {
            "NumPy array": lambda: comm.all_reduce(array),
            "torch tensor": lambda: comm.all_reduce(tensor),
            "torch Parameter": lambda: comm.all_reduce(parameter),
            "NumPy array, out=": lambda: comm.all_reduce(array, out=array),
            "torch tensor, out=": lambda: comm.all_reduce(tensor, out=tensor),
        }
        parameter = torch.nn.Parameter(torch.ones(256))
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                spent[name].append(seconds(call))
    for name, each in spent.items():
        print(f"{name:20} {1e6 * statistics.median(each):6.2f} µs")


def seconds(call: Callable[[], object]) -> float:
    """Of this process's processor time, for one call."""
    call()
    before = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - before) / CALLS


if __name__ == "__main__":
    main()
