"""Commands to the vectors that the shards hold, for `ParameterServer._command`.

Beside the parameters, "w", the shards of a service with the rule `Coordinated()` hold named vectors
of the same elements. A coordinator gives commands by these names and gets numbers back; no vector
travels (Sandblaster: Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.2). Names
have 1 to 64 printable ASCII characters. A vector begins with the command that writes it first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire._base import arguments
from gradwire._errors import InvalidArgument

MOST_PUSHES = 8000  # of one Fold, so that it fits into a message of the core
_Result = tuple[list[list[float]], list[str]]  # of one command on one shard


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
    """The names of the vectors that all shards hold, in alphabetical order; "w" is one of them."""


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


def pack(commands: Sequence[Command]) -> list[tuple[Any, ...]]:
    """The commands in the words of the core; raises InvalidArgument for what is none."""
    given = arguments.items(commands, "commands", "a list of commands such as Dots([('a', 'b')])")
    return [_pack(each) for each in given]


def unpack(commands: Sequence[Command], shards: Sequence[Sequence[_Result]]) -> list[Any]:
    """The results of commands, from those of all shards."""
    return [_unpack(command, results) for command, *results in zip(commands, *shards, strict=True)]


def _pack(command: Command) -> tuple[Any, ...]:
    kind = type(command).__name__.lower()
    match command:
        case Dots(pairs):
            return kind, [(_name(a), _name(b)) for a, b in _pairs(pairs, "pairs")]
        case Absmax(name) | Abssum(name) | Drop(name):
            return kind, _name(name)
        case Combine(target, terms):
            found = _pairs(terms, "terms")
            return kind, _name(target), [(arguments.number(c, "terms"), _name(x)) for c, x in found]
        case Copy(target, source):
            return kind, _name(target), _name(source)
        case Names():
            return (kind,)
        case Fold(target, batch, pushes):
            numbers = [(_number(a), _number(b)) for a, b in _pairs(pushes, "pushes")]
            if len(numbers) > MOST_PUSHES:
                raise InvalidArgument(
                    f"a fold of {len(numbers)} pushes: one takes {MOST_PUSHES} at most; push more "
                    "portions at a time (push_every), or give fewer and larger portions"
                )
            return kind, _name(target), _number(batch), numbers
        case Discard(batch):
            return kind, None if batch is None else _number(batch)
    raise arguments.wrong(command, "commands", "commands such as Dots([('a', 'b')])")


def _unpack(command: Command, shards: Sequence[_Result]) -> Any:
    numbers = [found for found, _ in shards]
    match command:
        case Dots():
            return [_exact_sum(parts) for parts in zip(*numbers, strict=True)]
        case Abssum():
            return _exact_sum(parts for (parts,) in numbers)
        case Absmax():
            found = [most for ((most,),) in numbers]
            return math.nan if any(map(math.isnan, found)) else max(found)
        case Names():
            return sorted(set.intersection(*(set(names) for _, names in shards)))
    return None


def _exact_sum(shards: Iterable[Sequence[float]]) -> float:
    """The sum of all parts of all shards, rounded once."""
    parts = [part for each in shards for part in each]
    if not all(map(math.isfinite, parts)):
        return sum(part for part in parts if not math.isfinite(part))
    try:
        return math.fsum(parts)
    except OverflowError:
        return sum(parts)


def _pairs(given: Any, what: str) -> list[tuple[Any, Any]]:
    pairs = [tuple(each) for each in arguments.items(given, what, "a list of pairs")]
    for each in pairs:
        if len(each) != 2:
            raise arguments.wrong(each, what, "pairs")
    return [(a, b) for a, b in pairs]


def _name(given: Any) -> str:
    return arguments.text(given, "the name of a vector")


def _number(given: Any) -> int:
    """A number of a batch, a replica or a push."""
    return arguments.whole(given, "a batch, replica or sequence", least=0, bits=64)
