"""Line searches: generators that take steps to try and are sent what the function is there.

A search yields `Probe`s, is sent a `Point` for each, and returns the one that it accepts, which is
the start where it found none that is lower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

C1, C2 = 1e-4, 0.9  # strong Wolfe: sufficient decrease, curvature
MOST_TRIALS = 25
_NARROWEST = 1e-9  # a bracket in which no parameter changes by more holds nothing to find


class Point(NamedTuple):
    """The function along the direction: at a step, its value and slope. Trial 0 is the start."""

    step: float
    loss: float
    slope: float
    trial: int


class Probe(NamedTuple):
    """A step to try, and the points that the search may return to."""

    step: float
    kept: tuple[Point, ...]


Trials = Generator[Probe, Point, Point]
Search = Callable[[Point, float, float], Trials]


def fixed(start: Point, step: float, _: float) -> Trials:
    """No search: takes the first step as it is."""
    return (yield Probe(step, (start,)))


def strong_wolfe(start: Point, step: float, largest: float) -> Trials:
    """Finds a step with the strong Wolfe conditions, c1 = 1e-4 and c2 = 0.9.

    Nocedal & Wright 2006, "Numerical Optimization", algorithms 3.5 and 3.6, with cubic steps (eq.
    3.59) and the safeguards of minFunc, which torch.optim.LBFGS has too. `largest` is the largest
    absolute component of the direction.
    """
    before = start
    point = yield Probe(step, (start,))
    for trials in range(MOST_TRIALS):
        if _too_high(point, start) or (trials > 1 and point.loss >= before.loss):
            break
        if _is_flat(point, start):
            return point
        if point.slope >= 0:
            break
        bounds = (point.step + 0.01 * (point.step - before.step), 10 * point.step)
        step = cubic_minimum(before, point, bounds)
        before, point = point, (yield Probe(step, (start, point)))
    else:
        return point if point.loss < start.loss else start
    return (yield from _zoom(start, [before, point], largest, MOST_TRIALS - trials))


def _zoom(start: Point, bracket: list[Point], largest: float, trials: int) -> Trials:
    """Narrows a bracket around a good step; its order is that in which the ends were found."""
    low = 0 if bracket[0].loss <= bracket[1].loss else 1
    was_close = False
    for _ in range(trials):
        first, last = sorted(each.step for each in bracket)
        if (last - first) * largest < _NARROWEST:
            break
        step = cubic_minimum(bracket[0], bracket[1], (first, last))
        step, was_close = _away_from_ends(step, first, last, was_close)
        point = yield Probe(step, (start, *bracket))
        if _too_high(point, start) or point.loss >= bracket[low].loss:
            bracket[1 - low] = point
            low = 0 if bracket[0].loss <= bracket[1].loss else 1
            continue
        if _is_flat(point, start):
            return point
        if point.slope * (bracket[1 - low].step - bracket[low].step) >= 0:
            bracket[1 - low] = bracket[low]
        bracket[low] = point
    return bracket[low]


def _away_from_ends(step: float, first: float, last: float, was_close: bool) -> tuple[float, bool]:
    """The step, moved into the bracket where it came too close to an end for the second time."""
    margin = 0.1 * (last - first)
    if min(last - step, step - first) >= margin:
        return step, False
    if not was_close and first < step < last:
        return step, True
    return (last - margin if abs(step - last) < abs(step - first) else first + margin), False


def _too_high(point: Point, start: Point) -> bool:
    return point.loss > start.loss + C1 * point.step * start.slope


def _is_flat(point: Point, start: Point) -> bool:
    return abs(point.slope) <= -C2 * start.slope


def cubic_minimum(one: Point, other: Point, bounds: tuple[float, float]) -> float:
    """Finds where the cubic through two points with their slopes is least, within bounds.

    Nocedal & Wright 2006, eq. 3.59. The middle where it has no minimum.
    """
    if one.step > other.step:
        one, other = other, one
    mean = one.slope + other.slope - 3 * (one.loss - other.loss) / (one.step - other.step)
    square = mean * mean - one.slope * other.slope
    root = math.sqrt(square) if 0 <= square < math.inf else math.nan
    below = other.slope - one.slope + 2 * root
    share = (other.slope + root - mean) / below if below else math.nan
    if not math.isfinite(share):
        return (bounds[0] + bounds[1]) / 2
    step = other.step - (other.step - one.step) * share
    return min(max(step, bounds[0]), bounds[1])
