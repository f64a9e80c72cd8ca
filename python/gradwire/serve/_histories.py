"""Histories of shards: which versions of a shard's values are the same before and after restarts.

A server that begins, anew or from a snapshot, adds a start to its shard's history. Versions from
before a restart that are later than its snapshot are lost: the same numbers are given again, to
other values. So a version says what it is of only together with a history.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gradwire import _core

MOST_STARTS = 256  # older ones are forgotten


class HistoryStart(NamedTuple):
    """A server's start: a name that no other has, and the version with which it began."""

    name: int
    version: int


History = tuple[HistoryStart, ...]


def begun(before: History, version: int) -> History:
    """The history of a shard that begins now, with a version of that before."""
    return (*before, HistoryStart(secrets.randbits(63), version))[-MOST_STARTS:]


def parse(given: Any) -> History:
    """A history from JSON; raises ValueError or TypeError for anything else."""
    found = tuple(HistoryStart(name, version) for name, version in given)
    numbers = [each for start in found for each in start]
    if len(found) > MOST_STARTS or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError("starts are pairs of numbers of 63 bits")
    return found


def last_common(one: History, other: History) -> int | None:
    """The last version that is the same in two histories; None where all of both are."""
    names = {start.name: i for i, start in enumerate(one)}
    at = next((i for i in reversed(range(len(other))) if other[i].name in names), None)
    if at is None:
        return 0  # the initial values, at best
    later = (*other[at + 1 : at + 2], *one[names[other[at].name] + 1 :][:1])
    return min((start.version for start in later), default=None)


class Versions(list[int]):
    """A version of each shard, and the histories that these are of."""

    def __init__(self, versions: Iterable[int], histories: Sequence[History]) -> None:
        super().__init__(versions)
        self.histories = histories

    def within(self, histories: Sequence[History]) -> Versions:
        """The latest versions of other histories that are not later than these."""
        bounds = map(last_common, self.histories, histories)
        bounded = [
            version if bound is None or version == _core.SERVE_NO_VERSION else min(version, bound)
            for version, bound in zip(self, bounds, strict=True)
        ]
        return Versions(bounded, histories)
