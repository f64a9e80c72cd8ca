"""Commands to the vectors that the shards hold, for `ParameterServer.ask`.

Beside the parameters, "w", the shards of a service with the rule `Staged()` hold named vectors of
the same elements. A coordinator gives commands by these names and gets numbers back; no vector
travels (Sandblaster: Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.2). Names
have 1 to 64 printable ASCII characters. A vector begins with the command that writes it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Dots:
    """Dot products of pairs of vectors: a list of floats.

    Products and sums are float64, in a fixed order, so the result has the same bits for any number
    of shards. It is NaN or infinite where a product or a sum is.
    """

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Absmax:
    """The largest absolute value in a vector: a float, NaN where an element is NaN."""

    name: str


@dataclass(frozen=True)
class Abssum:
    """The sum of the absolute values in a vector: a float, the same for any number of shards."""

    name: str


@dataclass(frozen=True)
class Combine:
    """Writes the sum of coefficient * source over (coefficient, source) pairs to a vector.

    Each element is summed in float64, in the order given, and rounded once. The target may be
    among the sources.
    """

    target: str
    terms: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Copy:
    """Writes the values of one vector to another; they are shared until either is changed."""

    target: str
    source: str


@dataclass(frozen=True)
class Drop:
    """Forgets a vector; "w" stays."""

    name: str


@dataclass(frozen=True)
class Names:
    """The names of all vectors, in alphabetical order; "w" is one of them."""


@dataclass(frozen=True)
class Fold:
    """Writes the sum of staged pushes of a batch to a vector, and forgets all pushes of the batch.

    `pushes` are (replica, sequence) pairs; each element is summed in float64, in the order given,
    and rounded once. One that is not there is an error which names it, and nothing is changed.
    Pushes of the batch that come later are acknowledged and dropped.
    """

    target: str
    batch: int
    pushes: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Discard:
    """Forgets the staged pushes of a batch, or those of all batches with None.

    Pushes of these batches that come later are acknowledged and dropped.
    """

    batch: int | None


Command = Dots | Absmax | Abssum | Combine | Copy | Drop | Names | Fold | Discard
