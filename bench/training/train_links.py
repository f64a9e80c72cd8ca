"""Accuracy over seconds on slow links, composed of two measurements.

A run has the same bits on any link. So the accuracy after a number of steps is measured once, by
train.py, and a step's time on a link by step_times.py, whose json is read here:
step_ms[link][method], with the batch size and the number of ranks that both must share. Where a run
began with another codec, those steps take as long as that codec's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import report
from bench.training import methods
from bench.training.train_report import Setting, first_share, settings_of
from bench.training.train_runs import Point, Result

_HOST, _EMULATED = "none", "emulated "  # links of step_times.py
_BELOW_DENSE = 1.0  # points: the accuracy whose time is told
_SHOWN = 25  # points below the best accuracy, in the picture


class Line(NamedTuple):
    """A method on a link."""

    method: str
    ms: float  # of a step
    first_ms: float  # of each of the first steps, before a biased codec
    first_steps: int
    curve: list[Point]  # accuracies are means over seeds

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.after(self.curve[-1].step)

    def after(self, steps: int) -> float:
        """Seconds of so many steps."""
        first = min(steps, self.first_steps)
        return (first * self.first_ms + (steps - first) * self.ms) / 1e3

    def reaches(self, accuracy: float) -> float | None:
        """Seconds to the first point with that accuracy; None if there is none."""
        step = next((each.step for each in self.curve if each.test_accuracy >= accuracy), None)
        return None if step is None else self.after(step)


def write(results: Sequence[Result], step_times: Path, output: Path) -> None:
    """Writes OUTPUT-seconds.md and .png; prints the tables. Raises ValueError for no common run."""
    found = json.loads(step_times.read_text())
    setting = _setting(results, found["batch"], found["ranks"])
    composed = {link: lines_on(setting, found["step_ms"][link]) for link in _links(found)}
    stem = output.with_name(output.name + "-seconds")
    text = "\n".join(_document(setting, composed, step_times.name, stem.name)) + "\n"
    report.save(stem, None, text)
    _draw(composed, report.beside(stem, ".png"))
    print(text)


def lines_on(setting: Setting, step_ms: Mapping[str, float]) -> list[Line]:
    """Of every method that was both timed and trained."""
    return [
        _line(timed, ms, step_ms.get(methods.FIRST, ms), setting.of(timed))
        for timed, ms in step_ms.items()
        if setting.of(timed)
    ]


def _line(method: str, ms: float, first_ms: float, results: Sequence[Result]) -> Line:
    first_steps = round(first_share(results[0]) * results[0].steps)
    return Line(method, ms, first_ms, first_steps, _mean_curve(results))


def _setting(results: Sequence[Result], batch: int, ranks: int) -> Setting:
    matching = [
        each
        for each in settings_of(results)
        if (each.run.batch, each.run.ranks) == (batch, ranks) and len(each.methods) > 1
    ]
    if len(matching) != 1:
        raise ValueError(
            f"{len(matching)} trainings compare methods with {batch} images a rank on {ranks} "
            "ranks, as the step times have; one is needed"
        )
    return matching[0]


def _links(found: Mapping[str, Any]) -> list[str]:
    """Shaped ones, or emulated ones where those were not measured."""
    slow = [each for each in found["step_ms"] if each != _HOST]
    return [each for each in slow if not each.startswith(_EMULATED)] or slow


def _mean_curve(results: Sequence[Result]) -> list[Point]:
    return [
        points[0]._replace(test_accuracy=statistics.fmean(each.test_accuracy for each in points))
        for points in zip(*(each.curve for each in results), strict=True)
    ]


def _document(
    setting: Setting, composed: Mapping[str, Sequence[Line]], source: str, name: str
) -> Iterator[str]:
    run = setting.run
    dense = statistics.fmean(setting.points("none")) - _BELOW_DENSE
    yield "# Accuracy over seconds on slow links"
    yield ""
    yield (
        f"{run.ranks} ranks, {run.batch} images a rank and step, {setting.steps:,} steps. The test "
        "accuracy after each step is the mean over seeds of `bench.training.train`'s unshaped "
        "runs, whose bits do not depend on links; a step's time on a link is the median in "
        f"`{source}`. *Steps as fast* compares a step with gloo DDP's; *whole run* counts the "
        f"steps with which biased codecs begin at the pace of {methods.FIRST}, which they use "
        "there."
    )
    yield from ["", f"![Test accuracy over seconds]({name}.png)"]
    for link, lines in composed.items():
        titles = methods.titles(each.method for each in lines)
        gloo = next((each for each in lines if each.method == methods.GLOO), None)
        yield from ["", f"## {link}", ""]
        rows = []
        for each in lines:
            steps = "–" if gloo is None else f"{gloo.ms / each.ms:.1f}×"
            whole = "–" if gloo is None else f"{gloo.seconds / each.seconds:.1f}×"
            rows.append(
                f"{titles[each.method]} | {each.ms:.1f} | {steps} | {each.seconds:.1f} | {whole} | "
                f"{100 * each.curve[-1].test_accuracy:.2f} | "
                f"{report.shown(each.reaches(dense / 100), '{:.1f}')}"
            )
        head = "| ms a step | steps as fast | s in all | whole run as fast | test accuracy, % | "
        yield from report.table(f"{head}s to {dense:.1f} %", rows)
    names = dict.fromkeys(each.method for lines in composed.values() for each in lines)
    yield from methods.legend(names)


def _draw(composed: Mapping[str, Sequence[Line]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(composed), figsize=(6.8 * len(composed), 5.2), squeeze=False, layout="constrained"
    )
    for panel, (link, lines) in zip(axes[0], composed.items(), strict=True):
        titles = methods.titles(each.method for each in lines)
        for each in lines:
            seconds = [each.after(point.step) for point in each.curve]
            accuracies = [100 * point.test_accuracy for point in each.curve]
            style = "--" if each.method in methods.PEERS else "-"
            panel.plot(seconds, accuracies, style, label=titles[each.method])
        best = 100 * max(each.curve[-1].test_accuracy for each in lines)
        panel.set(xscale="log", xlabel="seconds of training", title=link)
        panel.set_ylim(bottom=best - _SHOWN)
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("test accuracy, %")
    axes[0][-1].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
