"""Processor time of an all_reduce in one codec and in others: encoding, decoding and messages.

    python -m bench.codecs.processor_time
    python -m bench.codecs.processor_time --codecs int8 int4 onebit --ranks 4 --transports tcp

Of all ranks of this host together, in a ring. Codecs take turns, so that ratios survive a machine
that others load. Prints a table: medians over rounds, and of the ratios to the first codec, beside
which the least and the most are.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import gradwire
import numpy as np

from bench.common.report import table

_KIB = (256, 16384)
_BYTES = 16 << 20  # about so many of a round


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
    parser.add_argument("--transports", nargs="+", default=["tcp", "shm"])
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for transport, kib, feedback in itertools.product(options.transports, _KIB, (False, True)):
        args = (options.codecs, kib, feedback, options.rounds)
        found = gradwire.spawn(measured, options.ranks, args=args, transports=[transport])
        spent = np.sum(found, axis=0)  # seconds by codec and round, of all ranks
        for codec, each in zip(options.codecs, spent, strict=True):
            ratios = (each / spent[0]).tolist()
            beside = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            microseconds = f"{1e6 * statistics.median(each.tolist()):.0f}"
            how = "with" if feedback else "without"
            rows.append(f"{transport} | {kib} | {how} | `{codec}` | {microseconds} | {beside}")
    head = f"transport | KiB | error feedback | codec | µs | beside `{options.codecs[0]}`"
    print("\n".join(table(head, rows, "lrllrr")))


def measured(
    comm: gradwire.Communicator, codecs: list[str], kib: int, feedback: bool, rounds: int
) -> list[list[float]]:
    """Seconds of this rank's processor time for a call, by codec and round."""
    x = np.random.default_rng(comm.rank).standard_normal(kib << 8).astype(np.float32)
    out = np.empty_like(x)
    kept: dict[str, dict[str, Any]] = {
        codec: {"feedback": gradwire.ErrorFeedback(), "key": "x"} if feedback else {}
        for codec in codecs
    }
    calls = max(1, _BYTES // x.nbytes)

    def once(codec: str) -> float:
        comm.barrier()
        started = time.process_time()
        for _ in range(calls):
            comm.all_reduce(x, out=out, op="avg", codec=codec, algorithm="ring", **kept[codec])
        return (time.process_time() - started) / calls

    spent = [[once(codec) for codec in codecs] for _ in range(1 + rounds)][1:]
    return [list(each) for each in zip(*spent, strict=True)]


if __name__ == "__main__":
    main()
