"""Portions count exactly once, whoever ends when: explored step by step, at random, and timed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gradwire import InvalidArgument
from gradwire.serve._sandblaster.portions import Order, Portions
from portion_world import Eager, World

from bench.asynchronous.portions import over_bound


def explore(**instance: Any) -> int:
    """Does all steps of a small instance in every order; returns the number of states."""
    first = World(**instance)
    seen, stack = {first.key()}, [first]
    while stack:
        world = stack.pop()
        steps = world.steps()
        if world.coordinator.done:
            world.check()
        elif not steps:
            assert all(each.dead for each in world.replicas.values()), "nobody goes on"
        for step in steps + world.faults():
            after = world.fork()
            after.do(step)
            if (key := after.key()) not in seen:
                seen.add(key)
                stack.append(after)
    return len(seen)


def test_every_order_of_a_small_instance() -> None:
    assert explore(replicas=2, portions=2, deaths=1) >= 1000


@pytest.mark.parametrize(
    ("instance", "least"),
    [
        ({"replicas": 1, "portions": 2, "deaths": 1, "joins": 1}, 1000),
        ({"replicas": 2, "portions": 3, "deaths": 1}, 10_000),
        ({"replicas": 2, "portions": 2, "deaths": 1, "pauses": 1}, 10_000),
        ({"replicas": 2, "portions": 2, "pauses": 1, "kind": Portions}, 1000),
        ({"replicas": 2, "portions": 2, "batches": 2, "deaths": 1}, 10_000),
        ({"replicas": 3, "portions": 2}, 1000),
    ],
)
def test_every_order_of_a_larger_instance(instance: dict[str, Any], least: int) -> None:
    assert explore(**instance) >= least


class Trusting(Eager):
    """A coordinator with a mistake: every push counts, also of portions that others have."""

    def staged(
        self, replica: int, batch: int, sequence: int, tickets: Any, now: float
    ) -> list[Order]:
        for ticket in tickets:
            portion = self._replicas[replica].held.get(ticket)
            if portion is not None and not self._portions[portion].pushed:
                self._portions[portion].keeper = None
        return super().staged(replica, batch, sequence, tickets, now)


class Forgetful(Eager):
    """A coordinator with a mistake: what a dead replica kept and did not push is lost."""

    def leave(self, replica: int, now: float) -> list[Order]:
        self._replicas[replica].held.clear()
        return super().leave(replica, now)


@pytest.mark.parametrize("kind", [Trusting, Forgetful])
def test_the_exploration_finds_mistakes(kind: type[Portions]) -> None:
    with pytest.raises(AssertionError):
        random_runs(200, kind)


def random_runs(runs: int, kind: type[Portions]) -> None:
    """Does steps in random orders, with deaths, joins and pauses, until each batch is over."""
    for seed in range(runs):
        draw = random.Random(seed)
        world = World(
            replicas=draw.randint(1, 5),
            portions=draw.randint(1, 20),
            batches=3,
            push_every=draw.randint(1, 4),
            deaths=draw.randint(0, 6),
            joins=draw.randint(0, 6),
            pauses=draw.randint(0, 5),
            kind=kind,
        )
        likely = draw.choice([0.02, 0.2])
        while not (world.coordinator.done and world.left["batch"] == 0):
            faults, steps = world.faults(), world.steps()
            if not world.replicas:
                world.join()
            elif faults and draw.random() < likely:
                world.do(draw.choice(faults))
            else:
                assert steps, "nobody goes on"
                world.do(draw.choice(steps))
        world.check()


@pytest.mark.parametrize("kind", [Eager, Portions])
def test_random_orders_of_larger_instances(kind: type[Portions]) -> None:
    random_runs(150, kind)


def test_a_slow_replica_costs_little_with_backups() -> None:
    speeds = [0.05, 1, 1, 1]
    assert over_bound(speeds, 64, batches=2) <= 1.10
    assert over_bound(speeds, 64, batches=1, backups=False) >= 1.5


def test_a_stopped_replica_costs_little_with_backups() -> None:
    assert over_bound([1, 1, 1, 1], 64, batches=3, stop=True) <= 1.10


def test_equal_replicas_need_no_copies() -> None:
    assert over_bound([1, 1, 1, 1], 32, batches=2) <= 1.03


def test_what_a_replica_cannot_say_is_refused() -> None:
    portions = Portions()
    portions.begin(7, 3, 0.0)
    first, *_ = portions.join(0, 0.0)
    with pytest.raises(InvalidArgument, match="does not have"):
        portions.report(0, 99, 1.0, 0.0)
    with pytest.raises(InvalidArgument, match="not told to drop"):
        portions.forgotten(0, first.ticket, 0.0)
    portions.join(1, 0.0)
    order, *_ = portions.report(0, first.ticket + 1, 1.0, 0.0)
    assert order == Order(0, "keep", first.ticket + 1)
    for tickets in ([], [first.ticket + 1] * 2, [first.ticket]):
        with pytest.raises(InvalidArgument, match="does not hold"):
            portions.staged(0, 7, 0, tickets, 0.0)
    assert portions.staged(0, 6, 0, [99], 0.0) == []
    portions.leave(0, 0.0)
    assert list(portions.counts()) == [1]
