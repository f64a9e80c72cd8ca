"""L-BFGS at a coordinator that holds no vectors: it gives shards commands on named ones.

Vectors: "w", the parameters that replicas read; "x0" and "x1", in turns those at which an iteration
begins; "d", the direction; "s0", "y0", "s1", ... the history; "g0", "g1", ... gradients. Beside its
evaluations an iteration waits for one round trip a trial, which moves "w"; the inner products ride
on the end of each evaluation. What the last `state()` names is not overwritten before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from gradwire._errors import InvalidArgument
from gradwire.serve._sandblaster.history import History, Pair
from gradwire.serve._sandblaster.searches import Point, Search, strong_wolfe
from gradwire.serve._vectors import (
    Absmax,
    Abssum,
    Combine,
    Command,
    Copy,
    Dots,
)

Ask = Callable[[Sequence[Command]], list[Any]]


class Evaluate(Protocol):
    """Computes the loss and the gradient at "w" over the batch."""

    def __call__(self, target: str, then: Sequence[Command]) -> tuple[float, list[Any]]:
        """Writes the gradient to `target`; returns the loss and the results of more commands."""


@dataclass(frozen=True)
class Iteration:
    """One iteration: the loss at its end, and what it took.

    `step` is the length along the direction, 0 where no lower loss was found; `gradient` is the
    largest absolute component of the gradient. `converged` says that no lower loss was found along
    the gradient either.
    """

    loss: float
    gradient: float
    step: float
    evaluations: int
    converged: bool


@dataclass(frozen=True)
class _Trial:
    """A point that was evaluated: its parameters and gradient by name, and ‖g‖∞, ‖g‖₁ and ‖g‖₂²."""

    loss: float
    x: str
    gradient: str
    largest: float
    total: float
    square: float

    def __post_init__(self) -> None:
        """Raises TypeError for other types, which a state may have."""
        for name, value in vars(self).items():
            if type(value) is not (str if name in ("x", "gradient") else float):
                raise TypeError(f"{name} is {value!r}")


class Minimizer:
    """The L-BFGS iteration: its state are scalars, inner products and names."""

    def __init__(
        self,
        ask: Ask,
        evaluate: Evaluate,
        *,
        history: int = 10,
        search: Search = strong_wolfe,
        lr: float = 1.0,
        by_norm: bool = False,
    ) -> None:
        """Takes 1/‖g‖₂ as the first step `by_norm`, as L-BFGS-B does, in place of 1/‖g‖₁."""
        self._ask, self._evaluate = ask, evaluate
        self._search, self._lr, self._by_norm = search, lr, by_norm
        self.history = History(history)
        self._first = True  # whether the next step is of unknown length
        self._at: _Trial | None = None  # the start of the next iteration; None: not evaluated
        self._x: str | None = None  # where it begins; None: where "w" is
        self._moved = False  # whether "w" is at a trial

    def new_batch(self) -> None:
        """The batch has changed: the gradient is computed anew, the history stays."""
        self._at = None

    def step(self) -> Iteration:
        """Does one iteration; afterwards "w" is where it ended."""
        evaluations = 0
        if self._at is None:
            self._at, evaluations = self._begin(), 1
        start = self._at
        if start.largest == 0:
            return Iteration(start.loss, 0.0, 0.0, evaluations, converged=True)
        terms, slope = self.history.direction(start.gradient)
        if not slope < 0:
            self._forget()
            terms, slope = self.history.direction(start.gradient)
        line = _Line(self, start)
        step = line.search(terms, slope, self._first_step(start))
        evaluations += line.evaluations
        if line.accepted is start:
            self._ask([Copy("w", start.x)])
            self._moved = False
            converged = not self.history.pairs
            self._forget()
            return Iteration(start.loss, start.largest, 0.0, evaluations, converged)
        self.history.add(line.pair)
        self._first, self._at = False, line.accepted
        self._x, self._moved = self._at.x, False
        return Iteration(self._at.loss, self._at.largest, step, evaluations, converged=False)

    def state(self) -> dict[str, Any]:
        """The state between two iterations, for a file: what `load()` takes later."""
        at = None if self._at is None else asdict(self._at)
        return {"first": self._first, "at": at, **self.history.state()}

    def load(self, state: Mapping[str, Any], names: Iterable[str]) -> None:
        """Goes on from a state; `names` are the vectors that the shards have.

        Raises InvalidArgument where it is no such state, or of other shards.
        """
        self.history.load(state)
        at = state.get("at")
        try:
            self._at = None if at is None else _Trial(**at)
        except TypeError as error:
            raise InvalidArgument(f"this is no state of a minimizer: {error}") from None
        wanted = set(self.history.vectors)
        if self._at is not None:
            self._x = self._at.x
            wanted |= {self._at.x, self._at.gradient}
        if missing := sorted(wanted - set(names)):
            raise InvalidArgument(f"the shards do not have {missing[0]!r}: were they started anew?")
        self._require_history()
        self._first = bool(state.get("first", True))
        if self._at is not None:
            dots = self.history.wanted(self._at.gradient, None)
            found = self._ask([Copy("w", self._at.x), Dots(dots)])
            self.history.note(dots, found[1])

    def _begin(self) -> _Trial:
        """Evaluates where the last iteration has ended, or at "w" before the first one."""
        if self._moved and self._x is not None:
            self._ask([Copy("w", self._x)])
            self._moved = False
        x, gradient = self._x or "x0", "g0"
        dots = self.history.wanted(gradient, None)
        loss, found = self._evaluate(
            gradient, [Copy(x, "w"), Dots(dots), Absmax(gradient), Abssum(gradient)]
        )
        _, products, largest, total = found
        self.history.note(dots, products)
        self._x = x
        return _Trial(float(loss), x, gradient, largest, total, products[0])

    def _require_history(self) -> None:
        """Raises InvalidArgument where the shards' vectors are not those of the history."""
        names = self.history.vectors
        pairs = [(one, two) for i, one in enumerate(names) for two in names[i:]]
        if not pairs:
            return
        (found,) = self._ask([Dots(pairs)])
        gram = self.history.gram(names)[np.triu_indices(len(names))]
        if not np.allclose(found, gram, rtol=1e-9, atol=0):
            raise InvalidArgument("the shards have another history: has another run used them?")

    def _forget(self) -> None:
        self.history.forget()
        self._first = True

    def _first_step(self, start: _Trial) -> float:
        if not self._first:
            return self._lr
        if self._by_norm:
            return self._lr / math.sqrt(start.square)
        return self._lr * min(1.0, 1.0 / start.total)


