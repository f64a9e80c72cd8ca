"""Edges of a schedule, its costs, and the report of what verification proves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Edge(NamedTuple):
    """An edge: chunks that move from one rank to another in one round."""

    src: int
    dst: int
    chunks: range
    reduces: bool
    """Whether they are added (min-ed, …) into dst's chunks; otherwise they replace them."""


class Shape(NamedTuple):
    """Costs of a schedule: rounds, and the most that any rank sends, in whole buffers."""

    rounds: int
    max_sent: float


_FACTS = ("correct", "complete", "deadlock_free", "agreement", "in_tree")


@dataclass(frozen=True)
class Report:
    """Facts that symbolic execution proves of a schedule; true if the schedule can run."""

    correct: bool
    """Each result holds each contribution exactly once."""
    complete: bool
    """Each rank that must end with a result has one, with nothing missing."""
    deadlock_free: bool
    """No rank waits for itself, directly or through other ranks."""
    agreement: bool
    """All ranks end with equal bits: the same tree of additions."""
    in_tree: bool
    """Each rank sends its partial sum of a chunk once, to one parent: lossy codecs need it."""
    rounds: int
    max_sent: float
    """The most that any rank sends, in units of the whole buffer."""
    problems: tuple[str, ...] = ()
    """Which round, ranks and chunks break a fact; the first sixteen."""

    @property
    def ok(self) -> bool:
        """Whether the schedule can run: correct, complete, deadlock-free, and in agreement."""
        return self.correct and self.complete and self.deadlock_free and self.agreement

    @property
    def shape(self) -> Shape:
        """Rounds and data sent, counted on the edges; compare `Schedule.closed_form`."""
        return Shape(self.rounds, self.max_sent)

    @property
    def facts(self) -> dict[str, bool]:
        """The five facts that are true or false, by name."""
        return {name: getattr(self, name) for name in _FACTS}

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{name:<14}{'yes' if holds else 'NO'}" for name, holds in self.facts.items()]
        lines.append(f"{'rounds':<14}{self.rounds}")
        lines.append(f"{'max sent':<14}{self.max_sent:g} n by any rank")
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])
