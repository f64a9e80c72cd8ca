"""The report of optimizers.py: tables and a picture of all its outcomes."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import machine, report
from bench.common.report import mean, spread, times
from bench.training.methods import SMALL
from bench.training.trials import exchanges, trial
from bench.training.trials.trial import Outcome, best_rate

DENSE, ADAMW = "none", "adamw"
_NAMES = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}
TASKS = {
    "lm": "language model",
    "vit": "vision transformer",
    "cnn": "CNN",
    "mlp": "MLP",
}


class Goal(NamedTuple):
    """What an exchange should reach."""

    percent: float  # of the loss of none, above it at most
    ratio: float = 1  # at least, after the first steps
    whole: float = 1  # and over the whole run


GOALS = {
    "fp16": Goal(0.3),
    "bf16": Goal(0.3),
    "int8": Goal(0.3),
    "int4": Goal(0.3, 7),
    "lowrank": Goal(1, 20),
    "OneBitAdam": Goal(1, 25, 10),
}
_SPARSER = Goal(2, 60)  # of optimizers that compress, with options


def goal_of(exchange: str) -> Goal | None:
    """What an exchange should reach; None for those of which nothing was asked."""
    if "/codec=lowrank" in exchange:  # of momenta: as of gradients
        return GOALS["lowrank"]
    name = exchanges.name_of(exchange)
    if (
        "/codec=onebit" in exchange or "/codec=int8" in exchange
    ):  # as many bytes as without, or more
        return GOALS[name]
    sparser = name in GOALS and exchanges.replaces_optimizer(exchange) and "/" in exchange
    return _SPARSER if sparser else GOALS.get(name)


class Row:
    """One optimizer and exchange on a task: an outcome for each seed."""

    def __init__(self, optimizer: str, exchange: str, outcomes: Sequence[Outcome]) -> None:
        self.optimizer, self.exchange, self.outcomes = optimizer, exchange, outcomes

    @property
    def title(self) -> str:
        """As in "AdamW, int8"; an optimizer that compresses stands alone."""
        alone = exchanges.replaces_optimizer(self.exchange)
        return self.exchange if alone else f"{_NAMES[self.optimizer]}, {self.exchange}"

    @property
    def words(self) -> str:
        """The title for those who do not know how exchanges are written."""
        said = exchanges.words(self.exchange, self.outcomes[0].run.first if self.outcomes else None)
        alone = exchanges.replaces_optimizer(self.exchange)
        return said if alone else f"{_NAMES[self.optimizer]}, {said}"

    @property
    def is_control(self) -> bool:
        """Whether it lacks feedback that its exchange has otherwise."""
        return self.exchange == exchanges.without_feedback(self.exchange)

    @property
    def diverged(self) -> bool:
        """Whether a loss is not finite."""
        return not all(math.isfinite(each.loss) for each in self.outcomes)

    def above(self, other: Row | None) -> list[float]:
        """Percent of the other row's loss that this one's is above it, by seed that both have."""
        theirs = {each.run.seed: each.loss for each in other.outcomes} if other else {}
        return [
            100 * (each.loss / theirs[each.run.seed] - 1)
            for each in self.outcomes
            if each.run.seed in theirs
        ]

    def ratio(self, *, whole: bool = False) -> float | None:
        """Mean over seeds."""
        return mean([each.ratio(whole=whole) for each in self.outcomes])

    def sent(self, *, whole: bool = False) -> float | None:
        """Bytes per rank: of a step after the first ones, or of the whole run."""
        return mean([each.bytes if whole else each.sent() for each in self.outcomes])


class Table:
    """All rows of a task, with the most common number of steps and batch."""

    def __init__(self, task: str, outcomes: Sequence[Outcome]) -> None:
        self.task = task
        of_task = [each for each in outcomes if each.run.task == task and not each.run.link]
        self.steps, self.batch = max(
            ((each.run.steps, each.run.batch) for each in of_task),
            key=lambda kind: sum((e.run.steps, e.run.batch) == kind for e in of_task),
        )
        self.all = [e for e in of_task if (e.run.steps, e.run.batch) == (self.steps, self.batch)]
        self.rows: list[Row] = []
        keys = dict.fromkeys((e.run.optimizer, e.run.exchange) for e in self.all)
        for key in sorted(keys, key=lambda key: (list(_NAMES).index(key[0]), key[1] != DENSE)):
            self.rows.append(self._row(*key))
        self.rows.sort(key=_place)

    def _row(self, optimizer: str, exchange: str) -> Row:
        """With the rate of dense gradients, else the one that the most seeds have, or the best."""
        base = self.row(optimizer, DENSE)
        found = [
            each
            for each in self.all
            if (each.run.optimizer, each.run.exchange) == (optimizer, exchange)
        ]
        by_rate: dict[float, list[Outcome]] = {}
        for each in found:
            by_rate.setdefault(each.run.rate, []).append(each)

        def order(rate: float) -> tuple[bool, int, float]:
            like_base = base is not None and rate == base.outcomes[0].run.rate
            return like_base, len(by_rate[rate]), -_mean_loss(by_rate[rate])

        best = by_rate[max(by_rate, key=order)]
        return Row(optimizer, exchange, sorted(best, key=lambda each: each.run.seed))

    def row(self, optimizer: str, exchange: str) -> Row | None:
        """None if there is none."""
        return next(
            (e for e in self.rows if (e.optimizer, e.exchange) == (optimizer, exchange)), None
        )

    def base(self, row: Row) -> Row | None:
        """Dense gradients with the same optimizer."""
        return self.row(row.optimizer, DENSE)


def _place(row: Row) -> tuple[int, bool, float]:
    """Dense gradients come before the others, which follow by their bytes."""
    return list(_NAMES).index(row.optimizer), row.exchange != DENSE, row.ratio() or 0


def read(path: Path) -> list[Outcome]:
    """A file's outcomes, without those of ways to exchange that gradwire no longer has."""
    return [each for each in trial.read(path) if exchanges.is_known(each.run.exchange)]


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """One for each task that there is."""
    have = {each.run.task for each in outcomes if not each.run.link}
    return [Table(task, outcomes) for task in TASKS if task in have]


