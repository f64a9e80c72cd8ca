"""OuterSteps: the rounds of one model on one rank, and its calls to the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradwire._communicator import Communicator
from gradwire._errors import Error
from gradwire.torch._ranks.checksums import checksum, require_agreement
from gradwire.torch.exchange.engine import Averages, Exchange
from gradwire.torch.outer.buffers import SharedBuffers
from gradwire.torch.outer.checks import Untrained
from gradwire.torch.outer.outer import OuterParameters, copies, copy_into
from gradwire.torch.outer.roll_call import RankReport, raise_on_all
from gradwire.torch.outer.rounds import Round, Stopwatch, paced_steps

_BILLION = 10**9


class OuterSteps:
    """One model's outer steps on one rank, which `DiLoCo` offers to programs.

    All ranks make the same calls of the communicator in the same order: those of the fragments one
    after the other, and before each round's first one a report. One fragment travels at a time.
    """

    def __init__(
        self,
        communicator: Communicator,
        parts: Sequence[OuterParameters],
        exchange_over: Callable[[Communicator], Exchange],
        round_: Round,
        watch: Stopwatch,
        untrained: Untrained,
        buffers: SharedBuffers | None,
        *,
        pace: bool,
        mix: float,
    ) -> None:
        """`exchange_over` makes the exchange over some ranks, which may change."""
        self._parts, self._exchange_over = parts, exchange_over
        self._round, self._watch = round_, watch
        self._untrained, self._buffers = untrained, buffers
        self._paced, self._mix = pace, mix
        self._averages: Averages | None = None  # on their way
        self._due_in = 0  # inner steps until the exchange's averages count
        self._done = 0  # exchanges whose averages were applied, or were none
        self._unreported = 0  # inner steps
        self._finishing = self._all_finished = False
        self.asks_to_stop = False  # whether the program asks if it should
        self.should_stop = False  # as of the exchange that was started last, on all ranks
        self.pace = (round_.steps,) * communicator.size
        self._join(communicator)

    @property
    def rounds(self) -> int:
        """Rounds of which all fragments were applied."""
        return self._done // len(self._parts)

    @property
    def exchanges(self) -> int:
        """Fragments exchanged so far."""
        return self._round.exchanges

    def step(self) -> bool:
        """Counts an inner step, and makes the outer steps that are due."""
        before, stopping = self._done, self.should_stop
        with self._ending_on_failure():
            self._watch.stop()
            self._round.done += 1
            self._unreported += 1
            self._due_in -= 1
            if self._averages is not None and self._due_in <= 0:
                self._apply()
            # A rank of few steps has several fragments due in one. The others may stop after any of
            # these, so what follows a stop waits for the next step here, too.
            while self._round.is_due and self.should_stop == stopping:
                self._next_fragment()
            self._watch.start()
        return self._done > before

    def finish(self) -> None:
        """Goes on with outer steps until all ranks have finished."""
        self._finishing, self._all_finished = True, False
        try:
            with self._ending_on_failure():
                while self._round.fragment or not self._all_finished:
                    self._next_fragment()
                self._apply()
                for each in self._parts:
                    each.install()
        finally:
            self._finishing = False
        self._watch.start()

    def check_agreement(self) -> None:
        """Compares the common values and velocities of all ranks."""
        self._apply()
        require_agreement(self.communicator, self._tensors(), "outer values")

    def go_on_with(self, communicator: Communicator) -> None:
        """Takes over a communicator of the ranks that survived a failure."""
        try:
            self._apply()
        except Error:
            self._drop()
        self._join(communicator)
        mine = np.array([[self._done, self._round.steps]], np.int64)
        every = communicator.all_gather(mine)
        done = every[:, 0].tolist()
        ahead = max(done)
        if min(done) < ahead:
            self._take_over(done.index(ahead), behind=self._done < ahead)
        self._done = ahead
        self._round.go_to(ahead)
        self.pace = tuple(every[:, 1].tolist())
        self._watch.start()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step needs, as tensors and plain values."""
        averages = self._saved_averages()  # first: it decides about residuals
        return {
            **self._exchange.residuals.state_dict(),
            "outer": copies(self._tensors()),
            "parameters": copies(self._parameters()),
            "buffers": {} if self._buffers is None else copies(self._buffers.values),
            "round": [self._round.steps, self._round.next_steps, self._round.done],
            "exchanges": [self._round.exchanges, self._done, self._unreported],
            "pace": list(self.pace),
            "exchange": averages,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces everything by a saved state; raises InvalidArgument for another model's."""
        self._exchange.residuals.load_state_dict(saved)
        copy_into(self._tensors(), saved["outer"], "outer value")
        if self._buffers is not None:
            self._buffers.load(saved["buffers"])
        with torch.no_grad():
            copy_into(self._parameters(), saved["parameters"], "parameter")
        self._round.steps, self._round.next_steps, self._round.done = map(int, saved["round"])
        self._round.exchanges, self._done, self._unreported = map(int, saved["exchanges"])
        self.pace = tuple(map(int, saved["pace"]))
        if len(self.pace) != self.communicator.size:  # of another number of ranks
            self.pace = (self._round.every,) * self.communicator.size
            self._round.steps = self._round.next_steps = self._round.every
        self._averages, self._due_in = None, 0
        if saved["exchange"] is not None:
            self._averages = Averages(copies(saved["exchange"]["averages"]))
            self._averages.finite = bool(saved["exchange"]["finite"])
            self._due_in = int(saved["exchange"]["due_in"])
        self._untrained.note()
        self._watch.start()

    def checksum(self) -> int:
        """A sum over the bits of all common values."""
        return checksum(each for part in self._parts for each in part.values.values())

    def _join(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._exchange = self._exchange_over(communicator)
        self._active = communicator.size

    def _next_fragment(self) -> None:
        """Starts the exchange of the next fragment, when the one before is applied."""
        self._apply()
        if self._round.fragment == 0:
            self._report()
        self._note_stop()
        if self._active:
            part = self._parts[self._round.fragment]
            weight = 1 / self._active
            averages = Averages(part.gradients(), weight, self._exchange)
            averages.start(self.rounds)
            self._averages = averages
        else:
            self._done += 1
        self._due_in = 0 if self._finishing else self._round.delay
        self._round.end_exchange()
        if self._due_in == 0:
            self._apply()
            self._note_stop()

    def _note_stop(self) -> None:
        """Notes whether to stop, while nothing travels: a program may ask while something does."""
        if self.asks_to_stop:
            self.should_stop = self.communicator._stop_agreed()

    def _report(self) -> None:
        """Tells the other ranks of this one, and decides with them how the round goes on."""
        problem = self._untrained.problem()
        own = RankReport(
            self.checksum(),
            round(self._watch.median() * _BILLION),
            self._unreported,
            int(self._finishing),
            int(bool(problem)),
        )
        every = own.exchange(self.communicator)
        self._unreported = 0
        if any(each.refuses for each in every):
            raise_on_all(self.communicator, problem)
        if any(each.checksum != own.checksum for each in every):
            self.check_agreement()
        self._all_finished = all(each.finished for each in every)
        self._active = sum(each.steps > 0 for each in every)
        if self._active and self._paced:
            self._set_pace(every)
        if self._active and self._buffers is not None:
            self._buffers.average(self.communicator, 1 / self._active)

    def _set_pace(self, every: Sequence[RankReport]) -> None:
        seconds = [each.nanoseconds / _BILLION if each.steps else 0.0 for each in every]
        self.pace = tuple(paced_steps(self._round.every, seconds))
        self._round.next_steps = self.pace[self.communicator.rank]

    def _apply(self) -> None:
        """Makes the outer step of the fragment that travels, if there is one."""
        averages = self._arrived()
        if averages is None:
            return
        self._averages = None
        part = self._parts[self._done % len(self._parts)]
        self._done += 1
        if averages.finite:
            part.update(averages.tensors)
            part.install(self._mix)
            return
        problem = part.problem()
        part.install()
        raise_on_all(
            self.communicator,
            problem,
            "a sum of outer gradients is too large for float32",
            ending=": all ranks have the parameters of the outer step before again",
        )

    def _arrived(self) -> Averages | None:
        """The averages under way, once they are there."""
        if self._averages is not None:
            try:
                self._averages.wait()
            except Exception:
                self._averages = None
                raise
        return self._averages

    def _drop(self) -> None:
        averages, self._averages = self._averages, None
        if averages is not None:
            averages.undo()

    def _take_over(self, root: int, *, behind: bool) -> None:
        """Gives all ranks the root's values, which some did not get before the failure."""
        tensors = list(self._tensors().values())
        if self._buffers is not None:
            tensors += self._buffers.values.values()
        for kind in dict.fromkeys((each.dtype, each.device) for each in tensors):
            some = [each for each in tensors if (each.dtype, each.device) == kind]
            self.communicator.broadcast(some, root=root)
        if behind:
            self._parts[self._done % len(self._parts)].install()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: each for part in self._parts for name, each in part.tensors().items()}

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: each for part in self._parts for name, each in part.parameters.items()}

    def _saved_averages(self) -> dict[str, Any] | None:
        averages = self._arrived()
        if averages is None:
            return None
        tensors = copies(averages.tensors)
        return {"averages": tensors, "due_in": self._due_in, "finite": averages.finite}

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """Tells the other ranks of an error that is this rank's alone."""
        try:
            yield
        except Error:
            raise  # of all ranks
        except BaseException as error:
            self.communicator.abort(f"{type(error).__name__} in an outer step")
            self._drop()
            raise
