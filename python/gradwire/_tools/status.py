"""`gradwire doctor --job`: what the ranks on this host are doing, and who keeps whom waiting.

Every rank keeps a page of memory up to date that other processes can read, so this works even when
a rank is stopped or holds the interpreter's lock for good. Nothing is asked of the ranks, and no
signal is used: signals belong to the user's program and its launcher.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from gradwire import _core
from gradwire._base.tables import table
from gradwire._errors import Error

if TYPE_CHECKING:
    from gradwire._core import RankStatus as Seen

THIS_HOST = "this host"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waits for a disk",
    "T": "STOPPED",
    "t": "held by a debugger",
}
_HEADS = ("rank", "process", "state", "for", "waits for", "does")


def report(name: str, *, as_json: bool = False) -> str:
    """Reports on the jobs whose name begins with `name`, as text or JSON.

    Raises Error if this user has no such job on this host.
    """
    groups = communicators(_core.ranks_on_this_host(), name)
    if not groups:
        which = f"no job {name}…" if name else "no job"
        raise Error(
            f"{which} of user {os.geteuid()} has a communicator open on this host; "
            "run it as the job's user, on a host of the job"
        )
    if as_json:
        return json.dumps({"communicators": [each.as_dict() for each in groups]}, indent=2)
    return "\n\n".join(each.as_table() for each in groups)


def communicators(
    ranks: Sequence[Seen], name: str = "", where: str = THIS_HOST
) -> list[LocalRanks]:
    """Groups ranks by communicator, in order; `where` says on which hosts they are."""
    fitting = [each for each in ranks if each["job"].startswith(name)]
    fitting.sort(key=lambda each: (*_key(each), each["rank"], each["pid"]))
    return [LocalRanks(tuple(members), where) for _, members in groupby(fitting, key=_key)]


def _key(rank: Seen) -> tuple[str, int, int, int, int]:
    """The sort key of a communicator; a single rank has no secret, so its process id is part."""
    alone = rank["pid"] if rank["size"] == 1 else 0
    return rank["job"], rank["tag"], rank["communicator"], rank["size"], alone


class LocalRanks(NamedTuple):
    """The ranks of one communicator that are on this host, or on several."""

    ranks: tuple[Seen, ...]
    where: str = THIS_HOST

    def as_dict(self) -> dict[str, object]:
        """Formats the group for JSON."""
        first = self.ranks[0]
        return {
            **{key: first[key] for key in ("job", "communicator", "size", "about")},
            "ranks": list(self.ranks),
            "missing": self.missing(),
            "conclusions": list(self.conclusions()),
        }

    def as_table(self) -> str:
        """Formats the group for people."""
        rows = [_HEADS, *map(_cells, self.ranks)]
        rows += [(str(rank), "-", "not found", "", "", "") for rank in self.missing()]
        ranks = textwrap.indent(table(rows, left=len(_HEADS)), "  ")
        return "\n".join([*self._title(), ranks, *self.conclusions()])

    def missing(self) -> list[int]:
        """The ranks that were not found there."""
        return sorted({*range(self.ranks[0]["size"])} - {each["rank"] for each in self.ranks})

    def conclusions(self) -> Iterator[str]:
        """Sentences on the ranks at the ends of chains of waiting ranks, and on deadlocks."""
        by_rank = {each["rank"]: each for each in self.ranks}
        ends: dict[int, list[int]] = {}
        cycles: set[tuple[int, ...]] = set()
        for rank in by_rank:
            *way, end = _chain(rank, by_rank)
            if end in way:
                cycles.add(tuple(sorted(way[way.index(end) :])))
            elif way:
                ends.setdefault(end, []).append(rank)
        for end, waiting in sorted(ends.items()):
            yield f"{_who(waiting)} in the end for one: {self._sentence(end, by_rank)}."
        for cycle in sorted(cycles):
            yield f"{_who(cycle)} for each other: do they make the same calls in the same order?"
        for each in self.ranks:
            if _is_stopped(each) and each["rank"] not in ends:
                yield f"Nobody waits for it yet: {each['sentence']}."
        if not ends and not cycles:
            yield "Nobody has waited for another rank for longer than a second."

    def _title(self) -> list[str]:
        first = self.ranks[0]
        here = f"{len(self.ranks)} of them found on {self.where}"
        title = f"job {first['job'] or '(no name)'}, communicator {first['communicator']}: "
        size = f"{first['size']} rank{'s' if first['size'] > 1 else ''}, {here}"
        return [title + size, *([f"  {first['about']}"] if first["about"] else [])]

    def _sentence(self, rank: int, by_rank: dict[int, Seen]) -> str:
        if rank in by_rank:
            return by_rank[rank]["sentence"]
        if self.ranks[0]["local_size"] == self.ranks[0]["size"]:
            return (
                f"rank {rank} is gone: it ended, closed its communicator, or runs as another user"
            )
        there = f"rank {rank} is not on {self.where}, or is gone"
        return f"{there}: run gradwire doctor --job on its host"


def _cells(rank: Seen) -> tuple[str, ...]:
    return (
        str(rank["rank"]),
        str(rank["pid"]),
        _STATES.get(rank["state"], rank["state"]),
        _duration(rank["seconds"]),
        _waits_for(rank),
        _does(rank),
    )


def _does(rank: Seen) -> str:
    if rank["activity"] == "failed":
        return f"failed: {rank['spec']}"
    if rank["activity"] == "outside":
        calls = rank["calls"]
        return "outside gradwire, " + (f"last call {calls - 1}" if calls else "no call yet")
    return rank["operation"]


def _waits_for(rank: Seen) -> str:
    if rank["peer"] >= 0:
        return f"rank {rank['peer']}"
    return "any rank" if rank["activity"] == "receive" else ""


def _is_stopped(rank: Seen) -> bool:
    return rank["state"] in "Tt"


def _chain(rank: int, by_rank: dict[int, Seen]) -> list[int]:
    """The chain of waiting ranks from `rank`, to a repeated one or one that does not wait."""
    way = [rank]
    while rank in by_rank and not _is_stopped(by_rank[rank]) and by_rank[rank]["peer"] >= 0:
        rank = by_rank[rank]["peer"]
        way.append(rank)
        if rank in way[:-1]:
            break
    return way


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]} waits"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
