"""The report of the parameter server beside others: tables, and which goals are reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench.common import report
from bench.common.report import Found, median_ratio
from bench.serve.peer_sides import GLOO, GRADWIRE_SHM, GRADWIRE_TCP, RPC, SOCKETS, WALL

_SMALL = 1024  # elements of the small pull
TEAMS = (GRADWIRE_SHM, GRADWIRE_TCP, SOCKETS, GLOO, RPC, WALL)


class Goal(NamedTuple):
    """A ratio of seconds, of two teams' turns in the same rounds, and what it is to be."""

    text: str
    operation: str
    small: bool
    over: str
    under: str
    bound: float
    at_least: bool = True


GOALS = (
    Goal("shm beside the copies alone", "both", False, WALL, GRADWIRE_SHM, 0.85),
    Goal("tcp beside raw sockets", "both", False, SOCKETS, GRADWIRE_TCP, 0.9),
    Goal("tcp beside gloo's send and recv", "both", False, GLOO, GRADWIRE_TCP, 1.0),
    Goal("shm beside torch's rpc", "both", False, RPC, GRADWIRE_SHM, 5.0),
    Goal("tcp beside torch's rpc", "both", False, RPC, GRADWIRE_TCP, 3.0),
    Goal("a pull of 4 kB, shm, over gloo's", "pull", True, GRADWIRE_SHM, GLOO, 0.5, False),
    Goal("a pull of 4 kB, tcp, over gloo's", "pull", True, GRADWIRE_TCP, GLOO, 1.0, False),
)


def document(found: Found, stem: str) -> str:
    """The report as Markdown."""
    return report.document(
        "The parameter server beside other ways",
        report.origin(found),
        "Milliseconds of two clients that pull from two servers, or pull and push, at the same "
        "time: the slower one, median (least) of all rounds. Servers of gradwire apply each push.",
        summary(found),
        "## Goals",
        goals(found),
        f"Figures: `{stem}.json`.",
    )


def summary(found: Found) -> list[str]:
    """The table of milliseconds."""
    what = {"both": "pull and push", "pull": "pull"}
    rows = (
        [f"{case['elements']:,}", what[case["operation"]], *map(_ms, case["seconds"].values())]
        for case in found["cases"]
    )
    kinds = " | ".join(found["cases"][0]["seconds"])
    return report.table(f"float32 elements |  | {kinds}", rows, "rl")


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3g} ({min(seconds) * 1e3:.3g})"


class Outcome(NamedTuple):
    """What a goal came out as: a ratio or an amount, and of ratios of seconds that of the least."""

    text: str
    value: float
    bound: float
    at_least: bool
    least: float | None = None

    @property
    def reached(self) -> bool:
        """Whether the goal was reached."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def wanted(self) -> str:
        """The bound, in words."""
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}"


def goals(found: Found) -> Iterator[str]:
    """One line for each goal that the figures can tell of."""
    for each in outcomes(found):
        least = report.shown(each.least, " Of the least: {:.2f}.").strip("–")
        verdict = report.reached(each.reached)
        yield f"- {each.text}: {each.value:.2f}, wanted {each.wanted}: {verdict}.{least}"


def goal_table(found: Found) -> list[str]:
    """The same as a table."""
    rows = (
        (each.text, each.wanted, f"{each.value:.2f}", report.yes(each.reached))
        for each in outcomes(found)
    )
    return report.table("goal | wanted | measured | reached", rows, "lrrl")


def outcomes(found: Found) -> Iterator[Outcome]:
    """Each goal that the figures can tell of."""
    yield from _beside_others(found["cases"])
    few, many = found["crowds"]
    rates = median_ratio(many["rates"], few["rates"])
    text = f"pulls and pushes a second of {many['clients']} clients over {few['clients']} clients'"
    yield Outcome(text, rates, 0.8, True)
    yield Outcome("MB that a client costs a shard", many["bytes_a_client"] / 1e6, 2.5, False)
    descriptors = many["descriptors_a_client"]
    yield Outcome("descriptors that a client costs a shard", descriptors, 4, False)
    for what, bound in (("own push", 3.0), ("another's push", 2.0)):
        ratio = median_ratio(found["beside"][what], found["beside"]["alone"])
        yield Outcome(f"a small request beside {what} over one alone", ratio, bound, False)
    connect = statistics.median(found["rejoin"]["connect"]) * 1e3
    yield Outcome("ms to connect again", connect, 100, False)


def _beside_others(cases: Sequence[Found]) -> Iterator[Outcome]:
    seconds_of = {(each["operation"], each["elements"]): each["seconds"] for each in cases}
    largest = max(each["elements"] for each in cases)
    for goal in GOALS:
        seconds = seconds_of.get((goal.operation, _SMALL if goal.small else largest), {})
        if not {goal.over, goal.under} <= set(seconds):
            continue
        over, under = seconds[goal.over], seconds[goal.under]
        ratio = median_ratio(over, under)
        yield Outcome(goal.text, ratio, goal.bound, goal.at_least, min(over) / min(under))
