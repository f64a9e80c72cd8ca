"""The line search of L-BFGS-B: Moré & Thuente 1994, "Line search algorithms with guaranteed
sufficient decrease", ACM TOMS 20(3), with the constants of Zhu et al. 1997 (algorithm 778).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.serve._sandblaster.searches import Point, Probe, Trials

DECREASE, CURVATURE, NARROWEST = 1e-3, 0.9, 0.1
LONGEST = 1e10
MOST_TRIALS = 20


class _End(NamedTuple):
    """An end of the interval, and the point there; the loss and slope may be shifted ones."""

    step: float
    loss: float
    slope: float
    point: Point

    def less(self, slope: float) -> _End:
        """The same of the function less a line of this slope."""
        return self._replace(loss=self.loss - self.step * slope, slope=self.slope - slope)


def more_thuente(start: Point, step: float, _: float) -> Trials:
    """Finds a step with the strong Wolfe conditions, 1e-3 and 0.9, as scipy's L-BFGS-B does."""
    line = DECREASE * start.slope
    best = other = _End(0.0, start.loss, start.slope, start)
    bracketed, easy = False, False
    least, most = 0.0, 5 * step
    width, older_width = LONGEST, 2 * LONGEST
    for _trial in range(MOST_TRIALS):
        point = yield Probe(step, (start,))
        limit = start.loss + step * line
        easy = easy or (point.loss <= limit and point.slope >= 0)
        stuck = bracketed and (step <= least or step >= most or most - least <= NARROWEST * most)
        at_end = step == LONGEST and point.loss <= limit and point.slope <= line
        flat = abs(point.slope) <= CURVATURE * -start.slope
        if stuck or at_end or (point.loss <= limit and flat):
            return point
        new = _End(step, point.loss, point.slope, point)
        shift = line if not easy and limit < point.loss <= best.loss else 0.0
        step, bracketed, best, other = _narrowed(
            best.less(shift), other.less(shift), new.less(shift), bracketed, (least, most)
        )
        best, other = best.less(-shift), other.less(-shift)
        if not math.isfinite(step):  # no cubic has an infinite loss
            step = best.step + 0.5 * (other.step - best.step)
        if bracketed:
            if abs(other.step - best.step) >= 0.66 * older_width:
                step = best.step + 0.5 * (other.step - best.step)
            older_width, width = width, abs(other.step - best.step)
            least, most = sorted((best.step, other.step))
        else:
            least, most = (step + by * (step - best.step) for by in (1.1, 4.0))
        step = min(max(step, 0.0), LONGEST)
        if bracketed and (step <= least or step >= most or most - least <= NARROWEST * most):
            step = best.step
    return start


def _narrowed(
    best: _End, other: _End, new: _End, bracketed: bool, bounds: tuple[float, float]
) -> tuple[float, bool, _End, _End]:
    """The next step, whether it is bracketed, and the interval's ends: section 4 of the paper."""
    turned = new.slope * math.copysign(1.0, best.slope) < 0
    if new.loss > best.loss:
        return _between(best, new), True, best, new
    if turned:
        cubic = _cubic(new, best, back=True)
        secant = _secant(new, best)
        far = abs(cubic - new.step) > abs(secant - new.step)
        return (cubic if far else secant), True, new, best
    if abs(new.slope) < abs(best.slope):
        step = _flatter(best, other, new, bracketed, bounds)
    elif bracketed:
        step = _cubic(new, other, back=True)
    else:
        step = bounds[1] if new.step > best.step else bounds[0]
    return step, bracketed, new, other


def _between(best: _End, new: _End) -> float:
    """A step in case 1, a higher value: of the cubic's and the quadratic's, near the best."""
    length = new.step - best.step
    cubic = _cubic(best, new, back=False)
    slope = (best.loss - new.loss) / length + best.slope
    quadratic = best.step + best.slope / slope / 2 * length
    if abs(cubic - best.step) < abs(quadratic - best.step):
        return cubic
    return cubic + (quadratic - cubic) / 2


def _flatter(
    best: _End, other: _End, new: _End, bracketed: bool, bounds: tuple[float, float]
) -> float:
    """A step in case 3: lower and flatter, so the minimum is further along."""
    theta, gamma = _cubic_terms(best, new, floor=True)
    gamma = -gamma if new.step > best.step else gamma
    p = (gamma - new.slope) + theta
    q = (gamma + (best.slope - new.slope)) + gamma
    share = p / q
    if share < 0 and gamma != 0:
        cubic = new.step + share * (best.step - new.step)
    else:
        cubic = bounds[1] if new.step > best.step else bounds[0]
    secant = _secant(new, best)
    nearer = abs(cubic - new.step) < abs(secant - new.step)
    if not bracketed:
        step = cubic if abs(cubic - new.step) > abs(secant - new.step) else secant
        return min(max(step, bounds[0]), bounds[1])
    step = cubic if nearer else secant
    end = new.step + 0.66 * (other.step - new.step)
    return min(end, step) if new.step > best.step else max(end, step)


def _cubic(one: _End, two: _End, *, back: bool) -> float:
    """The minimum of the cubic through two ends, from `one`; `back`: `one` is the new point."""
    theta, gamma = _cubic_terms(one, two)
    if (one.step > two.step) if back else (two.step < one.step):
        gamma = -gamma
    p = (gamma - one.slope) + theta
    q = ((gamma - one.slope) + gamma) + two.slope
    return one.step + p / q * (two.step - one.step)


def _cubic_terms(one: _End, two: _End, *, floor: bool = False) -> tuple[float, float]:
    theta = 3 * (one.loss - two.loss) / (two.step - one.step) + one.slope + two.slope
    scale = max(abs(theta), abs(one.slope), abs(two.slope))
    square = (theta / scale) ** 2 - one.slope / scale * (two.slope / scale)
    return theta, scale * math.sqrt(max(0.0, square) if floor else square)


def _secant(new: _End, best: _End) -> float:
    return new.step + new.slope / (new.slope - best.slope) * (best.step - new.step)
