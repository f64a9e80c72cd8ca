"""What a schedule consists of, and what is proved of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Edge(NamedTuple):
    """Chunks that move from one rank to another in one round."""

    src: int
    dst: int
    chunks: range
    reduces: bool
    """True: added (or min-ed, …) into dst's chunks. False: they replace dst's."""


class Shape(NamedTuple):
    """What a schedule costs: its rounds, and the most that any rank sends, in buffers of n."""

    rounds: int
    max_sent: float


_FACTS = ("correct", "complete", "deadlock_free", "agreement", "in_tree")


@dataclass(frozen=True)
class Report:
    """What symbolic execution proves of a schedule. True when it can run: `bool(report)`."""

    correct: bool
    """Each result holds each contribution exactly once."""
    complete: bool
    """Each rank that must end with a result has one, with nothing missing."""
    deadlock_free: bool
    """No rank waits, directly or around a circle, for itself."""
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
        """Rounds and bytes, counted on the edges; `Schedule.closed_form` is the textbook's."""
        return Shape(self.rounds, self.max_sent)

    @property
    def facts(self) -> dict[str, bool]:
        """The five yes-or-no facts by name."""
        return {name: getattr(self, name) for name in _FACTS}

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"{name:<14}{'yes' if holds else 'NO'}" for name, holds in self.facts.items()]
        lines.append(f"{'rounds':<14}{self.rounds}")
        lines.append(f"{'max sent':<14}{self.max_sent:g} n by any rank")
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])
