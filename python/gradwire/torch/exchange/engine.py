"""Exchange: the reductions of one step after another, each of which counts whole or not at all.

What averages goes through it: the hooks of DDP and FSDP2, elastic sessions, DiLoCo and OneBitAdam
(not the trainers over a parameter server). They say when a step begins, what has come, and whether
the step is good. Which arrays travel together, and in which codec, `ResidualState` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradwire._communicator import Communicator
from gradwire._feedback import ErrorFeedback
from gradwire.torch.exchange.gradient_scale import GradientScale
from gradwire.torch.exchange.residual_state import Call, ResidualState
from gradwire.torch.exchange.rules import Bucket, Rules


class Waitable(Protocol):
    """A reduction under way."""

    def wait(self) -> Any:
        """Waits until it is over; raises its error."""


class Exchange:
    """One model's steps over one communicator; every rank makes the same calls.

    `open` begins a step, `start` sends a bucket, `wait` ends the wait for all that was sent, and
    `end` keeps what the step has changed, or undoes it. One thread sends; another may `end`.
    """

    def __init__(
        self,
        communicator: Communicator,
        residuals: ResidualState,
        algorithm: str = "auto",
        op: str = "avg",
    ) -> None:
        """`op` is "avg", or "sum" for a caller that divides by itself."""
        self.communicator, self.residuals = communicator, residuals
        self._algorithm, self._op = algorithm, op
        self.is_open = False
        self._works: list[Waitable] = []
        self._lock = threading.Lock()  # guards the end of a step

    def open(self, step: int, scale: GradientScale) -> None:
        """Begins a step of this number and scale, the same on all ranks; undoes an unfinished one.

        Raises InvalidArgument when residuals cannot follow the scale.
        """
        self.end(False)
        self.residuals.open_step(step, scale)
        self.is_open = True

    def start(self, bucket: Bucket) -> None:
        """Starts to average a bucket's gradients in place, in the codecs of the step."""
        for call in self.residuals.calls(bucket):
            self._works.append(self.reduce(call, self._op))

    def reduce(self, call: Call, op: str) -> Waitable:
        """Starts one all_reduce, in place; the caller waits for it."""
        if op == "avg" and call.arrays[0].dtype is torch.float16:
            op = "sum"
            for each in call.arrays:  # divide first: the sum may overflow
                each.mul_(1 / self.communicator.size)
        work: Waitable = self.run(
            self.communicator.all_reduce,
            call.arrays[0] if len(call.arrays) == 1 else call.arrays,
            call,
            call.keys,
            op=op,
            async_op=True,
        )
        return RoundedWork(work, call) if call.rounded else work

    def run(
        self,
        collective: Callable[..., Any],
        arrays: torch.Tensor | Sequence[torch.Tensor],
        call: Call,
        keys: Sequence[tuple[str, int]] | None,
        **options: Any,
    ) -> Any:
        """Calls a collective with a call's codec, and with residuals where it has keys."""
        feedback = False if keys is None else self.residuals.feedback
        options = {"algorithm": self._algorithm, "codec": call.codec, **options}
        return collective(arrays, keys=keys, feedback=feedback, **options)

    def add(self, work: Waitable) -> None:
        """Adds what else the step waits for."""
        self._works.append(work)

    def take(self) -> list[Waitable]:
        """Hands over what was started since the last time, for the caller to wait for."""
        works, self._works = self._works, []
        return works

    def wait(self) -> None:
        """Waits for all that was started, even if some fails; raises the first error."""
        error = first_error(self._works)
        self._works = []
        if error is not None:
            raise error

    def wait_to_round(self) -> None:
        """Waits for what is rounded when it has come, while the rest travels; raises as `wait`."""
        error = first_error(each for each in self._works if isinstance(each, RoundedWork))
        self._works = [each for each in self._works if not isinstance(each, RoundedWork)]
        if error is not None:
            raise error

    def end(self, ok: bool) -> bool:
        """Keeps all changes of the step or none, alike on all ranks; returns whether it did.

        Waits for what is under way. Without a step, does nothing.
        """
        if self._works:
            first_error(self.take())
        with self._lock:
            was_open, self.is_open = self.is_open, False
            return was_open and self.residuals.end_step(ok)


