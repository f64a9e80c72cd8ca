"""Schedules that no generator makes: for every chunk a random tree, up which it is reduced."""

from __future__ import annotations

import random

from gradwire import Schedule


def random_schedule(rng: random.Random, ranks: int) -> str:
    """The text of a correct all_reduce; its chunks' trees have roots and depths of their own."""
    chunks = rng.randint(1, 4)
    trees = [_random_tree(rng, ranks) for _ in range(chunks)]
    height = max(depth for tree in trees for _, depth in tree.values())
    made = Schedule.builder("all_reduce", ranks=ranks, chunks=chunks, name="random_trees")
    up = [
        (height - depth, child, parent, chunk)
        for chunk, tree in enumerate(trees)
        for child, (parent, depth) in tree.items()
    ]
    for round, child, parent, chunk in sorted(up):  # what is one message stands together
        made.reduce(round, child, parent, chunk)
        made.copy(2 * height - 1 - round, parent, child, chunk)
    schedule = made.build()
    assert schedule.verify().in_tree, schedule.dump()
    return schedule.dump()


def _random_tree(rng: random.Random, ranks: int) -> dict[int, tuple[int, int]]:
    """A tree by rank but the root: its parent, and how far it is from the root."""
    first, *others = rng.sample(range(ranks), ranks)
    depths, tree = {first: 0}, {}
    for rank in others:
        parent = rng.choice(list(depths))
        depths[rank] = depths[parent] + 1
        tree[rank] = parent, depths[rank]
    return tree
