"""A coordinator, replicas, shards and the messages between them, one step at a time.

Every message, computation, acknowledgement and death is a step of its own, so a test can do them in
any order. Sums are lists of portions, so that one can see what counts how often.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, deque
from typing import Any, NamedTuple

from gradwire.serve._sandblaster.portions import Order, Portions
from gradwire.serve._sandblaster.worker import Push, Worker

LONG = 1000.0  # seconds, after which everything is overdue


class Step(NamedTuple):
    """Something that may happen next."""

    what: str
    replica: int = -1
    number: int = -1


class Sum:
    """A replica's sum, as a list of portions."""

    def __init__(self) -> None:
        self.portions: list[int] = []

    def add(self, portion: int) -> None:
        self.portions.append(portion)

    def clear(self) -> None:
        self.portions = []


class Replica:
    """A replica: its worker, and the messages on their way to and from it."""

    def __init__(self) -> None:
        self.sum = Sum()
        self.worker: Worker[int] = Worker(self.sum.add, self.sum.clear)
        self.inbox: list[Order] = []
        self.batches: list[int] = []  # of the orders in the inbox
        self.outbox: list[Any] = []
        self.task: Any = None
        self.pushing: tuple[Push, list[int], list[int]] | None = None  # portions, shards to reach
        self.asked = False  # to push
        self.dead = False

    def fork(self) -> Replica:
        other: Replica = _copy(self, sum=_copy(self.sum))
        other.worker = _copy(self.worker, _add=other.sum.add, _clear=other.sum.clear)
        if self.pushing is not None:
            push, portions, left = self.pushing
            other.pushing = (push, portions, list(left))
        return other

    def tickets(self) -> set[int]:
        """All tickets that are mentioned here."""
        worker = self.worker
        found = {each.ticket for each in self.inbox} | {each.ticket for each in worker._queue}
        found |= {worker._computing or 0, *worker._results, *worker._kept}
        for each in [*self.outbox, *(self.pushing or ())[:1]]:
            found |= set(each.tickets) if isinstance(each, Push) else {getattr(each, "ticket", 0)}
        return found | {-1}

    def key(self, rank: dict[int, int]) -> Any:
        """What there is, with the tickets' ranks."""
        worker = self.worker
        return (
            tuple((each.what, rank[each.ticket], each.portion) for each in self.inbox),
            tuple(self.batches),
            tuple(self._said(each, rank) for each in self.outbox),
            tuple((each.batch, rank[each.ticket], each.portion) for each in worker._queue),
            worker._computing is not None and (rank[worker._computing], worker._dropped),
            tuple((rank[each], result) for each, result in worker._results.items()),
            tuple((rank[each]) for each in worker._kept),
            (worker._batch, worker._sequence, self.dead, self.asked, tuple(self.sum.portions)),
            self.pushing and (self._said(self.pushing[0], rank), tuple(self.pushing[2])),
        )

    def _said(self, said: Any, rank: dict[int, int]) -> Any:
        if isinstance(said, Push):
            return (said.batch, said.sequence, tuple(rank[each] for each in said.tickets))
        return said if said == "end" else (said.what, rank[said.ticket])


