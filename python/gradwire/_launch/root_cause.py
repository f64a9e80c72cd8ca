"""The root cause among failures of several ranks, and the line that reports it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Note(NamedTuple):
    """A note that a rank's process wrote when it began to end; see `at_exit.note`."""

    process: int
    at: float  # monotonic seconds
    error: str  # empty unless an exception ended the program
    is_consequence: bool  # of another rank's failure


class Failure(NamedTuple):
    """A rank's process that ended with an error."""

    rank: int
    process: int
    code: int  # as in subprocess: negative for a signal
    seen: float  # monotonic seconds
    note: Note | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether the rank noted that it followed from another failure."""
        return self.note is not None and self.note.is_consequence


def read_notes(data: bytes) -> dict[int, Note]:
    """The first note of each process; ignores broken lines of processes killed while writing."""
    found: dict[int, Note] = {}
    for line in data.splitlines():
        try:
            note = Note(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found.setdefault(note.process, note)
    return found


def read_joins(data: bytes, how: str) -> set[int]:
    """The processes that "joined" the others, or came "late"; see `at_exit.note_join`."""
    found = set()
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, LookupError):
            found.add(int(json.loads(line)[how]))
    return found


def say(text: str) -> None:
    """Prints a line of `gradwire run` to stderr."""
    print(f"gradwire run: {text}", file=sys.stderr, flush=True)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others followed from: the earliest that is not a consequence."""
    return min(failures, key=_order)


def _order(failure: Failure) -> tuple[bool, bool, float]:
    # A note is written before other ranks can notice. A killed rank leaves none, and the others may
    # end before the launcher sees its end.
    killed = failure.code < 0 and failure.note is None
    began = failure.seen if failure.note is None else failure.note.at
    return failure.is_consequence, not killed, began


def describe(failures: Sequence[Failure], size: int) -> str:
    """One line about all failures, the root first."""
    first = root_cause(failures)
    others = [each for each in failures if each is not first]
    text = f"rank {first.rank} of {size} (process {first.process}) {describe_exit(first.code)}"
    if first.note is not None and first.is_consequence:  # the root cause is not among the failures
        return f"{text}: {first.note.error}" + _and(others, "failed too")
    followed = [each for each in others if each.is_consequence]
    besides = [each for each in others if not each.is_consequence]
    return text + _and(followed, "failed because of it") + _and(besides, "failed too")


def _and(failures: Sequence[Failure], what: str) -> str:
    if not failures:
        return ""
    ranks = ", ".join(map(str, sorted(each.rank for each in failures)))
    return f"; rank{'s' if len(failures) > 1 else ''} {ranks} {what}"


def describe_exit(code: int) -> str:
    """The end of a process in words, by its `subprocess` return code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
