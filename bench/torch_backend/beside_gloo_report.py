"""The tables and the picture of beside_gloo.py, from what its json holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.libraries.peers_report import size

NO_LINK = "none"
SHAPED = "shaped "  # before the rate of links between namespaces
GRADWIRE, GLOO = "gradwire", "gloo"
COMMUNICATOR, NUMPY = "communicator, tensor", "communicator, NumPy"
FUNCTIONAL = "all_reduce, functional"
OF_GLOO, OF_COMMUNICATOR, LEAST_BYTES = 1.5, 1.05, 1 << 26  # the goals
MICROSECONDS = 3.0  # of a tensor's 4 bytes through the communicator, at most

Found = Mapping[str, Any]


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    lines = [
        "# The backend beside gloo",
        "",
        f"{found['date']}; {found['machine']}. `python {found['command']}`. What is in one "
        "table took turns in the same processes. gloo has no shared memory: ranks of one host talk "
        "over loopback.",
        "",
        f"![Milliseconds of collectives, and of steps]({stem}.png)",
    ]
    if reached := list(goals(found)):
        lines += ["", "| goal | limit | measured | reached |", "|---|---:|---:|---|", *reached]
    if "cost" in found:
        lines += ["", "## Processor time of one call of 4 B, on one rank alone", "", *cost(found)]
    for ranks in found["collectives"]:
        lines += ["", f"## Collectives, {ranks} ranks", "", *collectives(found, ranks)]
    if found["steps"]:
        lines += ["", "## Training steps", "", *steps(found)]
    return "\n".join(lines) + "\n"


def goals(found: Found) -> Iterator[str]:
    """A row for each goal that was measured."""
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


def _goal(what: str, most: float, value: float, unit: str) -> str:
    reached = "yes" if value <= most else "no"
    return f"| {what} | {most:g}{unit} | {value:.2f}{unit} | {reached} |"


def cost(found: Found) -> Iterator[str]:
    """A row for each operation."""
    yield "| µs | gradwire | gloo | ratio |"
    yield "|---|---:|---:|---:|"
    for kind, its in found["cost"].items():
        quotient = its[GRADWIRE] / its[GLOO]
        yield f"| {kind} | {its[GRADWIRE]:.1f} | {its[GLOO]:.1f} | {quotient:.2f} |"
        for own in (COMMUNICATOR, NUMPY):
            if own in its:
                yield f"| {own} | {its[own]:.2f} | – | – |"


def collectives(found: Found, ranks: str) -> Iterator[str]:
    """A row for each operation and size."""
    yield "| | gradwire, ms | gloo, ms | faster | communicator's own, ms | of that |"
    yield "|---|---:|---:|---:|---:|---:|"
    for operation, by_size in found["collectives"][ranks].items():
        for nbytes, its in by_size.items():
            cells = [
                milliseconds(its[GRADWIRE]),
                milliseconds(its[GLOO]),
                f"{ratio(its, GLOO, GRADWIRE):.1f}×",
            ]
            own = its.get(COMMUNICATOR)
            cells += ["–", "–"] if own is None else [milliseconds(own), _share(its)]
            yield f"| {operation}, {size(int(nbytes))} | {' | '.join(cells)} |"


def ratio(its: Found, one: str, other: str) -> float:
    """Of two libraries' times: the median over turns that followed each other."""
    return statistics.median(a / b for a, b in zip(its[one], its[other], strict=True))


def _share(its: Found) -> str:
    return f"{ratio(its, GRADWIRE, COMMUNICATOR):.2f}×"


def milliseconds(seconds: list[float]) -> str:
    """The median."""
    middle = 1e3 * statistics.median(seconds)
    digits = 3 if middle < 1 else 1
    return f"{middle:.{digits}f}"


def steps(found: Found) -> Iterator[str]:
    """A row for each way, number of ranks and link."""
    yield "| step | ranks | link | steps of a rank | ms | MB sent by a rank |"
    yield "|---|---:|---|---:|---:|---:|"
    for link, by_ranks in found["steps"].items():
        for ranks, ways in by_ranks.items():
            for way, its in ways.items():
                low, high = its["middle_half_ms"]
                middle = f"{its['ms']:.1f} ({low:.1f} to {high:.1f})"
                cells = [title(link), str(its["steps"]), middle, f"{its['sent'] / 1e6:.2f}"]
                yield f"| {way} | {ranks} | {' | '.join(cells)} |"


def title(link: str) -> str:
    """A link, for a table."""
    if link == NO_LINK:
        return "shared memory"
    if link.startswith(SHAPED):
        return f"between namespaces, held to {link.removeprefix(SHAPED)}"
    return f"emulated {link.replace(',', ', ')}"


def draw(found: Found, path: Path) -> None:
    """Times of all_reduce by bytes and ranks, and of steps by link with the most ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks, links = list(found["collectives"]), list(found["steps"])
    panels = max(1, len(ranks) + len(links))
    figure, axes = pyplot.subplots(
        1, panels, figsize=(5.5 * panels, 3.6), squeeze=False, layout="constrained"
    )
    for panel, each in zip(axes[0], ranks, strict=False):
        _draw_calls(panel, found["collectives"][each]["all_reduce"], each)
    for panel, link in zip(axes[0][len(ranks) :], links, strict=False):
        _draw_steps(panel, found["steps"][link], link)
    figure.savefig(path, dpi=100)


def _draw_calls(axes: Any, by_size: Found, ranks: str) -> None:
    for library, colour in ((GLOO, "#b3123a"), (GRADWIRE, "#1463b0"), (COMMUNICATOR, "#777777")):
        times = [1e3 * statistics.median(its[library]) for its in by_size.values()]
        axes.plot(list(map(int, by_size)), times, marker=".", color=colour, label=library)
    axes.set(xscale="log", yscale="log", xlabel="bytes", title=f"all_reduce, {ranks} ranks, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_steps(axes: Any, by_ranks: Found, link: str) -> None:
    ranks, ways = list(by_ranks.items())[-1]
    names = list(ways)
    colours = ["#b3123a" if name.endswith(GLOO) else "#1463b0" for name in names]
    axes.barh(range(len(names)), [ways[name]["ms"] for name in names], color=colours)
    for place, name in enumerate(names):
        axes.text(ways[name]["ms"], place, f" {ways[name]['ms']:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), labels=names)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(f"a step on {ranks} ranks, ms\n{title(link)}", fontsize=9)
