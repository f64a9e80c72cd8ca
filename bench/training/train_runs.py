"""What train.py trains, and the file of what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MOMENTUM = 0.9
WARM_UP = 0.05  # of the steps
_POINTS_PER_EPOCH = 10
_FIRST_POINTS = (5, 10, 20, 40)


class Run(NamedTuple):
    """All settings of one training run; together with the code they decide its result."""

    method: str  # of methods.Method
    batch: int  # images per rank and step
    seed: int  # of the parameters and of the order of images
    epochs: float
    learning_rate: float  # the highest: it rises in the warm-up and falls to 0, linearly
    warm_up: float  # share of the steps: before a biased codec, unless the method says another
    ranks: int
    algorithm: str
    data: str

    def steps(self, count: int) -> int:
        """For so many images."""
        return int(self.epochs * self.steps_per_epoch(count))

    def steps_per_epoch(self, count: int) -> int:
        """Whole batches of all ranks."""
        return count // (self.batch * self.ranks)

    def warm_up_steps(self, count: int) -> int:
        """The first ones."""
        return round(self.warm_up * self.steps(count))

    def learning_rate_factor(self, step: int, count: int) -> float:
        """At a step, from 0."""
        steps, rising = self.steps(count), self.warm_up_steps(count)
        return min((step + 1) / (rising + 1), (steps - step) / (steps - rising))

    def points(self, count: int) -> list[int]:
        """The steps after which the accuracy is measured; the last one is among them."""
        steps, each = self.steps(count), max(1, self.steps_per_epoch(count) // _POINTS_PER_EPOCH)
        regular = range(each, steps, each)
        first = (step for step in (*_FIRST_POINTS, self.warm_up_steps(count)) if 0 < step < steps)
        return sorted({*regular, *first, steps})


class Point(NamedTuple):
    """Where a run stood after some steps."""

    step: int
    test_accuracy: float
    loss: float | None  # of the batches since the point before, mean; None where not finite
    bytes: float | None  # sent per rank so far, mean over ranks; None: not to be known


class Result(NamedTuple):
    """What came of a run."""

    run: Run
    parameters: int
    test_accuracy: float
    training_loss: float | None  # of all training images at the end; None where not finite
    identical: bool  # the replicas' bits at the end
    seconds_per_step: float  # median, on whatever else the machine did
    curve: list[Point]
    finished: str  # UTC
    versions: dict[str, str]

    @property
    def steps(self) -> int:
        """All of them."""
        return self.curve[-1].step

    @property
    def dense_bytes(self) -> float:
        """What a ring sends per rank and step of float32 gradients, without headers."""
        return 2 * (self.run.ranks - 1) / self.run.ranks * 4 * self.parameters

    def bytes_per_step(self, after: float = 0) -> float | None:
        """Sent per rank, on average over the steps after the first `after` (a share) of them."""
        return sent_per_step(self.curve, after * self.steps)

    def ratio(self, after: float = 0) -> float | None:
        """Dense bytes over sent bytes."""
        sent = self.bytes_per_step(after)
        return self.dense_bytes / sent if sent else None


class Sent(Protocol):
    """A point of a curve."""

    @property
    def step(self) -> int:
        """After which it was."""

    @property
    def bytes(self) -> float | None:
        """Sent until then; None: not to be known."""


def sent_per_step(curve: Sequence[Sent], after: float) -> float | None:
    """Bytes, on average over the steps from the first point that has so many steps or more."""
    start = Point(0, 0, 0, 0)
    ended, began = curve[-1], next(each for each in (start, *curve) if each.step >= after)
    if ended.bytes is None or began.bytes is None:
        return None
    return (ended.bytes - began.bytes) / (ended.step - began.step)


def finite(value: float) -> float | None:
    """As JSON can hold it."""
    return value if math.isfinite(value) else None


def append(path: Path, result: Result) -> None:
    """In one write, so that the file has whole lines whatever ends the process."""
    line: dict[str, Any] = {**result._asdict(), "run": result.run._asdict()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def read_results(path: Path) -> list[Result]:
    """Of every run; raises OSError and ValueError."""
    return [_result(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _result(line: dict[str, Any]) -> Result:
    read = {"run": Run(**line["run"]), "curve": [Point(*each) for each in line["curve"]]}
    return Result(**{**line, **read})
