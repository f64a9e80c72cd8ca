"""The report of train.py: json, tables and a picture of all finished runs."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import machine, report
from bench.common.report import mean, shown, spread, times
from bench.training.methods import FIRST, SMALL, Method, legend, titles
from bench.training.train_runs import MOMENTUM, Result, Run

DENSE = "none"


class Goal(NamedTuple):
    """What a codec should reach with feedback."""

    points: float  # of accuracy below none, at most
    ratio: float  # at least


GOALS = {
    "fp16": Goal(0.2, 1),
    "bf16": Goal(0.2, 1),
    "int8": Goal(0.2, 1),
    "onebit": Goal(0.5, 28),
    "threshold": Goal(0.5, 100),
    "topk": Goal(0.5, 100),
    "lowrank": Goal(0.5, 30),
}


class Setting:
    """All runs that differ in nothing but method and seed."""

    def __init__(self, run: Run, results: Sequence[Result]) -> None:
        self.run, self._results = run, results

    @property
    def methods(self) -> list[str]:
        """In the order in which they ran first."""
        return list(dict.fromkeys(each.run.method for each in self._results))

    @property
    def steps(self) -> int:
        """Of every run."""
        return self._results[0].steps

    def of(self, method: str) -> list[Result]:
        """One result a seed."""
        return [each for each in self._results if each.run.method == method]

    def points(self, method: str) -> list[float]:
        """Test accuracy in percent, by seed."""
        return [100 * each.test_accuracy for each in self.of(method)]

    def differences(
        self, method: str, other: str, of: Callable[[Result], float | None]
    ) -> list[float]:
        """A quantity of one method less that of another, by seed that both have."""
        have = {each.run.seed: of(each) for each in self.of(other)}
        pairs = [(of(each), have.get(each.run.seed)) for each in self.of(method)]
        return [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]

    def ratio(self, method: str, *, whole: bool = False) -> float | None:
        """Mean over seeds, of the steps with the codec or of the whole run."""
        found = [each.ratio(0 if whole else first_share(each)) for each in self.of(method)]
        return mean(found)


def accuracy(result: Result) -> float:
    """In percent."""
    return 100 * result.test_accuracy


def loss(result: Result) -> float | None:
    """Of all training images."""
    return result.training_loss


def settings_of(results: Sequence[Result]) -> list[Setting]:
    """By what they have in common."""
    groups: dict[Run, list[Result]] = {}
    for each in results:
        groups.setdefault(each.run._replace(method="", seed=0), []).append(each)
    return [Setting(run, found) for run, found in sorted(groups.items())]


def first_share(result: Result) -> float:
    """Of the steps, those before a biased codec."""
    return Method.parse(result.run.method).first_share(result.run.warm_up)


def control_of(method: str) -> str:
    """The same codec, without feedback."""
    return str(Method.parse(method).control)


def feeds_back(method: str) -> bool:
    """What has a control."""
    return Method.parse(method).feeds_back


def write(results: Sequence[Result], output: Path) -> None:
    """Writes output.json, .md and .png; prints the tables."""
    found = [{**each._asdict(), "run": each.run._asdict()} for each in results]
    compared = [each for each in settings_of(results) if len(each.methods) > 1]
    text = "\n".join(_document(results, compared, output.name)) + "\n"
    report.save(output, {"results": found}, text)
    if compared:
        draw(compared, report.beside(output, ".png"))
    print(text)


def _document(results: Sequence[Result], compared: list[Setting], name: str) -> Iterator[str]:
    runs, any_one = [each.run for each in results], results[0]
    versions = {", ".join(f"{k} {v}" for k, v in each.versions.items()) for each in results}
    yield "# Training with compressed gradients, with and without error feedback"
    yield ""
    yield (
        f"{datetime.date.today()}; {machine.describe()}; {'; '.join(sorted(versions))}; "
        "`python -m bench.training.train`."
    )
    yield ""
    yield (
        f"{', '.join(sorted({each.data for each in runs}))}; a CNN of {any_one.parameters:,} "
        f"parameters; DistributedDataParallel on {any_one.run.ranks} ranks; SGD, momentum "
        f"{MOMENTUM}. In the warm-up, the first {any_one.run.warm_up:.0%} of the steps, the "
        f"learning rate rises, and {FIRST} goes before biased codecs; then it falls to 0. It is "
        "the same for all methods, and so are, for one seed, the first parameters and the order "
        "of images. Figures are means ± standard deviations over seeds; differences are taken "
        "seed by seed."
    )
    yield ""
    yield (
        "*Ratio* is what a ring sends of dense float32 gradients, 2(p − 1)/p · 4 bytes an element, "
        "over the bytes sent: all parameters, with headers, mean over ranks, once the codec has "
        "begun; beside it, that of the whole run. *Training loss* is the final parameters' mean "
        "cross-entropy over all training images. Biased codecs have error feedback, the others "
        "none; *with* or *without feedback* is the opposite, for comparison. Options of the hook, "
        "in the line below the tables: `+momentum`, it is the hook's, before the codec, and the "
        "optimizer has none; `+rate`, residuals follow the learning rate; `+ends=CODEC`, that of "
        f"the first layer, the last, and tensors of less than {SMALL:,} elements; "
        f"`+{FIRST}=SHARE`, that codec for this share of the steps, before a biased one."
    )
    if compared:
        yield from ["", f"![Accuracy over ratio, and training loss]({name}.png)"]
    for each in compared:
        yield from _methods_table(each)
    yield from legend(dict.fromkeys(name for each in compared for name in each.methods))
    yield from _goals_table(compared)
    yield from _controls_table(compared)
    yield from _rates_table(results)


def _methods_table(setting: Setting) -> Iterator[str]:
    yield from ["", f"## {_title(setting)}", ""]
    yield from report.table(
        " | test accuracy, % | than none, points | training loss | kB sent a step | ratio | "
        "whole run",
        (_method_row(setting, method) for method in setting.methods),
    )
    bits = "yes" if all(r.identical for m in setting.methods for r in setting.of(m)) else "**NO**"
    yield from ["", f"All replicas bit-identical at the end of every run: {bits}."]


def _method_row(setting: Setting, method: str) -> str:
    found = setting.of(method)
    than = setting.differences(method, DENSE, accuracy) if method != DENSE else []
    sent = [each.bytes_per_step(first_share(each)) for each in found]
    kilobytes = [each / 1e3 for each in sent if each is not None]
    return (
        f"{titles(setting.methods)[method]} | {spread(setting.points(method), 2)} | "
        f"{spread(than, 2, sign=True)} | {spread([loss(each) for each in found], 4)} | "
        f"{shown(mean(kilobytes), '{:.1f}')} | {times(setting.ratio(method))} | "
        f"{times(setting.ratio(method, whole=True))}"
    )


def _goals_table(compared: list[Setting]) -> Iterator[str]:
    rows = [
        _goal_row(method, setting)
        for setting in compared
        for method in setting.methods
        if Method.parse(method).family in GOALS and Method.parse(method).feedback is None
    ]
    head = " | images | goal: points below none | found | goal: ratio | found | reached"
    if rows:
        yield from ["", "## Goals", "", *report.table(head, rows, "lrrrrrl")]


def _goal_row(method: str, setting: Setting) -> str:
    goal, ratio = GOALS[Method.parse(method).family], setting.ratio(method)
    than = setting.differences(method, DENSE, accuracy)
    well = bool(than) and -statistics.fmean(than) <= goal.points and (ratio or 0) >= goal.ratio
    return (
        f"{_codec(method, setting)} | {setting.run.batch} | ≤ {goal.points} | "
        f"{spread([-each for each in than], 2, sign=True)} | ≥ {goal.ratio} | {times(ratio)} | "
        f"{report.yes(well)}"
    )


def _controls_table(compared: list[Setting]) -> Iterator[str]:
    rows = [
        _control_row(method, setting)
        for setting in compared
        for method in setting.methods
        if feeds_back(method) and setting.of(control_of(method))
    ]
    head = " | images | training loss | lower, seeds | test accuracy, points"
    if rows:
        yield from ["", "## With feedback less without", "", *report.table(head, rows)]


def _control_row(method: str, setting: Setting) -> str:
    losses = setting.differences(method, control_of(method), loss)
    points = setting.differences(method, control_of(method), accuracy)
    return (
        f"{_codec(method, setting)} | {setting.run.batch} | {spread(losses, 4, sign=True)} | "
        f"{sum(each < 0 for each in losses)} of {len(losses)} | {spread(points, 2, sign=True)}"
    )


def _rates_table(results: Sequence[Result]) -> Iterator[str]:
    """What the learning rates were chosen by: codec none alone."""
    found = [each for each in settings_of(results) if each.of(DENSE)]
    if len({each.run.batch for each in found}) == len(found):
        return
    yield from ["", "## Learning rates, codec none", ""]
    rows = (
        f"{each.run.batch} | {each.run.learning_rate:g} | "
        f"{spread([loss(result) for result in each.of(DENSE)], 4)} | "
        f"{spread(each.points(DENSE), 2)}"
        for each in found
    )
    yield from report.table("images | learning rate | training loss | test accuracy, %", rows, "r")


def _codec(method: str, setting: Setting) -> str:
    """The method's title where all are gradwire's."""
    return titles(setting.methods)[method].removeprefix("gradwire ")


def _title(setting: Setting) -> str:
    run = setting.run
    seeds = sorted({each.run.seed for method in setting.methods for each in setting.of(method)})
    return (
        f"{run.batch} images a rank and step, {setting.steps:,} steps ({run.epochs:g} epochs), "
        f"learning rate {run.learning_rate:g}, {len(seeds)} seed{'s'[: len(seeds) != 1]}"
    )


def draw(compared: Sequence[Setting], path: Path) -> None:
    """Above, accuracy over ratio; below, training loss with feedback and without."""
    columns = len(compared)
    with report.picture(path, 6.4 * columns, 9, 2, columns) as (_, axes):
        for column, setting in enumerate(compared):
            _draw_accuracies(axes[0][column], setting)
            _draw_losses(axes[1][column], setting)
            axes[0][column].set_title(f"{setting.run.batch} images a rank, {setting.steps:,} steps")


def _draw_accuracies(axes: Any, setting: Setting) -> None:
    dense = setting.points(DENSE)
    if dense:
        axes.axhline(statistics.fmean(dense), color="#777777", linestyle=":", label=DENSE)
    for method in setting.methods:
        ratio, points = setting.ratio(method), setting.points(method)
        if ratio is None:
            continue
        off = not feeds_back(method)
        error = statistics.stdev(points) if len(points) > 1 else 0
        colour = "#b3123a" if off else "#1463b0"
        axes.errorbar(
            ratio, statistics.fmean(points), error, fmt="x" if off else "o", color=colour, capsize=3
        )
        if Method.parse(method).feedback is None:
            axes.annotate(
                Method.parse(method).family,
                (ratio, statistics.fmean(points)),
                xytext=(5, 5),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set(xscale="log", xlabel="ratio (dense ring = 1)", ylabel="test accuracy, %")
    axes.margins(x=0.15)  # for the names
    axes.plot([], [], "o", color="#1463b0", label="with feedback")
    axes.plot([], [], "x", color="#b3123a", label="without")
    axes.legend(fontsize=8, loc="lower left")


def _draw_losses(axes: Any, setting: Setting) -> None:
    names = [each for each in setting.methods if feeds_back(each)]
    for place, method in enumerate(names):
        for name, marker, colour in (
            (control_of(method), "x", "#b3123a"),
            (method, "o", "#1463b0"),
        ):
            losses = [each for each in map(loss, setting.of(name)) if each is not None]
            axes.plot(losses, [place] * len(losses), marker, color=colour, alpha=0.7)
    axes.set_yticks(range(len(names)), labels=[_codec(each, setting) for each in names])
    axes.invert_yaxis()
    axes.set(xlabel="final training loss, one mark a seed")
