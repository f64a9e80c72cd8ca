"""The coordinator's run: batches, iterations, and the file from which a new one goes on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire._errors import Error, InvalidArgument, describe
from gradwire.serve._client import ParameterServer, PendingResults
from gradwire.serve._coordinator import Coordinator
from gradwire.serve._lbfgs import Minimizer
from gradwire.serve._sandblaster.searches import Search
from gradwire.serve._vectors import Command, Discard, Fold, Names

_STATE_VERSION = 1
_DISCARD_SECONDS = 5.0
_GAP_BITS = 32  # numbers of batches have 64


@dataclass(frozen=True)
class Progress:
    """One iteration of L-BFGS: where it ended, and what it took.

    `loss` is the sum over the batch's portions, and `gradient` the largest absolute component of
    the gradient, both at the end of the iteration. `step` is the step's length along the direction,
    0 where no lower loss was found; `converged` says that there is none along the gradient either.
    `portions` and `copies` count, by replica, the portions that it computed and those that were
    handed to it while others had them, in `seconds`.
    """

    iteration: int
    loss: float
    gradient: float
    step: float
    evaluations: int
    seconds: float
    portions: dict[str, int]
    copies: dict[str, int]
    converged: bool


@dataclass(frozen=True)
class Batches:
    """The portions of each batch: all, or some that are drawn for a number of iterations."""

    portions: int
    size: int
    iterations: int
    seed: int

    def chosen(self, iteration: int) -> list[int]:
        """The portions of an iteration's batch."""
        if self.size == self.portions:
            return list(range(self.portions))
        draw = random.Random(f"{self.seed} {iteration // self.iterations}")
        return sorted(draw.sample(range(self.portions), self.size))

    def is_new(self, iteration: int) -> bool:
        """Whether an iteration begins with another batch than the one before it."""
        return self.size < self.portions and iteration % self.iterations == 0

    def describe(self) -> list[int]:
        """Numbers that must be those with which a state file was written."""
        return [self.portions, self.size, self.iterations, self.seed]


class Lead:
    """A coordinator at work: the minimizer's evaluations, by replicas and shards."""

    def __init__(
        self,
        server: ParameterServer,
        coordinator: Coordinator,
        batches: Batches,
        *,
        path: Path | None,
        patience: float,
        history: int,
        search: Search,
        lr: float,
        by_norm: bool,
    ) -> None:
        """Goes on from the state in the file `path`, if there is one; raises InvalidArgument."""
        self._server, self._coordinator, self._batches = server, coordinator, batches
        self._path, self._patience = path, patience
        self._minimizer = Minimizer(
            server._command, self._evaluate, history=history, search=search, lr=lr, by_norm=by_norm
        )
        self._iteration = 0
        self._batch = _last_batch(server)
        self._counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._unsaved = False
        self._error: str | None = None  # of the last step
        if path is not None and not path.parent.is_dir():
            raise InvalidArgument(f"state={str(path)!r}: there is no folder {path.parent}")
        if path is not None and path.exists():
            self._resume(path)

    def step(self) -> Progress:
        """Does one iteration."""
        try:
            progress = self._step()
        except BaseException as error:
            self._error = f"{type(error).__name__}: {describe(error)}"
            raise
        self._error = None
        return progress

    def _step(self) -> Progress:
        began = time.monotonic()
        if self._unsaved:  # or this iteration would write over what the file names
            self._save()
        self._counts = (Counter(), Counter())
        if self._batches.is_new(self._iteration):
            self._minimizer.new_batch()
        found = self._minimizer.step()
        self._iteration += 1
        self._unsaved = True
        self._save()
        portions, copies = self._counts
        return Progress(
            self._iteration,
            found.loss,
            found.gradient,
            found.step,
            found.evaluations,
            time.monotonic() - began,
            dict(portions),
            dict(copies),
            found.converged,
        )

    def close(self, error: BaseException | None = None) -> None:
        """Ends replicas and connections; after an error, or where the last step failed, as one."""
        if error is not None:
            self._error = f"{type(error).__name__}: {describe(error)}"
        self._coordinator.close(self._error)
        self._server.close()

    def _evaluate(self, target: str, then: Sequence[Command]) -> tuple[float, list[Any]]:
        self._batch += 1
        batch, chosen = self._batch, self._batches.chosen(self._iteration)
        try:
            check = _Shards(self._server).check
            found = self._coordinator.evaluate(batch, chosen, self._patience, check)
        except BaseException:
            with contextlib.suppress(Error):
                self._server._command([Discard(batch)], timeout=_DISCARD_SECONDS)
            raise
        for counts, more in zip(self._counts, (found.portions, found.copies), strict=True):
            counts.update(more)
        # Discards what batches have left that ended in an error, or with their coordinator.
        begin: list[Command] = [Fold(target, batch, found.pushes), Discard(None)]
        return found.loss, self._server._command([*begin, *then])[len(begin) :]

    def _save(self) -> None:
        """Writes the state beside the old file, and then puts it in its place."""
        if self._path is None:
            return
        state = {
            "version": _STATE_VERSION,
            "batches": self._batches.describe(),
            "iteration": self._iteration,
            "batch": self._batch,
            "minimizer": self._minimizer.state(),
        }
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with open(beside, "w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._path)
        self._unsaved = False

    def _resume(self, path: Path) -> None:
        try:
            state = _read(path)
            if state["batches"] != self._batches.describe():
                raise InvalidArgument("portions, batch, iterations_per_batch or seed were others")
            self._server.wait(0)
            self._minimizer.load(state["minimizer"], self._server._command([Names()])[0])
        except InvalidArgument as error:
            raise InvalidArgument(
                f"cannot go on from the state in {path}: {describe(error)}; without the file the "
                "parameters stay as they are and the history begins anew"
            ) from None
        self._iteration = state["iteration"]
        self._batch = max(self._batch, state["batch"])


def _last_batch(server: ParameterServer) -> int:
    """A number below which batches are other coordinators': theirs are over, or nobody's.

    A shard that was started anew has forgotten them, and replicas may still push to it for one. So
    it is followed by a gap, in which no two coordinators end at the same number.
    """
    last = max(int(each["last_batch"]) for each in server.stats())
    return last + secrets.randbits(_GAP_BITS)


class _Shards:
    """Whether all shards are there, asked while nothing else is said to them."""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self._asked: PendingResults | None = None

    def check(self) -> None:
        """Raises TransportError that names a shard which has ended; does not wait."""
        if self._asked is not None and self._asked.done():
            self._asked.wait()
            self._asked = None
        if self._asked is None:
            self._asked = self._server._command([Names()], async_op=True)


def _read(path: Path) -> Mapping[str, Any]:
    """The state in a file; raises InvalidArgument where it is none."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"it is no JSON: {describe(error)}") from None
    if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
        raise InvalidArgument(f"it is no state of version {_STATE_VERSION}")
    numbers = [state.get("iteration"), state.get("batch")]
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise InvalidArgument("it has no number of iterations, or of batches")
    if not isinstance(state.get("minimizer"), dict):
        raise InvalidArgument("it has nothing of the minimizer")
    return state
