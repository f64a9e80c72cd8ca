"""Replicas of different speeds that compute batches, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradwire.serve._sandblaster.portions import Order, Portions
from gradwire.serve._sandblaster.worker import Push, Task, Worker

LATENCY = 0.01  # of a message; a portion takes a replica of speed 1 one second
PUSH = 0.1  # until all shards have a sum
TICK = 0.1
PUSH_EVERY, PUSH_AFTER = 8, 4.0  # portions, seconds


class Span(NamedTuple):
    """A portion that a replica computed, from one time to another, for a picture."""

    replica: int
    portion: int
    began: float
    ended: float
    kept: bool


class Clock:
    """Virtual time: actions in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something later; never, if the time is infinite."""
        if seconds < math.inf:
            heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), action))

    def advance(self) -> bool:
        """Does what is next; False where there is nothing."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True


class Replica:
    """A replica of a speed; one that is stopped does nothing more."""

    def __init__(self, number: int, speed: float, job: Job) -> None:
        self.number, self.speed, self.job = number, speed, job
        self.stopped = False
        self.portions: list[int] = []
        self.worker: Worker[int] = Worker(self.portions.append, self.portions.clear)
        self.computing = self.pushing = self.asked = False
        self.kept_since = math.inf

    def obey(self, order: Order, batch: int) -> None:
        """Does what the coordinator says."""
        if self.stopped:
            return
        if order.what == "work":
            self.worker.work(batch, order.ticket, order.portion)
        elif order.what == "keep":
            if not self.worker.kept:
                self.kept_since = self.job.clock.now
                self.job.clock.after(PUSH_AFTER, self.push)
            self.worker.keep(batch, order.ticket)
        elif order.what == "drop" and (answer := self.worker.drop(batch, order.ticket)):
            self.job.say(self, lambda now: self.job.lead.forgotten(self.number, answer.ticket, now))
        self.asked = self.asked or order.what == "push"
        self.compute()
        self.push()

    def compute(self) -> None:
        """Begins with the next portion, if there is one."""
        task = None if self.computing else self.worker.next()
        if task is not None:
            self.computing = True
            began = self.job.clock.now
            self.job.clock.after(1 / self.speed, lambda: self.computed(task, began))

    def computed(self, task: Task, began: float) -> None:
        """Reports a portion, and begins with the next one."""
        if self.stopped:
            return
        self.computing = False
        answer = self.worker.computed(1.0, task.portion)
        kept = answer.what == "report"
        span = Span(self.number, task.portion, began, self.job.clock.now, kept)
        self.job.spans.append(span)
        call = self.job.lead.report if kept else self.job.lead.forgotten
        loss = (1.0,) if kept else ()
        self.job.say(self, lambda now: call(self.number, answer.ticket, *loss, now))
        self.compute()

    def push(self) -> None:
        """Pushes the sum if it was asked for, is large or old."""
        due = self.job.clock.now >= self.kept_since + PUSH_AFTER
        least = 1 if self.asked or due else PUSH_EVERY
        if self.stopped or self.pushing or self.worker.kept < least:
            self.asked = self.asked and self.pushing
            return
        self.asked, self.pushing = False, True
        push = self.worker.push()
        assert push is not None
        self.job.clock.after(PUSH, lambda: self.pushed(push))

    def pushed(self, push: Push) -> None:
        """Tells the coordinator that all shards have a push."""
        if self.stopped:
            return
        self.pushing = False
        name = (self.number, push.batch, push.sequence)
        self.job.say(self, lambda now: self.job.lead.staged(*name, push.tickets, now))
        self.push()


class Job:
    """A coordinator and its replicas."""

    def __init__(self, speeds: Sequence[float], *, backups: bool = True) -> None:
        self.clock = Clock()
        self.lead = Portions(backups=backups)
        self.spans: list[Span] = []
        self.replicas = [Replica(i, speed, self) for i, speed in enumerate(speeds)]
        for each in self.replicas:
            self.send(self.lead.join(each.number, 0.0))

    def say(self, replica: Replica, event: Callable[[float], list[Order]]) -> None:
        """Sends a message to the coordinator."""

        def arrive() -> None:
            self.send(event(self.clock.now))

        self.clock.after(LATENCY, arrive)

    def send(self, orders: Sequence[Order]) -> None:
        """Sends orders to replicas."""
        for order in orders:
            replica, batch = self.replicas[order.replica], self.lead.batch

            def arrive(replica: Any = replica, order: Order = order, batch: int = batch) -> None:
                replica.obey(order, batch)

            self.clock.after(LATENCY, arrive)

    def run(self, batch: int, portions: int, stop: tuple[int, float] | None = None) -> float:
        """The seconds of a batch; infinite where it never ends. `stop`: a replica, and when."""
        began = self.clock.now
        self.send(self.lead.begin(batch, portions, began))
        if stop is not None:
            number, when = stop
            self.clock.after(when, lambda: setattr(self.replicas[number], "stopped", True))
        while not self.lead.done:
            due = self.clock.now + TICK
            self.clock.after(TICK, lambda: None)
            while self.clock.now < due and not self.lead.done:
                self.clock.advance()
            self.send(self.lead.tick(self.clock.now))
            if self.clock.now - began > 1000 * portions:
                return math.inf
        return self.clock.now - began


def over_bound(
    speeds: Sequence[float],
    portions: int,
    *,
    backups: bool = True,
    batches: int = 5,
    stop: bool = False,
) -> float:
    """Seconds of some batches over those that the sum of the speeds would need.

    With `stop` the first replica, which counts until then, stops in the middle of the first batch.
    """
    job = Job(speeds, backups=backups)
    seconds = bound = 0.0
    for batch in range(batches):
        whole = portions / sum(speeds)
        if stop:
            rest = portions / sum(speeds[1:])
            whole = whole / 2 + rest / 2 if batch == 0 else rest
        halt = (0, portions / sum(speeds) / 2) if stop and batch == 0 else None
        seconds += job.run(batch, portions, halt)
        bound += whole
    return seconds / bound
