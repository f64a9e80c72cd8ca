"""The goals, the tables and the picture of peers.py, from what its json holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import report
from bench.common.report import Cells, median_ratio, size
from bench.libraries.peer_teams import GLOO, GRADWIRE, OPEN_MPI, TITLES

Case = Mapping[str, Any]
Found = Mapping[str, Any]

_KI, _MI = 1 << 10, 1 << 20
_LATENCY = 0.9e-6  # seconds of a blocking call from Python, at p = 2
_COLOURS = {
    "gradwire": "#1463b0",
    "gloo": "#b3123a",
    "mpich": "#1d7a3a",
    "mpich-ofi": "#7ab31d",
    "openmpi": "#c8860a",
}


def median(case: Case, name: str) -> float:
    """Seconds of a call of that library, on its slowest rank."""
    return statistics.median(case["seconds"][name])


def ratio(case: Case, name: str) -> float:
    """How many times faster gradwire was, turns of the same round compared."""
    return median_ratio(case["seconds"][name], case["seconds"][GRADWIRE])


def best(case: Case) -> str | None:
    """The fastest library but gradwire; None where there was no other."""
    others = [name for name in case["seconds"] if name != GRADWIRE]
    return min(others, key=lambda name: median(case, name)) if others else None


def to_best(case: Case) -> float | None:
    """How many times faster gradwire was than the fastest other."""
    name = best(case)
    return None if name is None else ratio(case, name)


def to_gloo(case: Case) -> float | None:
    """How many times faster gradwire was than gloo."""
    return ratio(case, GLOO) if GLOO in case["seconds"] else None


def to_open_mpi(case: Case) -> float | None:
    """How many times faster gradwire was than Open MPI."""
    return ratio(case, OPEN_MPI) if OPEN_MPI in case["seconds"] else None


def share(case: Case) -> float | None:
    """What the wall takes, as part of what gradwire takes."""
    wall = case.get("wall")
    if wall is None:
        return None
    p, nbytes = case["ranks"], case["bytes"]
    each = nbytes if case["transport"] == "shm" else 2 * (p - 1) / p * nbytes
    scale = each / wall["bytes"] * p / wall["processes"]
    return scale * median_ratio(wall["seconds"], case["seconds"][GRADWIRE])


def of_floor(case: Case) -> float | None:
    """What the floor program takes, as part of what gradwire takes."""
    if case.get("floor") is None:
        return None
    return median_ratio(case["floor"], case["seconds"][GRADWIRE])


def line_times(case: Case) -> str:
    """The cache line's nanoseconds there and back in this case, least to most."""
    seen = [each for trips in case.get("round_trips", []) for each in trips]
    return f"{min(seen):.0f} to {max(seen):.0f}" if seen else "–"


def _speed(case: Case) -> float:
    return _LATENCY / median(case, GRADWIRE)


class Goal(NamedTuple):
    """Of all cases that it speaks of, the worst has at least a value."""

    text: str
    least: float
    value: Callable[[Case], float | None]
    sizes: tuple[float, float]  # bytes, from and to
    form: Callable[[Case, float], str] = lambda _, value: f"{value:.2f}×"
    op: str = "all_reduce"
    ranks: tuple[int, ...] = ()  # any

    def row(self, cases: Sequence[Case]) -> Cells | None:
        """Of a table, for the cases of one (transport, p); None where there are none."""
        values = [
            (value, case)
            for case in cases
            if case["op"] == self.op
            and self.sizes[0] <= case["bytes"] <= self.sizes[1]
            and (not self.ranks or case["ranks"] in self.ranks)
            and (value := self.value(case)) is not None
        ]
        if not values:
            return None
        worst, case = min(values, key=lambda each: each[0])
        where = f" at {size(case['bytes'])}" if len(values) > 1 else ""
        return _row(cases, self.text, self.form(case, worst) + where, self._reached(values))

    def _reached(self, values: Sequence[tuple[float, Case]]) -> str:
        """Yes, or which of the sizes fall short."""
        short = [
            f"{self.form(case, value)} at {size(case['bytes'])}"
            for value, case in values
            if value < self.least
        ]
        if not short:
            return "yes"
        if len(values) == 1:
            return "no"
        return f"no: {len(short)} of {len(values)} fall short: {', '.join(short)}"


def _percent(_: Case, value: float) -> str:
    return f"{value:.0%}"


