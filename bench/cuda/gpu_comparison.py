"""Processor time to find out that all ranks have made the same calls on their GPUs.

``python -m bench.cuda.gpu_comparison --ranks 16 --transport tcp``; needs no GPU. A rank's time for

- a call that is compared alone: a collective of no bytes by which each rank hears from each;
- a round of `csrc/gradwire/cuda/call_comparison.h`, for up to 64 calls and at most every 5 ms.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable

import gradwire
import numpy as np

CALLS_OF_A_ROUND = 64


def processor_microseconds(body: Callable[[], object], times: int) -> float:
    """This process's processor time for a call of `body`, in microseconds."""
    body()
    begun = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(times):
        body()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    seconds = ended.ru_utime - begun.ru_utime + ended.ru_stime - begun.ru_stime
    return seconds / times * 1e6


def measure(comm: gradwire.Communicator, times: int) -> tuple[float, float]:
    """Microseconds of a call compared alone and of a round, the mean of all ranks."""
    nothing, words = np.empty(0, np.uint8), np.full(3, comm.rank, np.uint64)
    alone = processor_microseconds(
        lambda: comm.all_gather(nothing, algorithm="direct", async_op=True).wait(), times
    )
    in_rounds = processor_microseconds(
        lambda: comm.all_reduce(
            words, op="min", algorithm="recursive_doubling", async_op=True
        ).wait(),
        times,
    )
    means = comm.all_reduce(np.array([alone, in_rounds]), op="avg")
    return float(means[0]), float(means[1])


def main() -> None:
    """Prints both times, and what they come to for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--transport", default="tcp", help="shm or tcp")
    parser.add_argument("--times", type=int, default=300, help="of each")
    args = parser.parse_args()
    alone, in_rounds = gradwire.spawn(
        measure, args.ranks, args=[args.times], transports=[args.transport]
    )[0]
    print(f"{args.ranks} ranks, {args.transport}: processor time of a rank")
    print(f"compared alone:          {alone:7.1f} us a call")
    print(f"in rounds:               {in_rounds:7.1f} us a round")
    print(f"in rounds of {CALLS_OF_A_ROUND} calls:   {in_rounds / CALLS_OF_A_ROUND:7.2f} us a call")


if __name__ == "__main__":
    main()
