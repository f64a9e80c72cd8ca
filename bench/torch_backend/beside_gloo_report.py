"""The tables and the picture of beside_gloo.py, from what its json holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.report import OTHERS, OURS, Found, size

NO_LINK = "none"
SHAPED = "shaped "  # before the rate of links between namespaces
GRADWIRE, GLOO = "gradwire", "gloo"
COMMUNICATOR, NUMPY = _OWN = "communicator, tensor", "communicator, NumPy"
FUNCTIONAL = "all_reduce, functional"
OF_GLOO, OF_COMMUNICATOR, LEAST_BYTES = 1.5, 1.05, 1 << 26  # the goals
MICROSECONDS = 3.0  # of a tensor's 4 bytes through the communicator, at most


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    return report.document(
        "The backend beside gloo",
        f"{found['date']}; {found['machine']}. `python {found['command']}`. What is in one "
        "table took turns in the same processes. gloo has no shared memory: ranks of one host talk "
        "over loopback.",
        f"![Milliseconds of collectives, and of steps]({stem}.png)",
        goals(found) if any(_goals(found)) else "",
        report.section("Processor time of one call of 4 B, on one rank alone", cost(found)),
        *(
            report.section(f"Collectives, {ranks} ranks", collectives(found, ranks))
            for ranks in found["collectives"]
        ),
        report.section("Training steps", steps(found) if found["steps"] else ""),
    )


def goals(found: Found) -> list[str]:
    """A row for each goal that was measured."""
    return report.table("goal | limit | measured | reached", _goals(found), "lrrl")


def _goals(found: Found) -> Iterator[tuple[str, ...]]:
    if "cost" in found:
        its = found["cost"]["all_reduce"]
        what = "processor time of dist.all_reduce, 4 B: gradwire's / gloo's"
        yield _goal(what, OF_GLOO, its[GRADWIRE] / its[GLOO], "×")
        what = "all_reduce of a tensor of 4 B by the communicator"
        yield _goal(what, MICROSECONDS, its[COMMUNICATOR], " µs")
    for ranks, its in found["collectives"].items():
        large = its["all_reduce"].get(str(LEAST_BYTES))
        if large is not None:
            what = f"dist.all_reduce of 64 MiB / the communicator's own, {ranks} ranks"
            yield _goal(what, OF_COMMUNICATOR, ratio(large, GRADWIRE, COMMUNICATOR), "×")


def _goal(what: str, most: float, value: float, unit: str) -> tuple[str, ...]:
    return what, f"{most:g}{unit}", f"{value:.2f}{unit}", report.yes(value <= most)


def cost(found: Found) -> list[str]:
    """A row for each operation; nothing where it was not measured."""

    def rows() -> Iterator[tuple[str | None, ...]]:
        for kind, its in found["cost"].items():
            ours, theirs = its[GRADWIRE], its[GLOO]
            yield kind, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"
            yield from ((own, f"{its[own]:.2f}", None, None) for own in _OWN if own in its)

    return report.table("µs | gradwire | gloo | ratio", rows()) if "cost" in found else []


def collectives(found: Found, ranks: str) -> list[str]:
    """A row for each operation and size."""

    def row(its: Found) -> Iterator[str | None]:
        yield from (milliseconds(its[GRADWIRE]), milliseconds(its[GLOO]))
        yield f"{ratio(its, GLOO, GRADWIRE):.1f}×"
        has = COMMUNICATOR in its
        yield milliseconds(its[COMMUNICATOR]) if has else None
        yield f"{ratio(its, GRADWIRE, COMMUNICATOR):.2f}×" if has else None

    rows = (
        (f"{operation}, {size(int(nbytes))}", *row(its))
        for operation, by_size in found["collectives"][ranks].items()
        for nbytes, its in by_size.items()
    )
    head = " | gradwire, ms | gloo, ms | faster | communicator's own, ms | of that"
    return report.table(head, rows)


def ratio(its: Found, one: str, other: str) -> float:
    """Of two libraries' times, of turns that followed each other."""
    return report.median_ratio(its[one], its[other])


def milliseconds(seconds: list[float]) -> str:
    """The median."""
    middle = 1e3 * statistics.median(seconds)
    return f"{middle:.{3 if middle < 1 else 1}f}"


def steps(found: Found) -> list[str]:
    """A row for each way, number of ranks and link."""
    rows = (
        (way, ranks, title(link), its["steps"], middle_half(its), f"{its['sent'] / 1e6:.2f}")
        for link, by_ranks in found["steps"].items()
        for ranks, ways in by_ranks.items()
        for way, its in ways.items()
    )
    head = "step | ranks | link | steps of a rank | ms | MB sent by a rank"
    return report.table(head, rows, "lrl")


def middle_half(step: Found) -> str:
    """Milliseconds: the median, and between which the middle half is."""
    low, high = step["middle_half_ms"]
    return f"{step['ms']:.1f} ({low:.1f} to {high:.1f})"


def title(link: str) -> str:
    """A link, for a table."""
    if link == NO_LINK:
        return "shared memory"
    if link.startswith(SHAPED):
        return f"between namespaces, held to {link.removeprefix(SHAPED)}"
    return f"emulated {link.replace(',', ', ')}"


def draw(found: Found, path: Path) -> None:
    """Times of all_reduce by bytes and ranks, and of steps by link with the most ranks."""
    ranks, links = list(found["collectives"]), list(found["steps"])
    columns = max(1, len(ranks) + len(links))
    with report.picture(path, 5.5 * columns, 3.6, columns=columns) as (_, (panels,)):
        for panel, each in zip(panels, ranks, strict=False):
            _draw_calls(panel, found["collectives"][each]["all_reduce"], each)
        for panel, link in zip(panels[len(ranks) :], links, strict=False):
            _draw_steps(panel, found["steps"][link], link)


def _draw_calls(axes: Any, by_size: Found, ranks: str) -> None:
    for library, colour in ((GLOO, OTHERS), (GRADWIRE, OURS), (COMMUNICATOR, report.NEUTRAL)):
        times = [1e3 * statistics.median(its[library]) for its in by_size.values()]
        axes.plot(list(map(int, by_size)), times, marker=".", color=colour, label=library)
    axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"all_reduce, {ranks} ranks, ms")
    axes.legend(fontsize=8)


def _draw_steps(axes: Any, by_ranks: Found, link: str) -> None:
    ranks, ways = list(by_ranks.items())[-1]
    colours = [OTHERS if name.endswith(GLOO) else OURS for name in ways]
    report.bars(axes, list(ways), [its["ms"] for its in ways.values()], ".0f", colours)
    axes.set_title(f"a step on {ranks} ranks, ms\n{title(link)}", fontsize=9)
