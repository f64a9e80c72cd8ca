"""The report of the parameter server beside others: tables, and which goals are reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bench.serve.peer_sides import GLOO, GRADWIRE_SHM, GRADWIRE_TCP, RPC, SOCKETS, WALL

_SMALL = 1024  # elements of the small pull


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


def goals(found: Mapping[str, Any]) -> Iterator[str]:
    """One line for each goal that the figures can tell of."""
    largest = max(case["elements"] for case in found["cases"])
    for goal in GOALS:
        size = _SMALL if goal.small else largest
        case = next(
            (
                each
                for each in found["cases"]
                if (each["operation"], each["elements"]) == (goal.operation, size)
            ),
            None,
        )
        if case is None or not {goal.over, goal.under} <= set(case["seconds"]):
            continue
        pairs = zip(case["seconds"][goal.over], case["seconds"][goal.under], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        least = min(case["seconds"][goal.over]) / min(case["seconds"][goal.under])
        yield _line(goal.text, ratio, goal.bound, goal.at_least) + f" Of the least: {least:.2f}."
    few, many = found["crowds"]
    rates = statistics.median(b / a for a, b in zip(few["rates"], many["rates"], strict=True))
    text = f"pulls and pushes a second of {many['clients']} clients over {few['clients']} clients'"
    yield _line(text, rates, 0.8, True)
    megabytes = many["bytes_a_client"] / 1e6
    yield _line("MB that a client costs a shard", megabytes, 2.5, False)
    yield _line("descriptors that a client costs a shard", many["descriptors_a_client"], 4, False)
    alone = found["beside"]["alone"]
    for what, bound in (("own push", 3.0), ("another's push", 2.0)):
        pairs = zip(found["beside"][what], alone, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        yield _line(f"a small request beside {what} over one alone", ratio, bound, False)
    connect = statistics.median(found["rejoin"]["connect"]) * 1e3
    yield _line("ms to connect again", connect, 100, False)


def _line(text: str, ratio: float, bound: float, at_least: bool) -> str:
    reached = ratio >= bound if at_least else ratio <= bound
    wanted = f"{'at least' if at_least else 'at most'} {bound:g}"
    return f"{text}: {ratio:.2f}, wanted {wanted}: {'reached' if reached else 'missed'}."
