"""The table and the picture of downpour.py, from what its json holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.asynchronous.seeds import accuracy, final, runs_of, seconds
from bench.common import report
from bench.common.report import Found

_TARGET = 0.83  # test accuracy, whose time is told


class Way(NamedTuple):
    """One way to train."""

    name: str
    rule: str  # a class of gradwire.serve
    lr: float
    synchronous: bool = False
    warm_start: int = 0
    push_codec: str = "none"
    pull_codec: str = "none"
    staleness: str = "keep"
    slow: bool = False  # one replica is
    faults: bool = False  # one replica is killed, one stopped, and one joins


_WARM = Way("Downpour, Adagrad, warm start", "Adagrad", 0.02, warm_start=200)
WAYS = (
    Way("synchronous Adagrad, rate 0.02", "Adagrad", 0.02, synchronous=True),
    Way("synchronous SGD, rate 0.4", "SGD", 0.4, synchronous=True),
    _WARM,
    Way("Downpour, Adagrad, no warm start", "Adagrad", 0.02),
    _WARM._replace(name="the same, onebit up, int8 down", push_codec="onebit", pull_codec="int8"),
    _WARM._replace(name="the same, one replica slow", slow=True),
    _WARM._replace(name="the same, one killed, one stopped, one joins", faults=True),
    *(Way(f"control: Downpour, SGD, rate {lr}", "SGD", lr) for lr in (0.1, 0.2, 0.4)),
    Way("Downpour, SGD, rate 0.2 over staleness", "SGD", 0.2, staleness="divide"),
)

_DRAWN = {  # and how
    "synchronous Adagrad, rate 0.02": "C3--",
    "Downpour, Adagrad, warm start": "C0-",
    "the same, onebit up, int8 down": "C2-",
    "the same, one killed, one stopped, one joins": "C4-",
    "control: Downpour, SGD, rate 0.2": "C7:",
}


def summary(found: Found) -> list[str]:
    """Accuracy, seconds until the target, staleness, and steps of the replicas."""
    head = (
        f"{found['steps']:,} gradients of 32 images a replica | test accuracy, % | "
        f"s to {_TARGET:.0%} | mean staleness | steps/s of a replica, least to most"
    )
    return report.table(head, _rows(found))


def _rows(found: Found) -> Iterator[list[str]]:
    for way in WAYS:
        if not (runs := runs_of(found, way.name)):
            continue
        if way.synchronous:
            pace = ["0", f"{1 / found['gradient_seconds']:.0f}"]
        else:
            stale = statistics.fmean(each["staleness"] for each in runs)
            sorted_rates = (sorted(each["rates"].values()) for each in runs)
            rates = [statistics.fmean(each) for each in zip(*sorted_rates, strict=True)]
            pace = [f"{stale:.1f}", f"{rates[0]:.0f} to {rates[-1]:.0f}"]
        yield [way.name, accuracy(runs), seconds(_reaches(runs)), *pace]


def goals(found: Found) -> Iterator[str]:
    """The bars that asynchronous training has to reach, and whether it does."""
    ends = {way.name: final(runs_of(found, way.name)) for way in WAYS if runs_of(found, way.name)}
    base, warm = ends[WAYS[0].name], ends[_WARM.name]
    cold, coded, slow, faults, *controls = (ends[way.name] for way in WAYS[3:10])
    rows = (
        ("with a warm start at least synchronous Adagrad - 0.3", warm - base, -0.3),
        ("the warm start gains", warm - cold, 0.0),
        ("onebit up and int8 down at least that - 0.5", coded - warm, -0.5),
        ("a slow replica costs at most 1", slow - warm, -1.0),
        ("deaths and joins cost at most 1", faults - warm, -1.0),
        ("control: twice the best fixed rate loses 5", max(controls) - _doubled(controls), 5.0),
    )
    for text, value, least in rows:
        yield f"- {text} points: {value:+.2f}, {report.reached(value >= least)}."


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    seeds = len({each["seed"] for each in found["runs"]})
    return report.document(
        "Downpour SGD beside synchronous training",
        report.origin(found),
        f"{found['data']}, a network 784-32-10, 4 replicas of 32 images a step, {seeds} seeds: "
        "means ± standard deviations. Replicas are processes that sleep until "
        f"{found['gradient_seconds'] * 1e3:g} ms are over in each step "
        f"({found['slow']:g} times that on a slow one), and two shards are threads of one more. "
        "Synchronous training is computed in one process, and its steps count as one gradient "
        "each, without any exchange: that favours it. With a slow replica its seconds are "
        f"{found['slow']:g} times those of the table. Steps/s are those since a replica joined.",
        f"![Test accuracy over seconds]({stem}.png)",
        summary(found),
        goals(found),
    )


def draw(found: Found, path: Path) -> None:
    """Accuracy over seconds of the first seed, in the ways that a picture has room for."""
    with report.picture(path, report.PAGE, 4.6) as (_, ((panel,),)):
        for name, style in _DRAWN.items():
            if runs := runs_of(found, name):
                seconds, _, accuracies = zip(*runs[0]["curve"], strict=True)
                panel.plot(seconds, [100 * each for each in accuracies], style, label=name)
        panel.axhline(100 * _TARGET, color=report.NEUTRAL, linewidth=0.8)
        panel.set(xlabel="seconds of training", ylabel=f"test accuracy, {found['data']} (%)")
        panel.set_ylim(50, 88)
        panel.legend(loc="lower right", framealpha=0.95)


def _doubled(controls: Sequence[float]) -> float:
    """The accuracy at twice the rate of the best one, or the best if that is the largest rate."""
    best = controls.index(max(controls))
    return controls[min(best + 1, len(controls) - 1)]


def _reaches(runs: Sequence[Found]) -> float | None:
    """Mean seconds until the target; None if a seed does not get there."""
    return report.mean_of_all(
        [next((s for s, _, a in each["curve"] if a >= _TARGET), None) for each in runs]
    )