class RoundedWork:
    """The work of a call whose averages are then rounded to the gradients' own type."""

    def __init__(self, work: Waitable, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self) -> None:
        """Waits for the call and rounds its averages; raises the call's error."""
        self._work.wait()
        for gradient, average in zip(self._call.rounded, self._call.arrays, strict=True):
            round_into(gradient, average)


def round_into(gradient: torch.Tensor, average: torch.Tensor) -> None:
    """Rounds an average to the gradient's type; finite values stay finite."""
    if gradient.dtype is torch.float16:
        most = torch.finfo(torch.float16).max
        average = torch.where(average.isfinite(), average.clamp(-most, most), average)
    gradient.copy_(average)


def first_error(works: Iterable[Waitable]) -> Exception | None:
    """Waits for all, even if some fail; returns the first error."""
    first: Exception | None = None
    for each in works:
        try:
            each.wait()
        except Exception as error:
            first = first or error
    return first


class Averages:
    """One step's tensors, which become averages in place."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        weight: float = 1.0,
        exchange: Exchange | None = None,
    ) -> None:
        """`weight` times the sum is the average. Without an exchange the tensors are averages."""
        self.tensors, self._weight, self._exchange = tensors, weight, exchange
        self.finite = True

    def start(self, step: int) -> None:
        """Starts the reductions in the codecs of a step; every rank calls it."""
        assert self._exchange is not None
        self._exchange.open(step, GradientScale(ranks=self._exchange.communicator.size))
        try:
            for bucket in buckets(self.tensors):
                self._exchange.start(bucket)
        except Exception:
            self.undo()
            raise

    def wait(self, prepare: Callable[[dict[str, torch.Tensor]], None] | None = None) -> None:
        """Waits for the averages, and keeps residuals if they are finite; again, does nothing.

        Finite averages are given to `prepare` first. Raises its error, and the first one of the
        reductions; then residuals are as they were.
        """
        if self._exchange is None:
            return
        try:
            self._exchange.wait()
        except Exception:
            self.undo()
            raise
        for each in self.tensors.values():
            each.mul_(self._weight)
        self.finite = are_finite(list(self.tensors.values()))
        if self.finite and prepare is not None:
            try:
                prepare(dict(self.tensors))
            except BaseException:
                self.undo()
                raise
        self._end(self.finite)

    def undo(self) -> None:
        """Ends what failed, when its communicator has: residuals stay as they were."""
        self._end(False)

    def _end(self, ok: bool) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(ok)


def averaging_exchange(
    communicator: Communicator,
    names: Mapping[torch.Tensor, str],
    rules: Rules,
    feedback: ErrorFeedback | None,
    algorithm: str,
) -> Exchange:
    """An exchange for `Averages`; residuals follow the number of ranks at once, for a saved state.

    `names` are the keys of residuals, by tensors of their shapes.
    """
    residuals = ResidualState(names, communicator.size, rules, feedback)
    residuals.follow_ranks()
    return Exchange(communicator, residuals, algorithm, op="sum")


def buckets(tensors: Mapping[str, torch.Tensor]) -> Iterator[Bucket]:
    """Tensors that can travel together: those of one type, on one device."""
    kinds: dict[object, list[str]] = {}
    for name, each in tensors.items():
        if each.numel():
            kinds.setdefault((each.dtype, each.device), []).append(name)
    for names in kinds.values():
        parts = [tensors[name] for name in names]
        yield Bucket(parts, names, parts)


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no element is NaN or Inf."""
    extremes = [torch.stack(torch.aminmax(each)) for each in tensors if each.numel()]
    return all(bool(torch.isfinite(each).all()) for each in extremes)
