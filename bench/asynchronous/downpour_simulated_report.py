"""The tables and the picture of downpour_simulated.py, from what its json holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.asynchronous.seeds import accuracy
from bench.common import report
from bench.common.report import Found

TASKS = ("784-32-10, Fashion-MNIST", "CNN, digits")
REPLICAS = (4, 16, 64)
LINKS = {"none": None, "100 Mbit/s": 12.5e6}  # bytes a second of a server's card


class Way(NamedTuple):
    """One way to train."""

    name: str
    rule: str  # a class of gradwire.serve
    lr: float
    synchronous: bool = False
    warm_start: int = 0  # pushes, times the number of replicas
    push_codec: str = "none"
    pull_codec: str = "none"
    staleness: str = "keep"
    max_staleness: int | None = None
    warm_up: int | None = None  # as Downpour's: None is its default
    rules: tuple[tuple[str, str], ...] = ()
    int8_every: int = 0  # see downpour_events.Plan
    int8_from: float = 1.0


_WARM = Way("Adagrad, warm start", "Adagrad", 0.02, warm_start=50)
WAYS = (
    Way("synchronous Adagrad", "Adagrad", 0.02, synchronous=True),
    _WARM,
    _WARM._replace(name="Adagrad over staleness, warm start", staleness="divide"),
    Way("Adagrad, no warm start", "Adagrad", 0.02),
    _WARM._replace(name="warm start, onebit up, int8 down", push_codec="onebit", pull_codec="int8"),
    Way("SGD, rate 0.1", "SGD", 0.1),
    Way("SGD, rate 0.1 over staleness", "SGD", 0.1, staleness="divide"),
)

_DRAWN = {  # those that a picture has room for, and how
    "synchronous Adagrad": "C3--",
    "Adagrad, no warm start": "C7-",
    "Adagrad, warm start": "C1-",
    "Adagrad over staleness, warm start": "C0-",
    "SGD, rate 0.1 over staleness": "C2:",
}


def summary(found: Found, task: str, link: str) -> list[str]:
    """Accuracy and staleness in each way, for each number of replicas."""
    shown = [r for r in REPLICAS if _runs(found, task, link, r, WAYS[1].name)]
    rows = (
        [way.name, *(_cell(_runs(found, task, link, replicas, way.name)) for replicas in shown)]
        for way in WAYS
    )
    head = " | ".join(["test accuracy, % (mean staleness)", *(f"{r} replicas" for r in shown)])
    return report.table(head, (row for row in rows if any(row[1:])))


def thin(found: Found, task: str) -> list[str]:
    """What a link costs: virtual milliseconds a gradient of all replicas, and accuracy."""
    few = REPLICAS[0]
    head = " | ".join([f"{few} replicas", *(f"{link}: ms a gradient, %" for link in LINKS)])
    rows = (
        [way.name, *(_beside_time(_runs(found, task, link, few, way.name)) for link in LINKS)]
        for way in WAYS[1:]
        if _runs(found, task, "none", few, way.name)
    )
    return report.table(head, rows)


def tables(found: Found) -> list[str]:
    """Both tasks' tables, with accuracy by replicas and with what a link costs."""
    lines: list[str] = []
    for task in TASKS:
        counts = [each["gradients"] for each in found["runs"] if each["task"] == task]
        lines += ["", f"{task}, {max(counts, default=0):,} gradients:", ""]
        lines += [*summary(found, task, "none"), "", *thin(found, task)]
    return lines[1:]


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    seeds = len({each["seed"] for each in found["runs"]})
    serving = ", ".join(
        f"{1e3 * cost:.2f} ms ({name})" for name, cost in found["serving_seconds"].items()
    )
    return report.document(
        "Downpour SGD with 4 to 64 replicas, in virtual time",
        report.origin(found),
        f"Gradients and codecs are real, and the servers' arithmetic; {seeds} seed(s), means ± "
        f"standard deviations. Virtual: a gradient lasts {found['gradient_seconds'] * 1e3:g} ms ± "
        f"10 %, a push and a pull occupy the servers for {serving}, and the servers' "
        "cards for their bytes. All columns of a table have as many gradients in all. The warm "
        "start is 50 pushes for each replica, by the first one alone.",
        f"![Test accuracy over gradients]({stem}.png)",
        tables(found),
    )


def draw(found: Found, path: Path) -> None:
    """Accuracy over gradients, mean of all seeds: a column of panels for each task."""
    shape = (len(REPLICAS), len(TASKS))
    options = {"sharex": True, "sharey": "col"}
    with report.picture(path, report.PAGE, 8.6, *shape, **options) as (figure, rows):
        for replicas, panels in zip(REPLICAS, rows, strict=True):
            for task, panel in zip(TASKS, panels, strict=True):
                _draw_ways(panel, found, task, replicas)
                panel.set(title=f"{task.partition(', ')[2]}, {replicas} replicas")
                panel.set_ylim(bottom=45)
        figure.supxlabel("gradients of all replicas", fontsize=11)
        figure.supylabel("test accuracy (%)", fontsize=11)
        marks = rows[0][0].get_legend_handles_labels()
        figure.legend(*marks, loc="outside upper center", ncols=2)


def _draw_ways(panel: Any, found: Found, task: str, replicas: int) -> None:
    for name, style in _DRAWN.items():
        runs = _runs(found, task, "none", replicas, name)
        points = list(zip(*(each["curve"] for each in runs), strict=True))
        counts = [each[0][1] for each in points]
        means = [statistics.fmean(100 * accuracy for _, _, accuracy in each) for each in points]
        panel.plot(counts, means, style, label=name)


def _runs(found: Found, task: str, link: str, replicas: int, way: str) -> Sequence[Found]:
    wanted = {"task": task, "link": link, "replicas": replicas, "way": way}
    return [each for each in found["runs"] if all(each[key] == wanted[key] for key in wanted)]


def _cell(runs: Sequence[Found]) -> str:
    if not runs:
        return ""
    return f"{accuracy(runs)} ({statistics.fmean(each['staleness'] for each in runs):.1f})"


def _beside_time(runs: Sequence[Found]) -> str:
    ms = statistics.fmean(1e3 * each["curve"][-1][0] / each["curve"][-1][1] for each in runs)
    return f"{ms:.2f}, {accuracy(runs)}"
