"""The waiting room of the door: who has proved itself must knock before it counts.

A resize waits up to five seconds for a guest that says nothing. So nobody stops the ranks' steps
before it has sent `KNOCK`; they go on meanwhile. A guest that knocks and falls silent later costs
the ranks one such wait; then the door asks for no resize for so long that they lose 5 % of the time
at most, and longer each time.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.handshake import LIMIT_SECONDS, Admitted, refusals
from gradwire._bootstrap.keepalive import fail_with_host
from gradwire._bootstrap.survivor_links import MessageKind, View, pack_message

# A message of `survivor_links`, so that links between a sponsor and its guests carry nothing else.
KNOCK = pack_message(MessageKind.VIEW, View(frozenset({0})))

_MOST_WAITING = 64
_SHARE = 19  # pauses are so many times as long as what was lost: 1/20 of the time
_MOST_QUIET_SECONDS = 600.0


class Guest(NamedTuple):
    """A process that wants to join, by its socket."""

    sock: socket.socket
    number: int  # in the job, as its launcher says; -1: none


@dataclass(eq=False)
class _Mute:
    """One that has not knocked yet."""

    guest: Guest
    limit: Deadline
    received: bytes = b""


class WaitingRoom:
    """Sockets of those that have not knocked yet, each for at most five seconds; of one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._mute: list[_Mute] = []

    def fileno(self) -> int:
        """An epoll descriptor, which is readable when poll() has something to do."""
        return self._selector.fileno()

    @property
    def count(self) -> int:
        """The number of those that wait; poll() checks their limits."""
        return len(self._mute)

    def add(self, admitted: Admitted) -> None:
        """Takes over the socket of one that has proved itself; the first of too many must go."""
        if len(self._mute) >= _MOST_WAITING:
            self._refuse(self._mute[0], "others came")
        guest = Guest(admitted.sock, admitted.hello.source)
        entry = _Mute(guest, Deadline(LIMIT_SECONDS))
        try:
            fail_with_host(guest.sock, always_read=True)
            guest.sock.setblocking(False)
            self._selector.register(guest.sock, selectors.EVENT_READ, entry)
        except OSError:
            guest.sock.close()
            raise
        self._mute.append(entry)

    def poll(self) -> list[Guest]:
        """Returns those that have knocked since; ends those that say anything else, or nothing."""
        knocked = [guest for key, _ in self._selector.select(0) for guest in self._read(key.data)]
        for late in [each for each in self._mute if each.limit.passed]:
            self._refuse(late, f"it had nothing to say for {LIMIT_SECONDS:g} s")
        return knocked

    def close(self) -> None:
        """Ends all connections."""
        for each in self._mute:
            each.guest.sock.close()
        self._mute.clear()
        self._selector.close()

    def _read(self, entry: _Mute) -> Iterator[Guest]:
        try:
            part = entry.guest.sock.recv(len(KNOCK) - len(entry.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        entry.received += part
        if not part or not KNOCK.startswith(entry.received):
            self._refuse(entry, "it went, or said what no guest says")
        elif entry.received == KNOCK:
            self._forget(entry)
            yield entry.guest

    def _refuse(self, entry: _Mute, why: str) -> None:
        self._forget(entry)
        with contextlib.suppress(OSError):
            entry.guest.sock.close()
        refusals.note("a process that wants to join", f"it proved itself, and then {why}")

    def _forget(self, entry: _Mute) -> None:
        self._mute.remove(entry)
        self._selector.unregister(entry.guest.sock)


class Quiet:
    """The time in which no guest may stop the steps, after one that was let in vain."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken, self._since = 0, 0.0
        self._seconds, self._until = 0.0, 0.0  # of the last pause

    @property
    def left(self) -> float:
        """Seconds; 0 when guests may stop the steps again."""
        return max(0.0, self._until - self._clock())

    def note_taken(self, guests: int) -> None:
        """Begins to count the time of a resize with so many more guests."""
        if guests and not self._taken:
            self._since = self._clock()
        self._taken += guests

    def note_joined(self, guests: int, *, lost_rank: bool = False) -> None:
        """Ends a resize in which so many of them joined.

        One that lost a rank, and may have waited for it, took no time for guests.
        """
        if lost_rank or not self._taken:
            self._taken = 0
            return
        lost, in_vain = self._clock() - self._since, self._taken > guests
        grown = min(max(_SHARE * lost, 2 * self._seconds), _MOST_QUIET_SECONDS)
        self._seconds = grown if in_vain else 0.0
        self._until = self._clock() + self._seconds
        self._taken = 0
