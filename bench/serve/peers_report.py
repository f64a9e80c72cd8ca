"""The report of the parameter server beside others: tables, and which goals are reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


def document(found: Mapping[str, Any], stem: str) -> str:
    """The report as Markdown."""
    lines = [
        "# The parameter server beside other ways",
        "",
        f"{found['date']}, {found['machine']}: `python {found['command']}`.",
        "",
        "Milliseconds of two clients that pull from two servers, or pull and push, at the same "
        "time: the slower one, median (least) of all rounds. Servers of gradwire apply each push.",
        "",
        *summary(found),
        "",
        "## Goals",
        "",
        *(f"- {each}" for each in goals(found)),
        "",
        f"Figures: `{stem}.json`.",
        "",
    ]
    return "\n".join(lines)


def summary(found: Mapping[str, Any]) -> Iterator[str]:
    """The rows of the table of milliseconds."""
    kinds = list(found["cases"][0]["seconds"])
    yield "| float32 elements | | " + " | ".join(kinds) + " |"
    yield "|---:|---|" + "---:|" * len(kinds)
    for case in found["cases"]:
        cells = [
            f"{statistics.median(seconds) * 1e3:.3g} ({min(seconds) * 1e3:.3g})"
            for seconds in case["seconds"].values()
        ]
        what = {"both": "pull and push", "pull": "pull"}[case["operation"]]
        yield f"| {case['elements']:,} | {what} | " + " | ".join(cells) + " |"


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


def goals(found: Mapping[str, Any]) -> Iterator[str]:
    """One line for each goal that the figures can tell of."""
    for each in outcomes(found):
        verdict = "reached" if each.reached else "missed"
        least = "" if each.least is None else f" Of the least: {each.least:.2f}."
        yield f"{each.text}: {each.value:.2f}, wanted {each.wanted}: {verdict}.{least}"


def goal_rows(found: Mapping[str, Any]) -> Iterator[str]:
    """The same as the rows of a table."""
    yield "| goal | wanted | measured | reached |"
    yield "|---|---:|---:|---|"
    for each in outcomes(found):
        reached = "yes" if each.reached else "no"
        yield f"| {each.text} | {each.wanted} | {each.value:.2f} | {reached} |"


def outcomes(found: Mapping[str, Any]) -> Iterator[Outcome]:
    """Each goal that the figures can tell of."""
    yield from _beside_others(found["cases"])
    few, many = found["crowds"]
    rates = _median_ratio(many["rates"], few["rates"])
    text = f"pulls and pushes a second of {many['clients']} clients over {few['clients']} clients'"
    yield Outcome(text, rates, 0.8, True)
    yield Outcome("MB that a client costs a shard", many["bytes_a_client"] / 1e6, 2.5, False)
    descriptors = many["descriptors_a_client"]
    yield Outcome("descriptors that a client costs a shard", descriptors, 4, False)
    for what, bound in (("own push", 3.0), ("another's push", 2.0)):
        ratio = _median_ratio(found["beside"][what], found["beside"]["alone"])
        yield Outcome(f"a small request beside {what} over one alone", ratio, bound, False)
    connect = statistics.median(found["rejoin"]["connect"]) * 1e3
    yield Outcome("ms to connect again", connect, 100, False)


def _beside_others(cases: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
    seconds_of = {(each["operation"], each["elements"]): each["seconds"] for each in cases}
    largest = max(each["elements"] for each in cases)
    for goal in GOALS:
        seconds = seconds_of.get((goal.operation, _SMALL if goal.small else largest), {})
        if not {goal.over, goal.under} <= set(seconds):
            continue
        over, under = seconds[goal.over], seconds[goal.under]
        ratio = _median_ratio(over, under)
        yield Outcome(goal.text, ratio, goal.bound, goal.at_least, min(over) / min(under))


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
