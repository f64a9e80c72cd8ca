"""State: everything that the DDP hook keeps between buckets."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gradwire._calls.reductions import CodecLike
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._feedback import ErrorFeedback
from gradwire._launch import at_exit
from gradwire._schedules.schedule import Schedule
from gradwire.torch._step import saved as saving
from gradwire.torch._step.buckets import compressible, gradient_elements
from gradwire.torch._step.clipping import Clipping
from gradwire.torch._step.double_counting import require_no_momentum, watch_optimizers
from gradwire.torch._step.gradient_scale import Scaler, persistent_state_of
from gradwire.torch._step.guard import Guard
from gradwire.torch._step.join_tracker import JoinTracker
from gradwire.torch._step.momentum import Momentum
from gradwire.torch._step.rules import CodecChoice, Rules, require_matches
from gradwire.torch._step.stats import Stats, by_codec
from gradwire.torch._step.steps import Steps
from gradwire.torch._step.training_state import TrainingState
from gradwire.torch._step.unused import UnusedParameters

_log = logging.getLogger("gradwire")

_BY_PARAMETER = "use gradwire.torch.register(), or give parameters=ddp.module.named_parameters()"


class State:
    """The hook's state for one DDP model. Made by `register`.

    `error` is the first error, and final: its backward raises it, and so do all later backwards
    and, when `register` made the state, every forward in training. Gradients are undefined then;
    build a new DDP model to go on.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: CodecChoice = "none",
        algorithm: str = "auto",
        *,
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
        feedback: ErrorFeedback | bool | None = None,
        rules: Sequence[tuple[str, CodecChoice]] = (),
        min_elements: int = 1024,
        momentum: Momentum | None = None,
        clip_norm: float | None = None,
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        find_unused: bool = False,
        joins: JoinTracker | None = None,
        owns_communicator: bool = False,
    ) -> None:
        """Takes the options of `register`; `parameters` are the model's (name, parameter) pairs.

        `find_unused` says that DDP looks for parameters without a gradient, `joins` tracks which
        ranks still train within `join()`, `owns_communicator` that `close` closes it too. Raises
        InvalidArgument.
        """
        self._names = {parameter: name for name, parameter in parameters}
        self._rules = Rules(codec, rules, min_elements)
        _require_algorithm(algorithm, self._rules.lossy, communicator)
        self.communicator, self.codec, self.algorithm = communicator, codec, algorithm
        kept = _feedback(feedback, self._rules, bool(self._names))
        if kept is not None:
            persistent_state_of(kept).require_free(self._names)
        if self._names:
            require_matches(rules, self._names.values())
        if not self._names and (momentum is not None or rules):
            raise InvalidArgument(f"momentum= and rules= are by parameter: {_BY_PARAMETER}")
        if momentum is not None and momentum.factor:
            watch_optimizers(self)
            if optimizer is not None:
                require_no_momentum(optimizer, self._names)
        keeps = kept is not None or momentum is not None
        unused = UnusedParameters(self._names) if find_unused and keeps else None
        clipping = None if clip_norm is None else Clipping(clip_norm, communicator.size)
        self._training = TrainingState(
            self._names,
            self._rules,
            kept,
            momentum,
            scaler,
            optimizer,
            unused,
            clipping,
            communicator.size,
        )
        self._steps = Steps(communicator, algorithm, self._training, joins)
        self._guard: Guard | None = None
        if kept is not None:
            persistent_state_of(kept).state = weakref.ref(self)
        self._close = weakref.finalize(self, self._steps.close, owns_communicator)
        # gradwire closes it at exit: weakref's own order depends on what was imported first.
        self._close.atexit = False
        at_exit.close_first(self._steps)

    def __repr__(self) -> str:
        failed = f", error={self.error!r}" if self.error else ""
        return (
            f"State(rank {self.communicator.rank} of {self.communicator.size}, "
            f"codec={self.codec!r}, algorithm={self.algorithm!r}, steps={self.steps}, "
            f"bytes={self.bytes}{failed})"
        )

    @property
    def feedback(self) -> ErrorFeedback | None:
        """The residuals, under the parameters' names as keys; None when the hook keeps none."""
        return self._training.feedback

    @property
    def error(self) -> Exception | None:
        """The first error, which is final; None before."""
        return self._steps.error

    @property
    def steps(self) -> int:
        """The number of backward passes with all gradients averaged, without paused ones."""
        return self._steps.done

    @property
    def buckets(self) -> int:
        """The number of buckets in those backward passes."""
        return self._steps.counters.buckets

    @property
    def bytes(self) -> int:
        """Bytes of gradients in those backward passes, before the codec."""
        return self._steps.counters.total.dense_bytes

    @property
    def closed(self) -> bool:
        """Whether close() was called, or the interpreter is exiting."""
        return self._steps.closed

    def close(self) -> None:
        """Ends the hook's threads, and closes its communicator if `register` made that.

        Runs at exit too. Aborts the communicator while buckets are in flight. Raises Error in the
        end if the last backward bypassed the hook.
        """
        self._close()
        self._require_averaged()

    def stats(self) -> Stats:
        """Bytes, ratio and times of the last step and of all; residual norms now."""
        found = []
        for parameter, name in self._names.items():
            codec = self._codec_of(name, parameter)
            kept = self.feedback.residual(name) if self.feedback is not None else ()
            norm = float(torch.as_tensor(kept).double().norm())
            found.append((codec, gradient_elements(parameter), norm))
        counters = self._steps.counters
        return Stats(counters.last, counters.total, by_codec(found))

    def scale_residuals(self, factor: float) -> None:
        """Multiplies all residuals by a factor, when gradients or learning rates change by it."""
        if self.feedback is not None:
            self.feedback.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """Saves this rank's residuals and all else that the next step needs, as a dict.

        The dict holds tensors and plain values by parameter name; each rank saves its own. After an
        error it holds the state after the last step that succeeded. Do not call it within backward.
        Raises Error if the last backward bypassed the hook.
        """
        self._require_averaged()
        self._steps.abandon_step()
        return {
            "version": saving.VERSION,
            "rank": self.communicator.rank,
            "world_size": self.communicator.size,
            "steps": self.steps,
            **self._training.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, resized: bool = False) -> None:
        """Continues from this rank's `state_dict`; every rank calls it, before a step.

        With the same model, ranks and settings, training has the same bits as if it had not been
        interrupted, at any step. gradwire's log warns when that may not hold: when DDP's buckets
        turn out to be different, or when two interruptions follow each other before DDP has
        rebuilt its buckets. Without feedback, stochastic rounding starts from new numbers.

        `saved` may also be the result of `gather_state_dict`: the rank takes its share, even if the
        number of ranks has changed. Raises InvalidArgument for the state of another model, another
        rank or another number of ranks. `resized=True` accepts another rank and number of ranks,
        for survivors that go on; `add_residuals` adds the residuals of ranks that left.
        """
        communicator = self.communicator
        saving.require_version(saved)
        if "ranks" in saved:
            saving.require_complete(saved)
            saved = saving.share(saved, communicator.rank, communicator.size)
        elif not resized:
            saving.require_own(saved, communicator.rank, communicator.size)
        self._steps.abandon_step()
        self._training.load_state_dict(saved)
        self._steps.done = int(saved["steps"])

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Adds the residuals of a rank that left; one rank calls it, before a step.

        `saved` is that rank's `state_dict`, from any number of ranks: its residuals keep their
        weight in the average. Raises InvalidArgument for another model's state.
        """
        saving.require_version(saved)
        self._steps.abandon_step()
        self._training.add_residuals(saved)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Averages gradients that will be discarded, without using or changing the hook's state.

        A context manager for backwards, the same ones on all ranks. Residuals, velocities and
        `steps` stay as they are; gradients travel uncompressed where the codec is biased, and are
        neither clipped nor given momentum. To send nothing at all, run forward and backward within
        `no_sync()`. Raises InvalidArgument within `ddp.join()`, where ranks without inputs could
        not pause.
        """
        if self._steps.in_join:
            raise InvalidArgument(
                "paused() is not possible within ddp.join(): ranks that have joined cannot pause "
                "with the others; run these backwards within no_sync()"
            )
        before, self._training.paused = self._training.paused, True
        try:
            yield
        finally:
            self._training.paused = before

    def _require_averaged(self) -> None:
        if self._guard is not None and self.error is None:
            self._guard.require_averaged()

    def _codec_of(self, name: str, parameter: torch.Tensor) -> CodecLike:
        """The codec of a parameter in the last step."""
        if not compressible(parameter):
            return "none"
        return self._rules.codec(name, gradient_elements(parameter), max(self.steps - 1, 0))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickles as None: a state holds connections and threads."""
        warn_of_copy()
        return type(None), ()


def warn_of_copy() -> None:
    """Warns that a copy of the model does not have the hook."""
    _log.warning(
        "a copied or saved model is without gradwire's hook: call gradwire.torch.register() for a "
        "copy that is to be trained; the hook's own state is state.state_dict()"
    )


def _feedback(
    given: ErrorFeedback | bool | None, rules: Rules, named: bool
) -> ErrorFeedback | None:
    if given is False or (given is None and not rules.needs_feedback):
        return None
    if not named:
        raise InvalidArgument(f"error feedback is kept by parameter: {_BY_PARAMETER}")
    return given if isinstance(given, ErrorFeedback) else ErrorFeedback()


def _require_algorithm(algorithm: str, codec: str | None, communicator: Communicator) -> None:
    if algorithm == "auto":
        return
    try:
        made = Schedule.generate(algorithm, communicator.size, groups=communicator.hosts)
    except ScheduleError as error:
        raise InvalidArgument(f"algorithm={algorithm!r}: {error}") from error
    if codec is not None and not made.verify().in_tree:
        raise InvalidArgument(
            f"algorithm={algorithm!r} adds a partial sum to several others, which the lossy "
            f"codec={codec!r} cannot: use auto, ring, direct or a tree"
        )
