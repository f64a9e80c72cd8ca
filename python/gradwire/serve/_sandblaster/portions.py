"""Portions of a batch, handed out to replicas so that each counts exactly once.

Dean et al. 2012, "Large Scale Distributed Deep Networks", sec. 4.2 and algorithm 1.2. A portion is
handed out by a ticket. The first replica to report it is told to keep it, others to drop it. Kept
portions enter their replica's sum, which it pushes to the shards, staged under a sequence number;
when all shards have it, it says so, and the portions are committed. What is kept and not committed
when its replica ends is handed out again. The shards then fold the pushes in `pushes`, and no
others: so each portion counts once on every shard, whoever ends when.

There are no sockets here and no clock: methods take events, with the time in seconds, and return
orders to replicas. Messages to and from one replica must keep their order; between replicas there
is none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gradwire._errors import InvalidArgument

AHEAD = 2  # tickets that a replica has: the one that it computes, and the next one
OVERDUE = 1.25  # times the usual seconds: a portion that takes longer is expected no more


class Order(NamedTuple):
    """A message to a replica about a ticket: compute it, keep or drop its result.

    "push" has no ticket: push all that was kept.
    """

    replica: int
    what: Literal["work", "keep", "drop", "push"]
    ticket: int = -1
    portion: int = -1


@dataclass
class _Ticket:
    """A portion in the hands of a replica, until it answers."""

    portion: int
    dropped: bool = False
    since: float = 0.0  # when it was handed out


@dataclass
class _Replica:
    """State of one replica, as the coordinator knows it."""

    tickets: dict[int, _Ticket] = field(default_factory=dict)  # without an answer, oldest first
    held: dict[int, int] = field(default_factory=dict)  # kept and not pushed: ticket, portion
    asked_to_push: float | None = None  # when
    began: float = 0.0  # its oldest ticket
    pace: float = math.nan  # seconds a portion; NaN before the first one
    kept: int = 0  # portions in this batch
    copies: int = 0  # portions in this batch that others had too


@dataclass
class _Portion:
    """State of one portion."""

    since: float = 0.0  # when it was handed out first
    tickets: set[tuple[int, int]] = field(default_factory=set)  # replica, ticket: computing it
    keeper: tuple[int, int] | None = None  # replica, ticket
    pushed: bool = False
    loss: float = 0.0


class Portions:
    """The portions of a batch and the replicas that compute them."""

    def __init__(self, *, backups: bool = True) -> None:
        """`backups`: at the end idle replicas copy what others have not reported."""
        self._backups = backups
        self._replicas: dict[int, _Replica] = {}
        self._portions: list[_Portion] = []
        self._todo: deque[int] = deque()
        self._tickets = 0
        self._left = 0  # portions that are not committed
        self._taken_back = 0  # times in this batch
        self._push_seconds = 0.0  # from asking for a push until all shards have it, lately
        self.batch = -1
        self.pushes: list[tuple[int, int]] = []  # to fold: replica, sequence

    @property
    def done(self) -> bool:
        """Whether all portions are committed."""
        return self._left == 0

    @property
    def loss(self) -> float:
        """The sum of the portions' losses; infinite where it is more than a float64 holds."""
        losses = [each.loss for each in self._portions]
        try:
            return math.fsum(losses)
        except OverflowError:  # fsum's, whose sum of some of them is too large
            return float(sum(losses))

    def counts(self) -> dict[int, tuple[int, int]]:
        """Counts, by replica, portions of this batch that it kept, and copies that it was given."""
        return {number: (each.kept, each.copies) for number, each in self._replicas.items()}

    def begin(self, batch: int, portions: int, now: float) -> list[Order]:
        """Begins with a batch, of a number that was never used, whatever became of the last one."""
        orders = self.give_up()
        for replica in self._replicas.values():
            replica.kept = replica.copies = 0
        self._portions = [_Portion() for _ in range(portions)]
        self._todo = deque(range(portions))
        self._left, self._taken_back = portions, 0
        self.batch, self.pushes = batch, []
        return orders + self.tick(now)

    def give_up(self) -> list[Order]:
        """Ends a batch as it is: nothing of it will be folded."""
        orders = []
        for number, replica in self._replicas.items():
            orders += [
                self._drop(number, ticket)
                for ticket, each in replica.tickets.items()
                if not each.dropped
            ]
            replica.held.clear()
            replica.asked_to_push = None
        self._portions, self.pushes, self._left = [], [], 0
        self._todo.clear()
        return orders

    def join(self, replica: int, now: float) -> list[Order]:
        """A replica has come, whose number was never used."""
        self._replicas[replica] = _Replica()
        return self.tick(now)

    def leave(self, replica: int, now: float) -> list[Order]:
        """A replica has ended: what it has not committed is handed out again."""
        gone = self._replicas.pop(replica)
        for ticket, each in gone.tickets.items():
            if not each.dropped:
                self._portions[each.portion].tickets.discard((replica, ticket))
                self._reopen(each.portion)
        for ticket, portion in gone.held.items():
            if self._portions[portion].keeper == (replica, ticket):
                self._portions[portion].keeper = None
                self._reopen(portion)
        return self.tick(now)

    def report(self, replica: int, ticket: int, loss: float, now: float) -> list[Order]:
        """A replica has computed a portion, and waits for what to do with it."""
        found = self._answered(replica, ticket, now)
        if found.dropped:
            return self.tick(now)
        portion = self._portions[found.portion]
        portion.tickets.discard((replica, ticket))
        portion.keeper, portion.loss = (replica, ticket), loss
        self._replicas[replica].held[ticket] = found.portion
        self._replicas[replica].kept += 1
        orders = [Order(replica, "keep", ticket), *self._drop_others(portion)]
        return orders + self.tick(now)

    def forgotten(self, replica: int, ticket: int, now: float) -> list[Order]:
        """A replica will not report a ticket that it was told to drop."""
        known = self._replicas[replica].tickets.get(ticket)
        if known is not None and not known.dropped:
            raise InvalidArgument(f"it forgot ticket {ticket}, which it was not told to drop")
        self._answered(replica, ticket, now, counts=False)
        return self.tick(now)

    def staged(
        self, replica: int, batch: int, sequence: int, tickets: Sequence[int], now: float
    ) -> list[Order]:
        """All shards have a push of a replica, the sum of its portions with these tickets.

        It counts whole or not at all: not where a portion was given to another meanwhile.
        """
        if batch != self.batch or self.done:
            return self.tick(now)
        found = self._replicas[replica]
        if not tickets or len(set(tickets)) < len(tickets) or not set(tickets) <= set(found.held):
            raise InvalidArgument(f"it pushed tickets {list(tickets)[:8]}, which it does not hold")
        if (replica, sequence) in self.pushes:
            raise InvalidArgument(f"it pushed twice under the number {sequence}")
        mine = {ticket: found.held.pop(ticket) for ticket in tickets}
        self._time_push(found, now)
        orders = []
        portions = [self._portions[each] for each in mine.values()]
        keepers = zip(portions, ((replica, ticket) for ticket in mine), strict=True)
        if all(each.keeper in (None, own) and not each.pushed for each, own in keepers):
            self.pushes = sorted([*self.pushes, (replica, sequence)])
            self._left -= len(portions)
            for ticket, number in mine.items():
                portion = self._portions[number]
                portion.keeper, portion.pushed = (replica, ticket), True
                orders += self._drop_others(portion)
                if number in self._todo:
                    self._todo.remove(number)
        else:
            for ticket, number in mine.items():
                if self._portions[number].keeper == (replica, ticket):
                    self._portions[number].keeper = None
                    self._reopen(number)
        return orders + self.tick(now)

    def tick(self, now: float) -> list[Order]:
        """Hands out what can be; also called now and then while nothing happens."""
        if self.done:
            return []
        if self._backups:
            self._take_back(now)
        orders = self._deal(now)
        if self._backups and not self._todo:
            orders += self._copy(now)
        return orders + self._ask_to_push(now)

    def _deal(self, now: float) -> list[Order]:
        """Hands out portions: first to idle replicas, then one ahead."""
        orders = []
        for depth in range(AHEAD):
            for number, replica in self._replicas.items():
                portion = self._next_for(replica) if len(replica.tickets) == depth else None
                if portion is not None:
                    self._todo.remove(portion)
                    orders.append(self._hand_out(number, portion, now))
        return orders

    def _next_for(self, replica: _Replica) -> int | None:
        """The next portion that is not in this replica's sum already."""
        held = replica.held.values()
        return next((each for each in self._todo if each not in held), None)

    def _hand_out(self, number: int, portion: int, now: float) -> Order:
        replica = self._replicas[number]
        if not replica.tickets:
            replica.began = now
        ticket = self._tickets
        self._tickets += 1
        replica.tickets[ticket] = _Ticket(portion, since=now)
        if not self._portions[portion].tickets:
            self._portions[portion].since = now
        self._portions[portion].tickets.add((number, ticket))
        return Order(number, "work", ticket, portion)

    def _copy(self, now: float) -> list[Order]:
        """Gives idle replicas what others will not report soon.

        First what has the fewest copies, then what is expected last, then what is oldest.
        """
        orders = []
        for number, replica in self._replicas.items():
            if replica.tickets:
                continue
            held = set(replica.held.values())
            soon = OVERDUE * replica.pace
            late = [
                (len(each.tickets), -expected, each.since, index)
                for index, each in enumerate(self._portions)
                if each.tickets and index not in held
                if not (expected := self._expected(each, now)) <= soon
            ]
            if late:
                replica.copies += 1
                orders.append(self._hand_out(number, min(late)[-1], now))
        return orders

    def _expected(self, portion: _Portion, now: float) -> float:
        """Seconds until the first replica will report a portion; infinite where nobody can say."""
        return min(self._rest(number, ticket, now) for number, ticket in portion.tickets)

    def _rest(self, number: int, ticket: int, now: float) -> float:
        """Seconds until a replica will report a ticket; infinite where nobody can say."""
        replica = self._replicas[number]
        if math.isnan(replica.pace) or self._is_overdue(replica, now):
            return math.inf
        position = list(replica.tickets).index(ticket)
        return (position + 1) * replica.pace - (now - replica.began)

    def _is_overdue(self, replica: _Replica, now: float) -> bool:
        """Whether it takes much longer for a ticket than it did for others."""
        return bool(replica.tickets) and now - replica.began > OVERDUE * replica.pace

    def _ask_to_push(self, now: float) -> list[Order]:
        """Asks replicas for their sums once they have nothing more to add to them."""
        all_kept = all(each.keeper for each in self._portions)
        orders = []
        for number, replica in self._replicas.items():
            if not replica.held or replica.asked_to_push is not None:
                continue
            live = any(not each.dropped for each in replica.tickets.values())
            busy = live and not self._is_overdue(replica, now)
            if all_kept or not (busy or self._next_for(replica) is not None):
                replica.asked_to_push = now
                orders.append(Order(number, "push"))
        return orders

    def _take_back(self, now: float) -> None:
        """Opens portions anew whose replicas should have pushed them long ago.

        Long is what an idle replica takes for a portion and twice what pushes take, and twice as
        long each time, so that pushes are not always too late. Should the replica push them still,
        before others keep them, that counts.
        """
        idle = [each.pace for each in self._replicas.values() if not each.tickets]
        quickest = min((each for each in idle if not math.isnan(each)), default=math.inf)
        patience = max(quickest, 2 * self._push_seconds) * 2**self._taken_back
        for number, replica in self._replicas.items():
            asked = replica.asked_to_push
            if asked is None or not now - asked > patience:
                continue
            self._taken_back += 1
            replica.asked_to_push = math.inf
            for ticket, portion in replica.held.items():
                if self._portions[portion].keeper == (number, ticket):
                    self._portions[portion].keeper = None
                    self._reopen(portion)

    def _time_push(self, replica: _Replica, now: float) -> None:
        asked, replica.asked_to_push = replica.asked_to_push, None
        if asked is not None and asked < now:
            known = self._push_seconds or now - asked
            self._push_seconds = (known + now - asked) / 2

    def _reopen(self, portion: int) -> None:
        """Puts a portion among those to do, unless it is kept or someone computes it."""
        found = self._portions[portion]
        if found.keeper is None and not found.tickets:
            self._todo.append(portion)

    def _drop_others(self, portion: _Portion) -> list[Order]:
        tickets, portion.tickets = sorted(portion.tickets), set()
        return [self._drop(number, ticket) for number, ticket in tickets]

    def _drop(self, number: int, ticket: int) -> Order:
        self._replicas[number].tickets[ticket].dropped = True
        return Order(number, "drop", ticket)

    def _answered(self, number: int, ticket: int, now: float, *, counts: bool = True) -> _Ticket:
        """Takes a replica's answer to a ticket, and learns how long it took."""
        replica = self._replicas[number]
        if ticket not in replica.tickets:
            raise InvalidArgument(f"it answered ticket {ticket}, which it does not have")
        if counts:
            seconds = now - replica.began
            known = not math.isnan(replica.pace)
            replica.pace = (replica.pace + seconds) / 2 if known else seconds
        replica.began = now
        return replica.tickets.pop(ticket)
