"""Tickets that a replica has in hand: to compute, without an answer, and in its sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

from gradwire._errors import InvalidArgument

Result = TypeVar("Result")

MOST_TICKETS = 64  # in hand; a coordinator gives two


class Task(NamedTuple):
    """A portion to compute."""

    batch: int
    ticket: int
    portion: int


class Answer(NamedTuple):
    """Answer of a replica to a ticket: the loss that it reports, or that it forgot it."""

    what: Literal["report", "forgotten"]
    ticket: int
    loss: float = 0.0


class Push(NamedTuple):
    """A sum to push, and the tickets of the portions in it."""

    batch: int
    sequence: int
    tickets: tuple[int, ...]


class Worker(Generic[Result]):
    """The tickets of one replica; without threads, sockets and arrays of its own."""

    def __init__(self, add: Callable[[Result], None], clear: Callable[[], None]) -> None:
        """`add` adds a result to the sum, which `clear` makes zero."""
        self._add, self._clear = add, clear
        self._queue: deque[Task] = deque()
        self._computing: int | None = None
        self._dropped = False  # what is being computed
        self._results: dict[int, Result] = {}  # that were reported, by ticket
        self._kept: list[int] = []  # tickets in the sum
        self._batch = -1
        self._sequence = 0

    @property
    def kept(self) -> int:
        """The number of portions in the sum."""
        return len(self._kept)

    def work(self, batch: int, ticket: int, portion: int) -> None:
        """A portion to compute has come."""
        self._enter(batch)
        if len(self._queue) + len(self._results) >= MOST_TICKETS:
            raise InvalidArgument(f"the coordinator gave more than {MOST_TICKETS} tickets")
        self._queue.append(Task(batch, ticket, portion))

    def keep(self, batch: int, ticket: int) -> None:
        """A result goes into the sum."""
        self._enter(batch)
        if ticket not in self._results:
            raise InvalidArgument(f"the coordinator keeps ticket {ticket}, which is not reported")
        self._add(self._results.pop(ticket))
        self._kept.append(ticket)

    def drop(self, batch: int, ticket: int) -> Answer | None:
        """A ticket is of no use any more; returns an answer unless it has had one, or will."""
        self._enter(batch)
        if ticket in self._results:
            del self._results[ticket]
            return None
        if ticket == self._computing:
            self._dropped = True
            return None
        self._queue = deque(each for each in self._queue if each.ticket != ticket)
        return Answer("forgotten", ticket)

    def next(self) -> Task | None:
        """The next portion, which is computed from now on."""
        if not self._queue or self._computing is not None:
            return None
        task = self._queue.popleft()
        self._computing, self._dropped = task.ticket, False
        return task

    def computed(self, loss: float, result: Result) -> Answer:
        """Takes the result of the portion that `next()` returned."""
        ticket, self._computing = self._computing, None
        assert ticket is not None
        if self._dropped:
            return Answer("forgotten", ticket)
        self._results[ticket] = result
        return Answer("report", ticket, loss)

    def push(self) -> Push | None:
        """The push of the sum, which begins anew then; None where there is nothing in it."""
        if not self._kept:
            return None
        found = Push(self._batch, self._sequence, tuple(self._kept))
        self._sequence += 1
        self._empty()
        return found

    def _enter(self, batch: int) -> None:
        if batch != self._batch:
            self._batch = batch
            self._empty()

    def _empty(self) -> None:
        self._kept = []
        self._clear()
