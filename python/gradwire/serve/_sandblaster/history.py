"""The direction of L-BFGS from inner products alone: no vector is read here.

Chen, Wang & Zhou 2014, "Large-scale L-BFGS using MapReduce" (VL-BFGS), sec. 3: the direction is a
linear combination of the 2m + 1 vectors s_i, y_i and g, so the two-loop recursion (Nocedal & Wright
2006, algorithm 7.4) needs only their inner products, the Gram matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradwire._errors import InvalidArgument

LEAST_CURVATURE = 1e-10  # of y·s; pairs with less are skipped


class Pair(NamedTuple):
    """The vectors of one past step, by name: the step s, and the change y of the gradient."""

    s: str
    y: str


class History:
    """The last pairs, and the inner products of all their vectors and the gradient."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.pairs: list[Pair] = []
        self._names = {f"{kind}{i}" for i in range(most + 1) for kind in "sy"}
        self._dots: dict[tuple[str, str], float] = {}
        self._saved: set[str] = set()  # of the last state: not overwritten before the next one

    def free(self) -> Pair:
        """A pair of names that is not in use: one more is reserved than pairs are kept.

        In the step after a state it is not one of the state's either.
        """
        used = {each.s for each in self.pairs}
        unused = [i for i in range(self.most + 1) if f"s{i}" not in used]
        number = min(unused, key=lambda i: (f"s{i}" in self._saved, i))
        return Pair(f"s{number}", f"y{number}")

    @property
    def vectors(self) -> list[str]:
        """The names of all vectors, the oldest pair first."""
        return [name for pair in self.pairs for name in pair]

    def wanted(self, gradient: str, new: Pair | None) -> list[tuple[str, str]]:
        """The inner products to ask for when there is a new gradient, and maybe a new pair."""
        fresh = [gradient, *(new or ())]
        old = self.vectors
        among = [(one, two) for i, one in enumerate(fresh) for two in fresh[i:]]
        return [*among, *((one, two) for one in fresh for two in old)]

    def note(self, pairs: Iterable[tuple[str, str]], dots: Iterable[float]) -> None:
        """Takes the inner products of `wanted()`."""
        for (one, two), value in zip(pairs, dots, strict=True):
            self._dots[one, two] = self._dots[two, one] = value

    def add(self, pair: Pair) -> bool:
        """Takes a new pair for the oldest one; returns False for one without curvature."""
        if not self._dots[pair.y, pair.s] > LEAST_CURVATURE:
            return False
        self.pairs = [*self.pairs, pair][-self.most :]
        return True

    def forget(self) -> None:
        """Forgets all pairs."""
        self.pairs = []

    def direction(self, gradient: str) -> tuple[list[tuple[float, str]], float]:
        """The coefficients of the direction -H g, and its slope: the inner product with g."""
        names = [*self.vectors, gradient]
        gram = self.gram(names)
        index = {name: i for i, name in enumerate(names)}
        found = np.zeros(len(names))
        found[-1] = -1.0
        taken = []
        for pair in reversed(self.pairs):
            s, y = index[pair.s], index[pair.y]
            share = float(gram[s] @ found) / gram[s, y]
            found[y] -= share
            taken.append((pair, share))
        if self.pairs:
            s, y = index[self.pairs[-1].s], index[self.pairs[-1].y]
            found *= gram[s, y] / gram[y, y]
        for pair, share in reversed(taken):
            s, y = index[pair.s], index[pair.y]
            found[s] += share - float(gram[y] @ found) / gram[s, y]
        terms = [(float(each), name) for each, name in zip(found, names, strict=True)]
        return terms, float(gram[-1] @ found)

    def gram(self, names: list[str]) -> np.ndarray[Any, Any]:
        """The Gram matrix of these vectors, float64."""
        return np.array([[self._dots[one, two] for two in names] for one in names])

    def state(self) -> dict[str, Any]:
        """Names and inner products, for a state file."""
        names = self.vectors
        self._saved = {each.s for each in self.pairs}
        return {"pairs": [list(pair) for pair in self.pairs], "gram": self.gram(names).tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes a result of `state()`; raises InvalidArgument for anything else."""
        try:
            pairs = [Pair(str(s), str(y)) for s, y in state["pairs"]]
            size = 2 * len(pairs)
            gram = np.array(state["gram"], np.float64).reshape(size, size)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"this is no state of a history: {error}") from None
        names = [name for pair in pairs for name in pair]
        kept = pairs[-self.most :]
        ours = {name for pair in kept for name in pair} <= self._names
        if len(set(names)) < size or not ours:
            raise InvalidArgument(
                f"the history has the vectors {', '.join(names)[:200]}, of which not all are those "
                f"of history={self.most}"
            )
        self.pairs = kept
        self._saved = {each.s for each in kept}
        self._dots = {
            (one, two): float(gram[i, j])
            for i, one in enumerate(names)
            for j, two in enumerate(names)
        }