def _microseconds(case: Case, _: float) -> str:
    return f"{median(case, GRADWIRE) * 1e6:.2f} µs"


_ANY, _EVER = (4, math.inf), math.inf
_SHM_GOALS = (
    Goal("≥ 1× the best, every size", 1, to_best, _ANY),
    Goal(
        "≥ 90 % of the floor, 64 KiB and above",
        0.9,
        of_floor,
        (64 * _KI, _EVER),
        _percent,
        ranks=(2, 4),
    ),
    Goal("≥ 20× gloo, up to 64 KiB", 20, to_gloo, (4, 64 * _KI)),
    Goal("≥ 50 % of the wall, 64 MiB", 0.5, share, (64 * _MI, 64 * _MI), _percent, ranks=(2,)),
    Goal("4 B in ≤ 0.9 µs", 1, _speed, (4, 4), _microseconds, ranks=(2,)),
    Goal("4 B: ≥ 1× Open MPI", 1, to_open_mpi, (4, 4), ranks=(2, 4)),
    Goal("barrier in ≤ 0.9 µs", 1, _speed, (0, 0), _microseconds, "barrier", (2,)),
    Goal("barrier: ≥ 1× Open MPI", 1, to_open_mpi, (0, 0), op="barrier", ranks=(2, 4)),
)
_TCP_GOALS = (
    Goal("≥ 1× the best, every size", 1, to_best, _ANY),
    Goal("≥ 1.2× the best, 8 MiB and above", 1.2, to_best, (8 * _MI, _EVER)),
    Goal("≥ 80 % of the wall, 8 MiB and above", 0.8, share, (8 * _MI, _EVER), _percent),
)
_MEAN = 1.3  # of ratios to the best, in shared memory


def _row(cases: Sequence[Case], *cells: str) -> Cells:
    return f"{cases[0]['transport']}, p = {cases[0]['ranks']}", *cells


def mean(cases: Sequence[Case]) -> float | None:
    """Geometric, of all sizes' ratios to the best."""
    ratios = [to_best(case) for case in cases if case["op"] == "all_reduce"]
    known = [each for each in ratios if each is not None]
    return statistics.geometric_mean(known) if known else None


def goals(found: Found) -> list[str]:
    """A table."""
    rows: list[Cells] = []
    for cases in groups(found):
        in_memory = cases[0]["transport"] == "shm"
        shown = (goal.row(cases) for goal in (_SHM_GOALS if in_memory else _TCP_GOALS))
        rows += [row for row in shown if row is not None]
        value = mean(cases) if in_memory else None
        if value is not None:
            goal, reached = f"geometric mean ≥ {_MEAN}×", report.yes(value >= _MEAN)
            rows.append(_row(cases, goal, f"{value:.2f}×", reached))
    return report.table(" | goal | measured | reached", rows, "llrl")


def groups(found: Found) -> Iterator[list[Case]]:
    """The cases of each transport and p."""
    keys = dict.fromkeys((case["transport"], case["ranks"]) for case in found["cases"])
    for key in keys:
        yield [case for case in found["cases"] if (case["transport"], case["ranks"]) == key]


def table(cases: Sequence[Case]) -> list[str]:
    """Of one transport and p."""
    names = list(cases[0]["seconds"])
    others = [name for name in names if name != GRADWIRE]
    rows = []
    for case in cases:
        cells = [_what(case)]
        cells += [f"{median(case, name) * 1e6:,.{_digits(case, name)}f}" for name in names]
        cells += [f"{ratio(case, name):.2f}" for name in others]
        cells += [report.shown(to_best(case), "{:.2f}"), report.shown(share(case), "{:.0%}")]
        cells += [report.shown(of_floor(case), "{:.0%}"), line_times(case)]
        rows.append(cells)
    head = ["", *(TITLES[name] for name in names), *(f"× {TITLES[name]}" for name in others)]
    head += ["× the best", "of the wall", "of the floor", "line, ns"]
    return report.table(" | ".join(head), rows)


def _digits(case: Case, name: str) -> int:
    return 2 if median(case, name) < 1e-5 else 1 if median(case, name) < 1e-3 else 0


def _what(case: Case) -> str:
    return size(case["bytes"]) if case["op"] == "all_reduce" else case["op"]


