"""The report of large_batch.py: how far batches may grow, and what saves the most bytes."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import machine, report
from bench.training.methods import FIRST
from bench.training.train_runs import MOMENTUM
from bench.training.trials import exchanges
from bench.training.trials.trial import Outcome, Point

SMALLEST = 64  # images of all ranks: the batch that others are compared with
_DENSE = "none"
_BREAKS, _EQUAL = 1.0, 0.5  # points below the smallest batch
_USUAL = "sgd"  # the optimizer that others are compared with
_NAMES = {_USUAL: "SGD", "lars": "LARS", "lamb": "LAMB"}


class Row:
    """One optimizer, batch and exchange, with its best rate: an outcome for each seed."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        by_rate: dict[float, list[Outcome]] = {}
        for each in outcomes:
            by_rate.setdefault(each.run.rate, []).append(each)
        best = max(by_rate.values(), key=lambda some: (len(some), _mean_accuracy(some)))
        self.tried = sorted((rate, _mean_accuracy(some)) for rate, some in by_rate.items())
        self.outcomes, self.run = best, best[0].run

    @property
    def accuracy(self) -> float:
        """In percent, mean over seeds."""
        return _mean_accuracy(self.outcomes)

    @property
    def accuracies(self) -> str:
        """With the standard deviation."""
        return report.spread([each.accuracy for each in self.outcomes], 2)

    @property
    def megabytes(self) -> float:
        """Sent per rank in all."""
        return statistics.fmean(each.bytes or 0 for each in self.outcomes) / 1e6

    def reaches(self, target: float) -> tuple[float, float] | None:
        """Steps and megabytes until that accuracy, mean over seeds; None if one misses it."""
        points = [each.reaches(target) for each in self.outcomes]
        known = [each for each in points if each is not None]
        if len(known) < len(points):
            return None
        return statistics.fmean(each.step for each in known), _megabytes(known)

    @property
    def title(self) -> str:
        """What it does instead of dense exchanges of the smallest batch."""
        exchange = self.run.exchange
        parts = [f"batch {self.run.batch:,}"]
        if exchange.startswith(exchanges.LOCAL):
            parts.append(f"DiLoCo every {exchange.partition('/')[2]}")
        elif exchange != _DENSE:
            parts.append(f"`{exchange.partition('+')[0]}`")
        if self.run.optimizer != _USUAL:
            parts.append(_NAMES.get(self.run.optimizer, self.run.optimizer))
        return ", ".join(parts)


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """Of the task, epochs and number of ranks that the most outcomes share."""
    kinds = [_kind(each) for each in outcomes]
    kind = max(dict.fromkeys(kinds), key=kinds.count)
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    for each in outcomes:
        if _kind(each) == kind:
            run = each.run
            groups.setdefault((run.optimizer, run.batch, run.exchange), []).append(each)
    return [Row(groups[key]) for key in sorted(groups)]


def _kind(outcome: Outcome) -> tuple[str, str, int, float | None]:
    run = outcome.run
    return run.task, outcome.data, run.ranks, run.epochs


def write(outcomes: Sequence[Outcome], runs: Path, stem: Path, target: float) -> None:
    """Writes STEM.md and .png, and the outcomes beside them; prints the tables."""
    rows = rows_of(outcomes)
    text = "\n".join(_document(rows, stem.name, target)) + "\n"
    report.save_runs(stem, runs, text)
    draw(rows, report.beside(stem, ".png"))
    print(text)


def _document(rows: Sequence[Row], name: str, target: float) -> Iterator[str]:
    one = rows[0].outcomes[0]
    seeds = len({each.run.seed for row in rows for each in row.outcomes})
    yield "# Large batches, compression and local steps"
    yield ""
    yield (
        f"{datetime.date.today()}; {machine.describe()}; "
        f"{', '.join(f'{k} {v}' for k, v in one.versions.items())}; "
        "`python -m bench.training.large_batch`."
    )
    yield ""
    yield (
        f"{one.data}, a network of {one.parameters:,} parameters ({one.run.task}), "
        f"{one.run.ranks} ranks, {_seeds(seeds)}. All trainings are "
        f"{_counted(one.run.epochs or 0, 'epoch')} long, or a part of a batch less. The rate rises "
        f"for {one.run.warm_up:.0%} of the steps, then falls as the square root of what is left of "
        f"them. SGD and LARS have momentum {MOMENTUM}; weight decay is "
        f"{one.run.weight_decay or 0:g}. For each optimizer and batch the rate is the best of "
        "those in the last table, by the first seed's accuracy. *Batch* is of all ranks. Bytes are "
        f"sent per rank, with headers; biased codecs begin in {FIRST}. *To {target:.0%}*: until "
        "the test accuracy is first seen there, of about 30 looks in a training; – where a seed "
        "misses it."
    )
    yield from ["", f"![Test accuracy over batch, and over bytes]({name}.png)"]
    yield from ["", "## How far batches may grow", ""]
    yield from growth(rows, target)
    yield from ["", *breaks(rows)]
    yield from ["", "## What saves the most bytes", ""]
    yield f"By SGD where no optimizer is named; compared with SGD in batches of {SMALLEST}."
    yield ""
    yield from savings(rows, target)
    yield from _rates(rows)


def _seeds(count: int) -> str:
    return f"{count} seeds: means ± standard deviations" if count > 1 else "1 seed"


