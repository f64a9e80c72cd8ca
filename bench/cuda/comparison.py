"""Processor time to find out that all ranks have made the same calls on their GPUs.

``python -m bench.cuda.comparison --ranks 16 --transport tcp``; needs no GPU. A rank's time for

- a call that is compared alone: a collective of no bytes by which each rank hears from each;
- a round of `csrc/gradwire/cuda/call_comparison.h`, for up to 64 calls and at most every 5 ms.

With ``--simulate 1024`` it measures both with 4, 8 and 16 ranks, fits a rank's processor time as a
part for each call and one for each message that the rank sends or receives, and takes the messages
of 1,024 ranks from the same schedules. The way of a round over the network is that of gradwire's
simulator.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Sequence
from typing import NamedTuple

import gradwire
import numpy as np

CALLS_OF_A_ROUND = 64
ROUNDS_A_SECOND = 200  # at most: one every 5 ms
WORDS = 4  # of a round
FITTED = (4, 8, 16)  # ranks
WAYS = {"alone": ("all_gather", "direct"), "round": ("all_reduce", "recursive_doubling")}


class Times(NamedTuple):
    """A rank's processor time in microseconds, the mean of all ranks."""

    alone: float
    round: float


class Fit(NamedTuple):
    """Microseconds of a call, and of each message of a rank."""

    call: float
    message: float

    def of(self, messages: float) -> float:
        """The time of a call with so many messages."""
        return self.call + self.message * messages


def processor_microseconds(body: Callable[[], object], times: int) -> float:
    """This process's processor time for a call of `body`, in microseconds."""
    body()
    begun = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(times):
        body()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    seconds = ended.ru_utime - begun.ru_utime + ended.ru_stime - begun.ru_stime
    return seconds / times * 1e6


def measure(comm: gradwire.Communicator, times: int) -> Times:
    """Microseconds of a call compared alone and of a round."""
    nothing, words = np.empty(0, np.uint8), np.full(WORDS, comm.rank, np.uint64)
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
    return Times(float(means[0]), float(means[1]))


def messages(way: str, ranks: int) -> float:
    """The messages that a rank sends and receives in one comparison, the mean of all ranks."""
    collective, algorithm = WAYS[way]
    schedule = gradwire.Schedule.generate(algorithm, ranks, collective=collective)
    # The rounds of the two are alike: in each, edges of one pair are one message.
    sent = sum(len({(edge.src, edge.dst) for edge in each}) for each in schedule.rounds)
    return 2 * sent / ranks


def fit(ways: Sequence[tuple[float, float]]) -> Fit:
    """The line through (messages, microseconds) by least squares of relative errors."""
    counts, times = (np.array(column) for column in zip(*ways, strict=True))
    rows = np.stack([np.ones_like(counts), counts], axis=1) / times[:, None]
    call, message = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
    if message < 0:  # noise: no message makes a round shorter
        call, message = rows[:, 0].sum() / (rows[:, 0] ** 2).sum(), 0
    return Fit(float(call), float(message))


def simulate(measured: dict[int, Times], ranks: int) -> tuple[dict[str, Fit], Times]:
    """What ranks without number take, by the messages of their schedules."""
    fits = {
        way: fit([(messages(way, p), getattr(times, way)) for p, times in measured.items()])
        for way in WAYS
    }
    return fits, Times(*(fits[way].of(messages(way, ranks)) for way in WAYS))


def print_times(ranks: int, transport: str, times: Times) -> None:
    """Prints both times, and what they come to for each call."""
    print(f"{ranks} ranks, {transport}: processor time of a rank")
    print(f"compared alone:          {times.alone:9.1f} us a call")
    print(f"in rounds:               {times.round:9.1f} us a round")
    print(
        f"in rounds of {CALLS_OF_A_ROUND} calls:   {times.round / CALLS_OF_A_ROUND:9.2f} us a call"
    )
    share = times.round * ROUNDS_A_SECOND / 1e6
    print(f"at {ROUNDS_A_SECOND} rounds a second:  {100 * share:9.2f} % of a core")


def print_simulated(measured: dict[int, Times], ranks: int, transport: str) -> None:
    """Prints what `ranks` ranks would take, and how well the fit meets what was measured."""
    fits, times = simulate(measured, ranks)
    for way, its in fits.items():
        errors = [its.of(messages(way, p)) / getattr(each, way) - 1 for p, each in measured.items()]
        print(
            f"{way}: {its.call:.1f} us a call and {its.message:.2f} us a message; at "
            f"{', '.join(map(str, measured))} ranks off by "
            f"{', '.join(f'{100 * each:+.0f} %' for each in errors)}; "
            f"{messages(way, ranks):.0f} messages with {ranks} ranks"
        )
    print_times(ranks, f"simulated from {transport}", times)
    model = gradwire.CostModel()
    way = model.predict("recursive_doubling", 8 * WORDS, ranks, per_host=8)
    print(f"a round's way, by the simulator: {way * 1e3:.2f} ms with 8 ranks a host")


def main() -> None:
    """Prints both times, and those of more ranks by simulation if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=16)
    parser.add_argument("--transport", default="tcp", help="shm or tcp")
    parser.add_argument("--times", type=int, default=300, help="of each")
    parser.add_argument("--simulate", type=int, metavar="RANKS", help="by fits to fewer ranks")
    args = parser.parse_args()

    def measured(ranks: int) -> Times:
        found = gradwire.spawn(measure, ranks, args=[args.times], transports=[args.transport])[0]
        return Times(*found)

    if args.simulate is None:
        print_times(args.ranks, args.transport, measured(args.ranks))
        return
    by_ranks = {ranks: measured(ranks) for ranks in FITTED}
    for ranks, times in by_ranks.items():
        print_times(ranks, args.transport, times)
    print_simulated(by_ranks, args.simulate, args.transport)


if __name__ == "__main__":
    main()