def write(outcomes: Sequence[Outcome], runs: Path, stem: Path) -> None:
    """Writes STEM.md and .png, and the outcomes beside them; prints the tables."""
    tables = tables_of(outcomes)
    text = "\n".join(_document(tables, outcomes, stem.name)) + "\n"
    report.save_runs(stem, runs, text)
    draw(tables, report.beside(stem, ".png"))
    print(text)


def _document(tables: Sequence[Table], outcomes: Sequence[Outcome], name: str) -> Iterator[str]:
    versions = {", ".join(f"{k} {v}" for k, v in each.versions.items()) for each in outcomes}
    run = outcomes[0].run
    yield "# Compression with AdamW, SGD and Lion"
    yield ""
    yield (
        f"{datetime.date.today()}; {machine.describe()}; {'; '.join(sorted(versions))}; "
        "`python -m bench.training.optimizers`."
    )
    yield ""
    yield (
        f"{run.ranks} ranks. The learning rate rises for {run.warm_up:.0%} of the steps, then "
        "falls to 0 along a cosine. Gradients are clipped to the norm 1: the average, or by "
        "OneBitAdam each rank's own; not for SGD. Weight decay is what the optimizer has by "
        "default. *Loss* is the mean cross-entropy of what was not trained with, *accuracy* the "
        "share of it predicted right, after the last step: means ± standard deviations over seeds. "
        "*Than none* is the loss above that of dense gradients with the same optimizer, *than "
        "AdamW* above that with AdamW, seed by seed. *Ratio* is "
        "what a ring sends of dense float32 gradients, 2(p − 1)/p · 4 bytes an element, over the "
        "bytes sent: after the first steps, which are in int8 where compression needs a beginning, "
        "and of the whole run. `+int8=0.2`: int8 for this share of the steps, before a biased "
        f"codec; `+small=int8`: that codec for tensors of less than {SMALL:,} elements. The bits "
        "of results do not depend on what else the machine did."
    )
    yield from ["", f"![Loss over ratio]({name}.png)"]
    for table in tables:
        yield from _rows(table)
    yield from ["", "## Goals", "", *goals(outcomes)]
    yield from _controls(tables)
    yield from _rates(tables)
    yield from _seconds(outcomes)