def _counted(count: float, what: str) -> str:
    return f"{count:g} {what}" if count == 1 else f"{count:g} {what}s"


def growth(rows: Sequence[Row], target: float) -> Iterator[str]:
    """Accuracy, and steps and bytes until the target, by batch and optimizer."""
    dense = _dense(rows)
    names = [each for each in _NAMES if any(key[0] == each for key in dense)]
    lines = []
    for batch in sorted({batch for _, batch in dense}):
        some = [dense.get((name, batch)) for name in names]
        steps = next(each.run.steps for each in some if each is not None)
        cells = ("– | – | –" if row is None else _cells(row, target) for row in some)
        lines.append(" | ".join([f"{batch:,} | {steps:,}", *cells]))
    heads = [f"{_NAMES[each]}: rate | accuracy, % | steps, MB to {target:.0%}" for each in names]
    yield from report.table(" | ".join(["batch | steps", *heads]), lines, "r")


def _cells(row: Row, target: float) -> str:
    reached = row.reaches(target)
    cost = "–" if reached is None else f"{reached[0]:,.0f}, {reached[1]:,.0f}"
    return f"{row.run.rate:g} | {row.accuracies} | {cost}"


def breaks(rows: Sequence[Row]) -> Iterator[str]:
    """For each optimizer, the largest batch that is not much worse than the smallest."""
    dense = _dense(rows)
    for name, title in _NAMES.items():
        own = {batch: row.accuracy for (which, batch), row in dense.items() if which == name}
        if SMALLEST not in own or len(own) < 2:
            continue
        good = [batch for batch in own if own[batch] >= own[SMALLEST] - _BREAKS]
        first = min((batch for batch in own if batch not in good), default=None)
        ends = "all that were tried" if first is None else f"the first that does not is {first:,}"
        yield (
            f"- {title}: batches to {max(good):,} end within {_BREAKS:g} point of {SMALLEST}; "
            f"{ends}."
        )


def savings(rows: Sequence[Row], target: float) -> Iterator[str]:
    """Bytes of all ways, the fewest first, and whether the smallest batch is more accurate."""
    base = _dense(rows).get((_USUAL, SMALLEST))
    ordered = sorted(rows, key=lambda each: each.megabytes)
    head = (
        f"| accuracy, % | within {_EQUAL:g} point | MB in all | fewer | MB to {target:.0%} | fewer"
    )
    yield from report.table(head, (_saving_cells(row, base, target) for row in ordered), "lrl")


def _saving_cells(row: Row, base: Row | None, target: float) -> report.Cells:
    cost, base_cost = row.reaches(target), base.reaches(target) if base else None
    return (
        row.title,
        row.accuracies,
        None if base is None else report.yes(row.accuracy >= base.accuracy - _EQUAL),
        f"{row.megabytes:,.1f}",
        None if base is None else f"{base.megabytes / row.megabytes:.1f}×",
        None if cost is None else f"{cost[1]:,.1f}",
        None if cost is None or base_cost is None else f"{base_cost[1] / cost[1]:.1f}×",
    )


def _rates(rows: Sequence[Row]) -> Iterator[str]:
    """What the learning rates were chosen by."""
    yield from ["", "## Rates that were tried", ""]
    lines = []
    for (name, batch), row in sorted(_dense(rows).items()):
        tried = ", ".join(f"{rate:g}: {accuracy:.2f}" for rate, accuracy in row.tried)
        lines.append(f"{_NAMES.get(name, name)} | {batch:,} | {tried}")
    yield from report.table("| batch | rate: accuracy, %", lines, "lrl")


def draw(rows: Sequence[Row], path: Path) -> None:
    """On the left accuracy over batch by optimizer, on the right over bytes by way."""
    dense = _dense(rows)
    with report.picture(path, 13, 6, columns=2) as (_, ((left, right),)):
        for name, title in _NAMES.items():
            own = sorted(
                (batch, row.accuracy) for (which, batch), row in dense.items() if which == name
            )
            if own:
                left.plot(*zip(*own, strict=True), "o-", label=title)
        for panel in (left, right):
            panel.set(xscale="log", ylabel="test accuracy, %")
        left.set(xlabel="images of all ranks in a batch")
        if left.lines:
            left.legend()
        _draw_ways(right, [each for each in rows if each.run.optimizer == _USUAL])


def _draw_ways(panel: Any, rows: Sequence[Row]) -> None:
    best = max(each.accuracy for each in rows)
    shown = [each for each in rows if each.accuracy > best - 10]
    for number, row in enumerate(sorted(shown, key=lambda each: each.megabytes), 1):
        colour = "C0" if row.run.exchange == _DENSE else "C1"
        title = row.title.replace("`", "")
        panel.plot(row.megabytes, row.accuracy, "o", color=colour, label=f"{number}  {title}")
        place = (row.megabytes, row.accuracy)
        panel.annotate(str(number), place, xytext=(4, 4), textcoords="offset points", fontsize=8)
    panel.set(xlabel="MB sent per rank, SGD")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), fontsize=7, ncols=3)


def _dense(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    return {(e.run.optimizer, e.run.batch): e for e in rows if e.run.exchange == _DENSE}


def _mean_accuracy(outcomes: Sequence[Outcome]) -> float:
    return statistics.fmean(each.accuracy for each in outcomes)


def _megabytes(points: Sequence[Point]) -> float:
    return statistics.fmean(each.bytes or 0 for each in points) / 1e6
