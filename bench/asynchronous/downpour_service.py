"""A parameter server without threads and connections, for events in virtual time.

It computes what a service of `gradwire.serve` with one shard computes, with the codecs of the core;
test_bench_downpour_simulated.py compares the two. A thread that waits for another costs more than
what it waits for, on a machine with other work a hundred times more.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import gradwire
import numpy as np
from gradwire import serve
from gradwire._base.rules import choose
from numpy.typing import NDArray

Array = NDArray[np.float32]
Rules = Sequence[tuple[str, str]]
_CASTS = ("none", "fp16", "bf16")  # pulled as values, others as differences


class Service:
    """Values, the rule's state and a version. Arrays are flat."""

    def __init__(
        self, rule: serve.Rule, *, divide: bool = False, max_staleness: int | None = None
    ) -> None:
        self.values: list[Array] = []
        self.version = 0
        self._rule, self._divide, self._most = rule, divide, max_staleness
        self._update = _UPDATES[type(rule)]
        self._squares: list[Array] = []
        self._staleness: list[int] = []

    @property
    def mean_staleness(self) -> float:
        """Versions between a push's values and it, over all pushes that were applied."""
        return statistics.fmean(self._staleness) if self._staleness else 0.0

    def join(self, initial: Sequence[Array]) -> None:
        """Takes the first client's values."""
        if not self.values:
            self.values = [each.ravel().copy() for each in initial]
            start = getattr(self._rule, "eps", 0.0)
            self._squares = [np.full_like(each, start) for each in self.values]

    def apply(self, gradients: Sequence[Array], version: int) -> bool:
        """Applies a push; False refuses it as too stale."""
        staleness = self.version - max(version, 0)
        if self._most is not None and staleness > self._most:
            return False
        rate = self._rule.lr / max(1, staleness) if self._divide else self._rule.lr
        for w, squares, g in zip(self.values, self._squares, gradients, strict=True):
            self._update(w, squares, g, np.float32(rate))
        self.version += 1
        self._staleness.append(staleness)
        return True


class Client:
    """One replica's connection: the methods of `gradwire.serve.ParameterServer` that events use."""

    def __init__(self, service: Service, initial: Sequence[Array]) -> None:
        service.join(initial)
        self._service = service
        self._shadow: list[Array] | None = None
        self.versions = [-1]

    def push(
        self,
        gradients: Sequence[Array],
        *,
        codec: str,
        rules: Rules = (),
        feedback: gradwire.ErrorFeedback | None = None,
    ) -> None:
        """Encodes each gradient, with its place as its key, and applies what comes out."""
        choices = [*rules, ("*", codec)]
        decoded = []
        for place, each in enumerate(gradients):
            key = str(place)
            chosen = _codec(choose(key, choices))
            if feedback is None and str(chosen) == "none":
                decoded.append(each.ravel())
                continue
            payload = chosen.encode(each, feedback=feedback, key=key if feedback else None)
            decoded.append(chosen.decode(payload, each.size))
        if not self._service.apply(decoded, self.versions[0]) and feedback is not None:
            for place, each in enumerate(decoded):
                feedback.add(str(place), each)

    def pull(self, arrays: Sequence[Array], *, codec: str = "none") -> None:
        """Writes the values into arrays, or what this client takes them to be in a lossy codec."""
        service, chosen = self._service, _codec(codec)
        self.versions = [service.version]
        found = service.values
        if codec not in _CASTS:
            found = self._follow(chosen)
        elif codec != "none":
            found = [chosen.decode(chosen.encode(each), each.size) for each in found]
        for array, each in zip(arrays, found, strict=True):
            array[...] = each.reshape(array.shape)

    def _follow(self, codec: gradwire.codec.NativeCodec) -> list[Array]:
        """Adds the difference to what this client has; all of the values come the first time."""
        if self._shadow is None:
            self._shadow = [each.copy() for each in self._service.values]
            return self._shadow
        for own, now in zip(self._shadow, self._service.values, strict=True):
            own += codec.decode(codec.encode(now - own), own.size)
        return self._shadow


@functools.cache
def _codec(name: str) -> gradwire.codec.NativeCodec:
    return gradwire.codec.get(name)


def _sgd(w: Array, _: Array, g: Array, rate: np.float32) -> None:
    w -= rate * g


def _adagrad(w: Array, squares: Array, g: Array, rate: np.float32) -> None:
    step = g * g
    squares += step
    np.sqrt(squares, out=step)
    w -= np.divide(rate * g, step, out=step)


_UPDATES: dict[type[serve.Rule], Callable[[Array, Array, Array, np.float32], None]] = {
    serve.SGD: _sgd,
    serve.Adagrad: _adagrad,
}