def _rows(table: Table) -> Iterator[str]:
    one = table.all[0]
    title = TASKS[table.task]
    yield from ["", f"## {title[0].upper()}{title[1:]}", ""]
    yield (
        f"{one.data}, {one.parameters:,} parameters, {table.steps} steps of {table.batch} "
        "examples of all ranks."
    )
    yield ""
    yield from report.table(
        " | rate | seeds | loss | than none, % | than AdamW, % | accuracy, % | kB a step | MB in "
        "all | ratio | whole run",
        (_cells(table, row) for row in table.rows),
    )
    bits = "yes" if all(each.identical for each in table.all) else "**NO**"
    yield from ["", f"All replicas bit-identical at the end of every training: {bits}."]


def _cells(table: Table, row: Row) -> report.Cells:
    sent, whole = row.sent(), row.sent(whole=True)
    base, adamw = table.base(row), table.row(ADAMW, DENSE)
    return (
        row.title,
        f"{row.outcomes[0].run.rate:g}",
        len(row.outcomes),
        spread([each.loss for each in row.outcomes], 4),
        None if row is base else percent(row, base),
        None if row is adamw else percent(row, adamw),
        spread([each.accuracy for each in row.outcomes], 2),
        None if sent is None else f"{sent / 1e3:,.1f}",
        None if whole is None else f"{whole / 1e6:,.1f}",
        times(row.ratio()),
        times(row.ratio(whole=True)),
    )