class World:
    """Everything; `steps()` may be done in any order, by `do()`."""

    def __init__(
        self,
        *,
        replicas: int,
        portions: int,
        batches: int = 1,
        shards: int = 2,
        push_every: int = 2,
        deaths: int = 0,
        joins: int = 0,
        pauses: int = 0,
        kind: type[Portions] | None = None,
    ) -> None:
        self.coordinator = (kind or Eager)()
        self.replicas: dict[int, Replica] = {}
        self.staged: list[dict[tuple[int, int, int], list[int]]] = [{} for _ in range(shards)]
        self.portions, self.push_every = portions, push_every
        self.left = {"batch": batches - 1, "die": deaths, "join": joins, "pause": pauses}
        self.now = 0.0
        self.joined = 0
        self.send(self.coordinator.begin(0, portions, self.now))
        for _ in range(replicas):
            self.join()

    def join(self) -> None:
        self.replicas[self.joined] = Replica()
        self.joined += 1
        self.send(self.coordinator.join(self.joined - 1, self.now))

    def send(self, orders: list[Order]) -> None:
        for order in orders:
            self.replicas[order.replica].inbox.append(order)
            self.replicas[order.replica].batches.append(self.coordinator.batch)

    def fork(self) -> World:
        """A copy; what is never changed is shared."""
        other = copy.copy(self)
        other.coordinator = _copy(self.coordinator)
        other.coordinator._replicas = {
            number: _copy(each, tickets={t: copy.copy(x) for t, x in each.tickets.items()})
            for number, each in self.coordinator._replicas.items()
        }
        other.coordinator._portions = [_copy(each) for each in self.coordinator._portions]
        other.replicas = {number: each.fork() for number, each in self.replicas.items()}
        other.staged = [dict(each) for each in self.staged]
        other.left = dict(self.left)
        return other

    def steps(self) -> list[Step]:
        """What may happen now, but for faults."""
        found = []
        for number, each in self.replicas.items():
            if each.outbox:
                found.append(Step("hear", number))
            if each.dead:
                continue
            if each.inbox:
                found.append(Step("obey", number))
            if each.task is not None:
                found.append(Step("compute", number))
            if each.pushing is not None:
                found.append(Step("stage", number, each.pushing[2][0]))
        if self.coordinator.done and self.left["batch"]:
            found.append(Step("batch"))
        return found

    def faults(self) -> list[Step]:
        """What else may happen: deaths, with the last messages lost or not, joins, pauses."""
        found = []
        if self.left["die"]:
            for number, each in self.replicas.items():
                if not each.dead:
                    found += [Step("die", number, lost) for lost in range(len(each.outbox) + 1)]
        if self.left["join"]:
            found.append(Step("join"))
        if self.left["pause"] and not self.coordinator.done:
            found.append(Step("pause"))
        return found

    def do(self, step: Step) -> None:
        if step.what in self.left:
            self.left[step.what] -= 1
        if step.what == "batch":
            self.check()
            batch = self.coordinator.batch + 1
            self.staged = [{} for _ in self.staged]
            self.send(self.coordinator.begin(batch, self.portions, self.now))
        elif step.what == "join":
            self.join()
        elif step.what == "pause":
            self.now += LONG
            self.send(self.coordinator.tick(self.now))
        else:
            getattr(self, step.what)(step.replica, step.number)

    def obey(self, number: int, _: int) -> None:
        each = self.replicas[number]
        order, batch = each.inbox.pop(0), each.batches.pop(0)
        if order.what == "work":
            each.worker.work(batch, order.ticket, order.portion)
        elif order.what == "keep":
            each.worker.keep(batch, order.ticket)
        elif order.what == "drop" and (answer := each.worker.drop(batch, order.ticket)):
            each.outbox.append(answer)
        self.begin_task(each)
        each.asked = each.asked or order.what == "push"
        self.begin_push(each)

    def compute(self, number: int, _: int) -> None:
        each = self.replicas[number]
        each.outbox.append(each.worker.computed(1.0, each.task.portion))
        each.task = None
        self.begin_task(each)

    def begin_task(self, each: Replica) -> None:
        if each.task is None:
            each.task = each.worker.next()

    def begin_push(self, each: Replica) -> None:
        if each.pushing is not None:
            return
        asked, each.asked = each.asked, False
        if each.worker.kept < (1 if asked else self.push_every):
            return
        portions = list(each.sum.portions)
        push = each.worker.push()
        assert push is not None
        each.pushing = (push, portions, list(range(len(self.staged))))

    def stage(self, number: int, shard: int) -> None:
        each = self.replicas[number]
        assert each.pushing is not None
        push, portions, left = each.pushing
        if push.batch == self.coordinator.batch:
            self.staged[shard][push.batch, number, push.sequence] = portions
        left.remove(shard)
        if not left:
            each.outbox.append(push)
            each.pushing = None
            self.begin_push(each)

    def die(self, number: int, lost: int) -> None:
        each = self.replicas[number]
        each.dead = True
        if lost:
            del each.outbox[-lost:]
        each.outbox.append("end")
        each.inbox.clear()
        each.batches.clear()

    def hear(self, number: int, _: int) -> None:
        each = self.replicas[number]
        said = each.outbox.pop(0)
        if said == "end":
            del self.replicas[number]
            self.send_living(self.coordinator.leave(number, self.now))
        elif isinstance(said, Push):
            orders = self.coordinator.staged(
                number, said.batch, said.sequence, said.tickets, self.now
            )
            self.send_living(orders)
        elif said.what == "report":
            self.send_living(self.coordinator.report(number, said.ticket, said.loss, self.now))
        else:
            self.send_living(self.coordinator.forgotten(number, said.ticket, self.now))

    def send_living(self, orders: list[Order]) -> None:
        self.send([each for each in orders if not self.replicas[each.replica].dead])

    def check(self) -> None:
        """Each portion counts once on every shard."""
        batch = self.coordinator.batch
        for shard in self.staged:
            counted = Counter(
                portion
                for replica, sequence in self.coordinator.pushes
                for portion in shard[batch, replica, sequence]
            )
            assert counted == Counter(range(self.portions)), counted
        assert self.coordinator.loss == self.portions

    def key(self) -> Any:
        """Equal for worlds in which the same can happen: tickets count by their order alone."""
        lead = self.coordinator
        used = {t for each in lead._replicas.values() for t in (*each.tickets, *each.held)}
        used |= {t for each in self.replicas.values() for t in each.tickets()}
        used |= {keeper[1] for each in lead._portions if (keeper := each.keeper)}
        rank = {ticket: i for i, ticket in enumerate(sorted(used))}
        known = tuple(
            (
                number,
                tuple((rank[t], x.portion, x.dropped) for t, x in each.tickets.items()),
                tuple((rank[t], x) for t, x in each.held.items()),
                each.asked_to_push,
                each.pace == each.pace,
            )
            for number, each in lead._replicas.items()
        )
        portions = tuple(
            (
                tuple(sorted((r, rank[t]) for r, t in each.tickets)),
                each.keeper and (each.keeper[0], rank[each.keeper[1]]),
                each.pushed,
            )
            for each in lead._portions
        )
        return (
            (known, portions, tuple(lead._todo), tuple(lead.pushes), lead.batch, self.now),
            (lead._taken_back, lead._push_seconds),
            tuple(each.key(rank) for each in self.replicas.values()),
            tuple(tuple(sorted((k, tuple(v)) for k, v in each.items())) for each in self.staged),
            tuple(self.left.values()),
        )


def _copy(given: Any, **changes: Any) -> Any:
    """A copy of an object and of its containers, but not of what these contain."""
    other = copy.copy(given)
    for name, value in vars(given).items():
        if isinstance(value, list | dict | set | deque):
            setattr(other, name, value.copy())
    for name, value in changes.items():
        setattr(other, name, value)
    return other


class Eager(Portions):
    """Copies whatever it can, however fast replicas are: more orders than time would allow."""

    def _expected(self, *_: Any) -> float:
        return math.inf
