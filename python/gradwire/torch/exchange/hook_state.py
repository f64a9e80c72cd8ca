"""HookState: what a program has of a hook."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from gradwire._calls.requests import CodecLike
from gradwire._communicator import Communicator
from gradwire._feedback import ErrorFeedback
from gradwire._launch import at_exit
from gradwire.torch.exchange import saved as saving
from gradwire.torch.exchange.automatic import Later
from gradwire.torch.exchange.defaults import Settings, tell
from gradwire.torch.exchange.first_steps import FirstSteps
from gradwire.torch.exchange.gradient_scale import persistent_state_of
from gradwire.torch.exchange.residual_state import ResidualState
from gradwire.torch.exchange.rules import CodecChoice, Rules, compressible, gradient_elements
from gradwire.torch.exchange.steps import HookSteps, Stats, by_codec

_log = logging.getLogger("gradwire")


class HookState:
    """The state of a hook for one model."""

    communicator: Communicator
    codec: CodecChoice
    why: str = ""
    """Why the codec was chosen, where `register` did that; otherwise empty."""
    _names: dict[torch.Tensor, str]
    _rules: Rules
    _training: ResidualState
    _steps: HookSteps
    _close: Any

    def _begin(self, owns_communicator: bool, later: Later | None) -> None:
        """Takes the residuals for this state's own; steps are closed with the state, or at exit.

        `later` chooses the codec again after the first steps.
        """
        if later is not None:
            self._steps.first_steps = FirstSteps(later, self)
        self._note_use()
        self._close = weakref.finalize(self, self._steps.close, owns_communicator)
        # gradwire closes it at exit: weakref's own order depends on what was imported first.
        self._close.atexit = False
        at_exit.close_first(self._steps)

    def _note_use(self) -> None:
        """Takes the residuals for this state's own, if there are any."""
        if self.feedback is not None:
            persistent_state_of(self.feedback).state = weakref.ref(self)

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

    def should_stop(self) -> bool:
        """Whether a rank was asked to stop; the same on all ranks after the same step.

        See `Communicator.should_stop`. The frames of gradients carry it, without messages of its
        own: a request counts in the step during which it came, or in the next one. Save then,
        with `state_dict`, and leave with exit code 75 (``os.EX_TEMPFAIL``): start me again.
        """
        return self.communicator.should_stop()

    def stats(self) -> Stats:
        """Bytes, ratio and times of the last step and of all; residual norms now."""
        counters = self._steps.counters
        return Stats(counters.last, counters.total, by_codec(self._parameters()), self.why)

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
        found = {**saving.stamp(self.communicator, self.steps), **self._training.state_dict()}
        first = self._steps.first_steps
        return found if first is None else {**found, "chosen": (first.codec, first.over)}

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
        if "ranks" in saved or not resized:
            saved = saving.for_rank(saved, communicator.rank, communicator.size)
        self._steps.abandon_step()
        if not resized:
            self._go_on(saved)
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
        self._require_pausable()
        before, self._training.paused = self._training.paused, True
        try:
            yield
        finally:
            self._training.paused = before

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        """Takes up what "auto" had chosen for a saved training, before its residuals."""
        if (first := self._steps.first_steps) is None:
            return
        if "chosen" in saved:
            first.go_on(*saved["chosen"])
        if saved["feedback"]:
            self._training.change_rules(self._rules, ErrorFeedback())

    def _change(self, chosen: Settings) -> None:
        """Takes other settings between two steps; the next ones deliver what residuals hold."""
        given = chosen.compression
        self._rules, self.codec, self.why = given.table, given.codec, chosen.why
        self._training.change_rules(self._rules, given.residuals(self._rules))
        self._note_use()
        if self.communicator.rank == 0:
            tell(chosen, None)

    def _require_pausable(self) -> None:
        """Raises InvalidArgument where the hook cannot be paused."""

    def _require_averaged(self) -> None:
        """Raises Error if the last backward bypassed the hook."""

    def _stepped(self) -> Mapping[torch.Tensor, str]:
        """The parameters that optimizers step, with their names."""
        return self._names

    def _is_reached(self) -> bool:
        """Whether forwards or gradients have come to the hook."""
        return True

    def _parameters(self) -> Iterable[tuple[CodecLike, int, float]]:
        """The codec of each parameter in the last step, its elements and its residual's norm."""
        for parameter, name in self._names.items():
            kept = self.feedback.residual(name) if self.feedback is not None else ()
            norm = float(torch.as_tensor(kept, dtype=torch.float64, device="cpu").norm())
            yield self._codec_of(name, parameter), gradient_elements(parameter), norm

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


BY_PARAMETER = "use gradwire.torch.register(), or give parameters=ddp.module.named_parameters()"
