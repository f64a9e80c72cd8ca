"""The tables and the picture of diloco.py, from what its json holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.asynchronous.seeds import accuracy, final, runs_of, seconds
from bench.common import report
from bench.common.report import Found

NO_LINK = "none"
_TARGET = 0.85  # test accuracy, whose time is told
_STYLES = ("C0-", "C2-", "C4-", "C7:", "C3--")  # of the lines of a picture
_GOAL = 0.5  # points that DiLoCo every 10 may be below synchronous SGD


class Way(NamedTuple):
    """One way to train."""

    name: str
    every: int  # 0: gradients are averaged at each step
    rate: float  # of the inner SGD
    inner_momentum: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    codec: str = "none"
    paced: bool = False  # and one rank is slow


WAYS = (
    *(Way(f"synchronous SGD, rate {rate}", 0, rate) for rate in (0.1, 0.2, 0.4)),
    *(
        Way(f"synchronous SGD, momentum 0.9, rate {rate}", 0, rate, 0.9)
        for rate in (0.02, 0.05, 0.1)
    ),
    Way("DiLoCo every 10", 10, 0.1),
    Way("DiLoCo every 50", 50, 0.1),
    Way("DiLoCo every 10, int8", 10, 0.1, codec="int8"),
    Way("local SGD every 10", 10, 0.1, lr=1, momentum=0),
    Way("local SGD every 50", 50, 0.1, lr=1, momentum=0),
    Way("local SGD every 10, rate 0.4", 10, 0.4, lr=1, momentum=0),
    Way("local SGD every 50, rate 0.4", 50, 0.4, lr=1, momentum=0),
    Way("DiLoCo every 10, paced", 10, 0.1, paced=True),
    Way("DiLoCo every 50, paced", 50, 0.1, paced=True),
)


class Line(NamedTuple):
    """A way to train on a network."""

    title: str
    curves: list[list[tuple[float, float]]]  # by seed: seconds and accuracy

    def reaches(self) -> float | None:
        """Mean seconds until the target; None if a seed does not get there."""
        return report.mean_of_all(
            [next((s for s, a in each if a >= _TARGET), None) for each in self.curves]
        )

    def mean(self) -> list[tuple[float, float]]:
        """The mean curve of all seeds."""
        return [
            (statistics.fmean(s for s, _ in each), statistics.fmean(a for _, a in each))
            for each in zip(*self.curves, strict=True)
        ]


def shown(found: Found) -> list[Way]:
    """All ways but synchronous SGD with rates that are not its best, with and without momentum."""
    best = [
        max(
            (way for way in WAYS if way.every == 0 and way.inner_momentum == momentum),
            key=lambda way: final(runs_of(found, way.name)),
        )
        for momentum in (0.0, 0.9)
    ]
    return [*best, *(way for way in WAYS if way.every)]


def line(found: Found, way: Way, link: str, *, slow: bool) -> Line:
    """The way on a network, with one slow rank or none."""
    exchange = found["exchange_seconds"][link]["ring" if way.every == 0 else way.codec]
    # Without pace all wait for the slow rank, and have the same bits.
    factor = found["slow"] if slow and not way.paced else 1
    curves = [
        [(busy * factor + count * exchange, accuracy) for busy, count, accuracy in its["curve"]]
        for its in runs_of(found, way.name)
    ]
    return Line(way.name, curves)


def summary(found: Found) -> list[str]:
    """Accuracy, bytes, and seconds until the target by network."""
    head = (
        f"{found['steps']:,} steps | test accuracy, % | kB sent a rank and step | "
        f"s to {_TARGET:.0%}, fast network | 100 Mbit/s | one of four {found['slow']:g}× slower"
    )
    return report.table(head, _rows(found))


def _rows(found: Found) -> Iterator[list[str | None]]:
    for way in shown(found):
        runs = runs_of(found, way.name)
        sent = statistics.fmean(each["bytes"] for each in runs) / 1e3
        cells = [
            None if way.paced else seconds(line(found, way, link, slow=False).reaches())
            for link in found["exchange_seconds"]
        ]
        slowed = seconds(line(found, way, NO_LINK, slow=True).reaches())
        yield [way.name, accuracy(runs), f"{sent:,.1f}", *cells, slowed]


def goal(found: Found) -> str:
    """Whether DiLoCo every 10 is as accurate as synchronous SGD."""
    best = shown(found)[0]
    difference = final(runs_of(found, "DiLoCo every 10")) - final(runs_of(found, best.name))
    return (
        f"Goal: DiLoCo every 10 at most {_GOAL} points below synchronous SGD without momentum; "
        f"found {difference:+.2f} points, {report.reached(difference >= -_GOAL)}."
    )


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    exchange = found["exchange_seconds"]
    seeds = len({each["seed"] for each in found["runs"]})
    networks = "; ".join(
        f"{_title(link)}: "
        + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in its.items())
        for link, its in exchange.items()
    )
    rates = ", ".join(
        f"{way.rate:g}{' with momentum 0.9' if way.inner_momentum else ''}: "
        f"{final(runs_of(found, way.name)):.2f} %"
        for way in WAYS
        if way.every == 0
    )
    return report.document(
        "DiLoCo and local SGD beside synchronous SGD",
        report.origin(found),
        f"{found['data']}, a network 784-256-10 of {found['parameters']:,} parameters, 4 ranks of "
        f"32 images a step, {seeds} seeds: means ± standard deviations. Inner SGD has no momentum, "
        "and the rate 0.1 if no other is named; synchronous SGD the best of these rates: "
        f"{rates}. All ways compute as many gradients.",
        f"Seconds are simulated: {found['gradient_seconds'] * 1e3:g} ms for a gradient, "
        f"{found['slow']:g} times that on a slow rank, and for each exchange what it took at least "
        f"on that network ({networks}; *ring* is synchronous SGD's all_reduce, the others are "
        "whole outer steps with these codecs). The fast network is shared memory. Without pace a "
        "slow rank delays all, with the same bits.",
        f"![Test accuracy over seconds]({stem}.png)",
        summary(found),
        goal(found),
    )


def draw(found: Found, path: Path) -> None:
    """Accuracy over simulated seconds, on a slow network and with a slow rank."""
    slow_link = next(link for link in found["exchange_seconds"] if link != NO_LINK)
    panels = (
        ("100 Mbit/s", slow_link, False),
        (f"fast network, one of four ranks {found['slow']:g}× slower", NO_LINK, True),
    )
    with report.picture(path, report.PAGE, 8, rows=2, sharex=True) as (figure, rows):
        for panel, (title, link, slow) in zip(rows.flat, panels, strict=True):
            for way, style in zip(_drawn(found, slow), _STYLES, strict=True):
                seconds, accuracies = zip(*line(found, way, link, slow=slow).mean(), strict=True)
                name = way.name if way.every else "synchronous SGD"
                panel.plot(seconds, [100 * each for each in accuracies], style, label=name)
            panel.axhline(100 * _TARGET, color=report.NEUTRAL, linewidth=0.8)
            panel.legend(loc="lower right")
            panel.set(title=title, ylim=(70, 89))
        rows[-1][0].set(xscale="log", xlabel="simulated seconds of training")
        rows[-1][0].set_xlim(left=0.7)
        figure.supylabel(f"test accuracy, {found['data']} (%)", fontsize=11)


def _drawn(found: Found, slow: bool) -> list[Way]:
    """Those that a picture has room for, the fastest first."""
    paced = ("DiLoCo every 10, paced", "DiLoCo every 50, paced")
    names = paced if slow else ("DiLoCo every 10, int8", "DiLoCo every 50")
    by_name = {way.name: way for way in WAYS}
    others = (by_name[name] for name in (*names, "DiLoCo every 10", "local SGD every 10"))
    return [*others, shown(found)[1]]


def _title(link: str) -> str:
    return "shared memory" if link == NO_LINK else f"emulated {link.replace(',', ', ')}"
