"""What one training is, and what came of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.training.train_runs import sent_per_step

_POLY = 0.5  # FireCaffe's exponent (Iandola 2016)


class Trial(NamedTuple):
    """All settings of a training; together with the code they decide its result."""

    task: str  # of tasks.TASKS
    optimizer: str  # of torch_optimizers.OPTIMIZERS
    exchange: str  # how ranks average: see exchanges.py
    rate: float  # the highest learning rate
    batch: int  # examples a step, of all ranks
    steps: int
    seed: int  # of the parameters and of the order of examples
    schedule: str = "cosine"  # how the rate falls to 0: or "linear", or "poly", its square root
    warm_up: float = 0.1  # share of the steps in which the rate rises
    first: float = 0.2  # share of the steps before compression that needs a beginning without it
    clip: float | None = None  # the highest L2 norm of a gradient
    ranks: int = 4
    points: int = 4  # about so many of the curve
    weight_decay: float | None = None  # None: as the optimizer has it
    epochs: float | None = None  # of which the steps were made, where they were
    data: str = ""  # the name of a directory of images; "": the usual ones
    link: str = ""  # of GRADWIRE_LINK, where steps are timed; results do not depend on it

    @property
    def first_steps(self) -> int:
        """Before compression."""
        return round(self.first * self.steps)

    def rate_factor(self, step: int) -> float:
        """Of the highest learning rate, at a step from 0; 0 once all steps are done."""
        rising = round(self.warm_up * self.steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        left = max(0.0, (self.steps - step) / (self.steps - rising))
        if self.schedule == "poly":
            return left**_POLY
        return left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2

    def measured(self, every: int = 1) -> set[int]:
        """The steps after which is measured: multiples of `every`, and the last one."""
        apart = max(1, self.steps // self.points)
        wanted = {*range(apart, self.steps, apart), self.steps, self.first_steps}
        return {min(-(-step // every) * every, self.steps) for step in wanted if step > 0}


class Point(NamedTuple):
    """Where a training stood after some steps; None is what is not finite or not to be known."""

    step: int
    loss: float | None  # mean cross-entropy of what is not trained with
    accuracy: float  # share of it that is predicted right
    training_loss: float | None  # of the batches since the point before
    bytes: float | None  # sent per rank so far, mean over ranks


class Outcome(NamedTuple):
    """What came of a trial."""

    run: Trial
    data: str
    parameters: int
    curve: list[Point]
    identical: bool  # the replicas' bits at the end
    seconds_per_step: float  # median after the first share, whatever else the machine did
    finished: str  # UTC
    versions: dict[str, str]

    @property
    def loss(self) -> float:
        """At the end; infinite where it is not finite."""
        loss = self.curve[-1].loss
        return math.inf if loss is None else loss

    @property
    def accuracy(self) -> float:
        """At the end, in percent."""
        return 100 * self.curve[-1].accuracy

    @property
    def bytes(self) -> float | None:
        """Sent per rank in the whole run."""
        return self.curve[-1].bytes

    @property
    def dense_bytes(self) -> float:
        """What a ring sends per rank and step of float32 gradients, without headers."""
        return 2 * (self.run.ranks - 1) / self.run.ranks * 4 * self.parameters

    def sent(self, *, whole: bool = False) -> float | None:
        """Bytes per rank and step, after the first share of the steps or of the whole run."""
        return sent_per_step(self.curve, 0 if whole else self.run.first_steps)

    def ratio(self, *, whole: bool = False) -> float | None:
        """Dense bytes over sent bytes, likewise."""
        sent = self.sent(whole=whole)
        return self.dense_bytes / sent if sent else None

    def reaches(self, accuracy: float) -> Point | None:
        """The first point with that share predicted right."""
        return next((each for each in self.curve if each.accuracy >= accuracy), None)


def read(path: Path) -> list[Outcome]:
    """Every outcome in a file, none if there is no file; raises OSError and ValueError."""
    if not path.exists():
        return []
    return [_outcome(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _outcome(line: dict[str, Any]) -> Outcome:
    known = {"run": Trial(**line["run"]), "curve": [Point(*each) for each in line["curve"]]}
    return Outcome(**{**line, **known})


def best_rate(
    outcomes: Iterable[Outcome],
    trial: Trial,
    by: Callable[[Outcome], float] = lambda each: each.loss,
) -> float | None:
    """Of the trials that differ from this one in nothing but the rate, that of the least loss.

    Or the least of something else; None if there is no such trial.
    """
    alike = trial._replace(rate=0.0)
    found = [each for each in outcomes if each.run._replace(rate=0.0) == alike]
    return min(found, key=by).run.rate if found else None