def goals(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A table of what exchanges should reach, and of what they do."""
    head = "task | | goal: loss above none, % | found | goal: ratio, whole run | found | reached"
    rows = (line for table in tables_of(outcomes) for line in goal_lines(table))
    yield from report.table(head, rows, "llrrrrl")


def goal_lines(table: Table) -> Iterator[str]:
    """A line of the table for each row that has a goal."""
    for row in table.rows:
        found = row.above(table.base(row))
        goal = goal_of(row.exchange)
        if goal is None or row.is_control or not found:
            continue
        ratio, whole = row.ratio() or 0, row.ratio(whole=True) or 0
        below = statistics.fmean(found) <= goal.percent
        reached = below and ratio >= goal.ratio and whole >= goal.whole
        yield (
            f"{TASKS[table.task]} | {row.title} | ≤ {goal.percent:g} | "
            f"{spread(found, 2, sign=True)} | ≥ {goal.ratio:g}, ≥ {goal.whole:g} | "
            f"{times(ratio)}, {times(whole)} | {report.yes(reached)}"
        )


def _controls(tables: Sequence[Table]) -> Iterator[str]:
    rows = []
    for table in tables:
        for row in table.rows:
            control = table.row(row.optimizer, exchanges.without_feedback(row.exchange))
            if control is not None and control is not row:
                rows.append((TASKS[table.task], row.title, percent(control, row)))
    head = "task | | loss without feedback above that with it, %"
    if rows:
        yield from ["", "## Without feedback", "", *report.table(head, rows, "ll")]


def _rates(tables: Sequence[Table]) -> Iterator[str]:
    """What the learning rates were chosen by."""
    rows = []
    for table in tables:
        first = min(each.run.seed for each in table.all)
        for row in table.rows:
            key = (row.optimizer, row.exchange, first)
            tried = [e for e in table.all if (e.run.optimizer, e.run.exchange, e.run.seed) == key]
            if len(tried) > 1:
                best = best_rate(tried, tried[0].run)
                losses = [
                    f"{each.run.rate:g}: {each.loss:.4f}{' (best)' * (each.run.rate == best)}"
                    for each in sorted(tried, key=lambda each: each.run.rate)
                ]
                rows.append((TASKS[table.task], row.title, ", ".join(losses)))
    head = "task | | rate: loss"
    if rows:
        yield from ["", "## Learning rates, first seed", "", *report.table(head, rows, "lll")]


def _seconds(outcomes: Sequence[Outcome]) -> Iterator[str]:
    rows = list(links(outcomes))
    if rows:
        yield from ["", "## Milliseconds of a step over emulated links", "", *rows]


def links(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Milliseconds of a step by link; nothing where none was timed."""
    timed = [each for each in outcomes if each.run.link]
    names = list(dict.fromkeys(each.run.link for each in timed))
    if not timed:
        return
    yield (
        "A step of a rank after the first ones, over links held to this rate at both ends, "
        "milliseconds:"
    )
    yield ""
    rows = []
    for task, optimizer, exchange in dict.fromkeys(
        (each.run.task, each.run.optimizer, each.run.exchange) for each in timed
    ):
        found = {
            e.run.link: e.seconds_per_step
            for e in timed
            if (e.run.task, e.run.optimizer, e.run.exchange) == (task, optimizer, exchange)
        }
        cells = (f"{1e3 * found[link]:.1f}" if link in found else None for link in names)
        rows.append((TASKS[task], Row(optimizer, exchange, ()).words, *cells))
    yield from report.table(" | ".join(["task | ", *names]), rows, "ll")


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """For the documentation: loss above AdamW's with dense gradients by task, and ratios."""
    tables = [each for each in tables_of(outcomes) if each.row(ADAMW, DENSE)]
    of_adamw = (r.exchange for t in tables for r in t.rows if r.optimizer == ADAMW)
    lines = []
    for exchange in dict.fromkeys(each for each in of_adamw if each != DENSE):
        rows = [table.row(ADAMW, exchange) for table in tables]
        have = [each for each in rows if each is not None]
        cells = [
            None if row is None else percent(row, table.row(ADAMW, DENSE))
            for table, row in zip(tables, rows, strict=True)
        ]
        seeds = max(len(each.outcomes) for each in have)
        ratios = [mean([e.ratio(whole=whole) for e in have]) for whole in (False, True)]
        lines.append((ratios[0] or 0, [have[0].words, *cells, seeds, *map(times, ratios)]))
    heads = [f"{TASKS[each.task]}, %" for each in tables]
    ordered = (line for _, line in sorted(lines, key=lambda each: each[0]))
    yield from report.table(" | ".join(["", *heads, "seeds | ratio | whole run"]), ordered)


def others(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """For the documentation: what exchanges cost optimizers other than AdamW."""
    yield from report.table(
        "task | | loss | above the optimizer's own dense loss, % | ratio | whole run",
        (
            _other_cells(table, row)
            for table in tables_of(outcomes)
            for row in table.rows
            if row.optimizer != ADAMW
        ),
        "ll",
    )


def _other_cells(table: Table, row: Row) -> report.Cells:
    _, _, _, loss, than, *_, ratio, whole = _cells(table, row)
    return (TASKS[table.task], row.words, loss, than, ratio, whole)


def percent(row: Row, other: Row | None) -> str:
    """How much the row's loss is above the other's."""
    if row.diverged:
        return "diverged"
    found = row.above(other)
    return spread(found, 2, sign=True) if found else "–"


def draw(tables: Sequence[Table], path: Path) -> None:
    """Loss above dense AdamW's, or the first row's without it, over the ratio, by task."""
    columns = max(1, len(tables))
    with report.picture(path, 6.4 * columns, 6.5, columns=columns) as (_, (panels,)):
        for panel, table in zip(panels, tables, strict=False):
            _draw(panel, table)


def _draw(panel: Any, table: Table) -> None:
    best = table.row(ADAMW, DENSE) or table.rows[0]
    number = 0
    for row in table.rows:
        ratio, found = row.ratio(), row.above(best)
        if ratio is None or not found or row.diverged:
            continue
        number += 1
        colour = f"C{list(_NAMES).index(row.optimizer)}"
        middle = statistics.fmean(found)
        error = statistics.stdev(found) if len(found) > 1 else 0
        style = "x" if row.is_control else "o"
        label = f"{number}  {row.title}"
        panel.errorbar(ratio, middle, error, fmt=style, color=colour, capsize=3, label=label)
        place = {"xytext": (5, 4), "textcoords": "offset points"}
        panel.annotate(str(number), (ratio, middle), fontsize=8, **place)
    panel.axhline(0, color="#777777", linestyle=":")
    panel.set_yscale("symlog", linthresh=1)
    panel.set(
        xscale="log",
        xlabel="ratio after the first steps (dense ring = 1)",
        ylabel=f"loss above that of {best.title}, %",
        title=TASKS[table.task],
    )
    panel.margins(x=0.1, y=0.1)
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), fontsize=7, ncols=2)


def _mean_loss(outcomes: Sequence[Outcome]) -> float:
    return statistics.fmean(each.loss for each in outcomes)
