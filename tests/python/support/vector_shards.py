"""Shards in memory, by NumPy: what `ParameterServer.ask` does, for tests without servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gradwire.serve._vectors import (
    Absmax,
    Abssum,
    Combine,
    Command,
    Copy,
    Discard,
    Dots,
    Drop,
    Fold,
    Names,
)

Vector = np.ndarray[Any, Any]
Function = Callable[[Vector], tuple[float, Vector]]


class Shard:
    """One shard: its part of each vector, and the staged pushes of it."""

    def __init__(self, part: Vector) -> None:
        self.vectors = {"w": part.copy()}
        self.staged: dict[tuple[int, int, int], Vector] = {}

    def write(self, target: str, value: Vector) -> None:
        self.vectors[target] = value.astype(self.vectors["w"].dtype)

    def fold(self, command: Fold) -> None:
        parts = [self.staged[(command.batch, *push)].astype(np.float64) for push in command.pushes]
        total = np.zeros_like(parts[0])
        for part in parts:
            total += part
        self.write(command.target, total)
        self.discard(command.batch)

    def discard(self, batch: int | None) -> None:
        self.staged = {
            key: each for key, each in self.staged.items() if batch not in (None, key[0])
        }


class Shards:
    """All shards of a vector; counts the messages that it answers."""

    def __init__(self, parameters: Vector, number: int = 1) -> None:
        self.shards = [Shard(part) for part in np.array_split(parameters, number)]
        self.messages = 0

    def read(self, name: str = "w") -> Vector:
        return np.concatenate([each.vectors[name] for each in self.shards])

    def stage(self, key: tuple[int, int, int], gradient: Vector) -> None:
        for shard, part in zip(
            self.shards, np.array_split(gradient, len(self.shards)), strict=True
        ):
            shard.staged[key] = part.copy()

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        self.messages += 1
        return [self._do(each) for each in commands]

    def _do(self, command: Command) -> Any:
        if isinstance(command, Dots):
            return [self._dot(one, two) for one, two in command.pairs]
        if isinstance(command, Absmax):
            return float(np.abs(self.read(command.name)).max())
        if isinstance(command, Abssum):
            return float(np.abs(self.read(command.name)).sum(dtype=np.float64))
        if isinstance(command, Names):
            return sorted(self.shards[0].vectors)
        for shard in self.shards:
            self._do_on(shard, command)
        return None

    def _dot(self, one: str, two: str) -> float:
        """The same for any number of shards."""
        return float(self.read(one).astype(np.float64) @ self.read(two).astype(np.float64))

    def _do_on(self, shard: Shard, command: Command) -> None:
        if isinstance(command, Combine):
            total: Any = 0.0
            for coefficient, source in command.terms:
                total = total + coefficient * shard.vectors[source].astype(np.float64)
            shard.write(command.target, total)
        elif isinstance(command, Copy):
            shard.write(command.target, shard.vectors[command.source].copy())
        elif isinstance(command, Drop):
            del shard.vectors[command.name]
        elif isinstance(command, Fold):
            shard.fold(command)
        else:
            assert isinstance(command, Discard)
            shard.discard(command.batch)


class Evaluator:
    """Evaluates a function at "w" of shards, as one replica would, and counts how often."""

    def __init__(self, shards: Shards, function: Function) -> None:
        self._shards, self._function = shards, function
        self.evaluations = 0

    def __call__(self, target: str, then: Sequence[Command]) -> tuple[float, list[Any]]:
        self.evaluations += 1
        loss, gradient = self._function(self._shards.read())
        self._shards.stage((self.evaluations, 0, 0), gradient)
        fold = Fold(target, self.evaluations, [(0, 0)])
        return loss, self._shards.ask([fold, *then])[1:]