class _Line:
    """One line search: trials along the direction, of which one is accepted."""

    def __init__(self, owner: Minimizer, start: _Trial) -> None:
        self._owner, self._start = owner, start
        self.accepted = start
        self.pair: Pair = owner.history.free()
        self._x = "x1" if start.x == "x0" else "x0"
        self._trials = {0: start}  # those that may still be accepted
        self.evaluations = 0

    def search(self, terms: Sequence[tuple[float, str]], slope: float, step: float) -> float:
        """Tries steps, the first one `step`, and returns the one that is accepted."""
        begin: list[Command] = [Combine("d", terms), Absmax("d"), self._move(step)]
        self._owner._moved = True
        _, largest, _ = self._owner._ask(begin)
        origin = Point(0.0, self._start.loss, slope, 0)
        trials = self._owner._search(origin, step, largest)
        next(trials)
        try:
            while True:
                probe = trials.send(self._evaluate(step))
                kept = {0, *(each.trial for each in probe.kept)}
                self._trials = {n: each for n, each in self._trials.items() if n in kept}
                step = probe.step
                self._owner._ask([self._move(step)])
        except StopIteration as ended:
            found: Point = ended.value
        self.accepted = self._trials[found.trial]
        if found.trial not in (0, self.evaluations):
            self._go_back(found.step)
        return found.step

    def _move(self, step: float) -> Command:
        return Combine("w", [(1.0, self._start.x), (step, "d")])

    def _evaluate(self, step: float) -> Point:
        """Evaluates at "w"; on its end ride the slope, and all that is needed if it is accepted."""
        self.evaluations += 1
        used = {each.gradient for each in self._trials.values()}
        gradient = next(name for i in range(len(used) + 1) if (name := f"g{i}") not in used)
        dots, then = self._products(gradient, step)
        loss, found = self._owner._evaluate(
            gradient, [Dots([(gradient, "d")]), Absmax(gradient), Abssum(gradient), *then]
        )
        (slope,), largest, total = found[:3]
        self._owner.history.note(dots, found[-1])
        square = found[-1][0]
        self._trials[self.evaluations] = _Trial(
            float(loss), self._x, gradient, largest, total, square
        )
        return Point(step, loss, slope, self.evaluations)

    def _products(self, gradient: str, step: float) -> tuple[list[tuple[str, str]], list[Command]]:
        """The commands that make the pair to a trial, and the inner products with it."""
        dots = self._owner.history.wanted(gradient, self.pair)
        change = [(1.0, gradient), (-1.0, self._start.gradient)]
        return dots, [
            Copy(self._x, "w"),
            Combine(self.pair.s, [(step, "d")]),
            Combine(self.pair.y, change),
            Dots(dots),
        ]

    def _go_back(self, step: float) -> None:
        """Moves to a trial that was not the last one."""
        dots, then = self._products(self.accepted.gradient, step)
        found = self._owner._ask([self._move(step), *then])
        self._owner.history.note(dots, found[-1])
