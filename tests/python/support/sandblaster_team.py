"""A coordinator and replicas of this process, for tests of Sandblaster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from gradwire import serve

PORTIONS, EACH = 12, 5  # the parameters are a block of five for each portion


def blocks(parameters: Any, portion: int) -> tuple[float, list[Any]]:
    """Half the squared distance of a portion's block from its number: what counts how often?"""
    gradient = np.zeros_like(parameters[0])
    block = slice(portion * EACH, (portion + 1) * EACH)
    gradient[block] = parameters[0][block] - portion
    return float((gradient**2).sum() / 2), [gradient]


class Replica:
    """A replica that is a thread; `error` is what its `serve()` raised."""

    def __init__(self, job: serve.DistributedLBFGS) -> None:
        self.job, self.error = job, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.job.serve()
        except Exception as error:
            self.error: Exception | None = error

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


class Team:
    """A coordinator and replicas at one store, all with the same arguments."""

    def __init__(self, stack: ExitStack, store: str) -> None:
        self._stack, self.store = stack, store
        self.options: dict[str, Any] = {"function": blocks, "portions": PORTIONS}
        self.like: Callable[[], Any] = lambda: [np.zeros(PORTIONS * EACH)]
        self.replicas: list[Replica] = []

    def make(self, **options: Any) -> serve.DistributedLBFGS:
        options = {"store": self.store, "timeout": 30, **self.options, **options}
        return serve.DistributedLBFGS(self.like(), options.pop("function"), **options)

    def lead(self, **options: Any) -> serve.DistributedLBFGS:
        return self._stack.enter_context(self.make(**options))

    def replica(self, **options: Any) -> Replica:
        options = {"replica": f"replica {len(self.replicas)}", **options}
        self.replicas.append(Replica(self.make(**options)))
        return self.replicas[-1]