def one_line(case: Case) -> str:
    """How a case went."""
    name = best(case)
    beside = "" if name is None else f", {ratio(case, name):.2f}× {TITLES[name]}"
    return f"{case['transport']} p={case['ranks']} {_what(case)}{beside}, {line_times(case)} ns"


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    versions = dict.fromkeys(found["versions"].values())
    lines = [
        "# all_reduce of float32: gradwire beside gloo, MPICH and Open MPI",
        "",
        f"{found['date']}; {found['machine']}; {'; '.join(versions)}. `python {found['command']}`.",
        "",
        "Microseconds of one call from Python on the slowest rank, all ranks on one host, in "
        "place; medians of turns that the libraries take by rounds, each in processes of its own, "
        "which sleep while others have theirs; every turn begins with a call whose results are "
        "checked. *×*: how many times faster gradwire was, the median over rounds. The best is "
        "the other library with the lowest median. *The wall* of shared memory: to copy the "
        "buffer once for each rank (which reads n bytes and writes n), by as many processes at "
        "once as there are ranks, or cores; were only the bytes written counted, the shares would "
        "be twice as large. Of TCP: processes in pairs, of which each sends what a rank must, "
        "2 (p - 1) / p · n, while it receives as much and adds it up, over plain sockets; an "
        "all_reduce adds half of that, so it can be above 100 %. Below "
        "64 KiB the wall is taken to be as fast as at 64 KiB, above 64 MiB as there. gloo has no "
        "shared memory: its figures there are over loopback. *The floor*: a program of a hundred "
        "lines that only sums in shared memory (`bench/libraries/shm_floor.cc`). *Line*: how long "
        "a cache line took from core to core and back before and after turns, which tells where "
        "the cores were. Each TCP run was seen to send its "
        "bytes over loopback.",
        "",
        f"![Time and ratio to the best]({stem}.png)",
        "",
        *goals(found),
    ]
    for cases in groups(found):
        transport = "Shared memory" if cases[0]["transport"] == "shm" else "TCP on loopback"
        lines += ["", f"## {transport}, p = {cases[0]['ranks']}", "", *table(cases)]
    return "\n".join([*lines, "", "## How the ranks were started", "", *_starts(found)]) + "\n"


def _starts(found: Found) -> Iterator[str]:
    for place, commands in found["starts"].items():
        for name, command in commands.items():
            yield f"- {place}, {TITLES[name]}: `{command}`"


def draw(found: Found, path: Path) -> None:
    """Times and ratios over sizes, by transport and p."""
    shown = [[each for each in cases if each["op"] == "all_reduce"] for cases in groups(found)]
    columns = len(shown)
    with report.picture(path, 4.6 * columns, 7.6, 2, columns) as (figure, axes):
        for column, cases in enumerate(shown):
            _times(axes[0][column], cases)
            _ratios(axes[1][column], cases)
        for each in axes.flat:
            each.legend(fontsize=8)
        figure.suptitle("all_reduce of float32 from Python, taking turns on one host")


def _times(axes: Any, cases: Sequence[Case]) -> None:
    sizes = [case["bytes"] for case in cases]
    for name in cases[0]["seconds"]:
        times = [median(case, name) * 1e6 for case in cases]
        axes.plot(sizes, times, marker="o", markersize=3, color=_COLOURS[name], label=TITLES[name])
    large = [case for case in cases if case["bytes"] >= 64 * _KI]
    walls = [(share(case) or 0) * median(case, GRADWIRE) * 1e6 for case in large]
    walled = [case["bytes"] for case in large]
    axes.plot(walled, walls, color="#777777", linestyle=":", label="the wall")
    axes.set(yscale="log", ylabel="µs a call", title=f"{_place(cases[0])}")
    _over_bytes(axes, sizes)


def _ratios(axes: Any, cases: Sequence[Case]) -> None:
    sizes = [case["bytes"] for case in cases]
    for name in (each for each in cases[0]["seconds"] if each != GRADWIRE):
        ratios = [ratio(case, name) for case in cases]
        axes.plot(sizes, ratios, marker="o", markersize=3, color=_COLOURS[name], label=TITLES[name])
    axes.axhline(1, color=_COLOURS[GRADWIRE], label=TITLES[GRADWIRE])
    axes.set(yscale="log", ylabel="times faster is gradwire")
    _over_bytes(axes, sizes)


def _over_bytes(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=4)
    axes.set_xticks(sizes[::3], labels=map(size, sizes[::3]))
    axes.set_xlabel("bytes")
    axes.grid(alpha=0.3)


def _place(case: Case) -> str:
    return f"{case['transport']}, p = {case['ranks']}"
