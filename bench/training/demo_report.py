"""What demo.py shows of its trainings: two tables and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_WIDTH = 16  # of a title


class Row(NamedTuple):
    """A training by one method; the same on every rank, but for the times."""

    title: str
    seconds: list[float]  # of each step
    first_steps: int  # of them, in int8: before a biased codec
    first_share: float  # of a longer training that begins so
    megabytes: float | None  # sent per rank and step after those; None: not to be known
    accuracy: float
    identical: bool  # the replicas' bits
    curve: list[tuple[float, float]]  # seconds of training, and test accuracy then

    @property
    def step(self) -> float:
        """Seconds of a step, median of those after the first."""
        return statistics.median(self.seconds[self.first_steps :])

    def after(self, steps: int) -> float:
        """Seconds of so many steps at this pace, the first of them in int8."""
        first = self.first_share and statistics.median(self.seconds[: self.first_steps])
        return steps * (self.first_share * first + (1 - self.first_share) * self.step)


def link_table(rows: Sequence[Row], link: str, seconds: float, epoch: int) -> list[str]:
    """Trainings of the same seconds over a link; an epoch is so many steps."""
    slowest = rows[0].after(epoch)
    lines = [
        f"Over {link}: {seconds:g} s of training by each method",
        "",
        f"{'':{_WIDTH}}  ms/step  MB sent/step  steps  test accuracy   replicas  s/epoch  s saved",
    ]
    for each in rows:
        ended = each.after(epoch)
        saved = "" if each is rows[0] else f"{slowest - ended:.0f}".replace("-", "−")
        lines.append(
            f"{_begin(each)}  {len(each.seconds):5}  {_end(each)}  {ended:7.0f}  {saved:>7}"
        )
    lines += ["", "Steps and accuracy are those of the same seconds. MB sent: by a rank."]
    return [*lines, f"s/epoch: of {epoch:,} steps, from ms/step. Replicas: by all their bits."]


def host_table(rows: Sequence[Row], steps: int) -> list[str]:
    """Trainings of the same steps."""
    lines = [
        f"Over shared memory, where there is nothing to win: {steps} steps by each method",
        "",
        f"{'':{_WIDTH}}  ms/step  MB sent/step      s  test accuracy   replicas",
    ]
    return lines + [f"{_begin(each)}  {sum(each.seconds):5.1f}  {_end(each)}" for each in rows]


def _begin(row: Row) -> str:
    megabytes = "–" if row.megabytes is None else f"{row.megabytes:.3f}"
    return f"{row.title:{_WIDTH}}  {row.step * 1e3:7.1f}  {megabytes:>12}"


def _end(row: Row) -> str:
    return f"{row.accuracy:13.1%}  {'identical' if row.identical else 'DIFFERENT'}"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes accuracy over seconds, a line a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        seconds, accuracies = zip(*row.curve, strict=True)
        label = f"{row.title}: {row.step * 1e3:.0f} ms a step"
        axes.plot(seconds, [100 * each for each in accuracies], marker=".", label=label)
    axes.set(title=title, xlabel="seconds of training", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
