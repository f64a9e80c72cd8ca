"""ExchangingOptimizer: averages one tensor of each parameter, in codecs with error feedback."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire._base.rules import require_matches
from gradwire._errors import Error
from gradwire._feedback import ErrorFeedback
from gradwire.torch._ranks.settings import require_algorithm
from gradwire.torch.exchange.compression import Compression
from gradwire.torch.exchange.engine import Averages, are_finite, averaging_exchange
from gradwire.torch.exchange.gradient_scale import persistent_state_of
from gradwire.torch.exchange.rules import Rules
from gradwire.torch.optimizers.replicated import ReplicatedOptimizer

_HAS_GRADIENT, _IS_WRONG = 1, 2  # what a rank tells of a parameter; the highest number counts


class ExchangingOptimizer(ReplicatedOptimizer):
    """The common part of optimizers that average one tensor of each parameter."""

    feedback: ErrorFeedback | None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        settings: Mapping[str, object],
        compression: Compression,
        table: Rules,
        *,
        algorithm: str,
        **others: Any,
    ) -> None:
        """`table` says in which codec each parameter's tensor travels; `compression` made it."""
        self.feedback = compression.residuals(table)
        self._rules, self._patterns, self._algorithm = table, compression.rules, algorithm
        keeps = {"feedback": self.feedback is not None}
        super().__init__(params, defaults, {**compression.alike, **settings, **keeps}, **others)
        persistent_state_of(self.feedback).state = weakref.ref(self)

    def _check(self) -> None:
        require_matches(self._patterns, self._names.values(), "the parameters")
        persistent_state_of(self.feedback).require_free(self._names)

    def _joined(self) -> None:
        """Exchanges with these ranks from now on; residuals keep their weight."""
        require_algorithm(self._algorithm, self._rules.lossy, self.communicator)
        self._exchange = averaging_exchange(
            self.communicator, self._names, self._rules, self.feedback, self._algorithm
        )

    def _residuals_to_save(self) -> dict[str, Any]:
        saved = self._exchange.residuals.state_dict()
        del saved["velocities"]
        return saved

    def _load_residuals(self, saved: Mapping[str, Any]) -> None:
        self._exchange.residuals.load_state_dict(saved)

    def _average(
        self,
        inputs: Mapping[str, torch.Tensor],
        prepare: Callable[[dict[str, torch.Tensor]], None] | None = None,
        waiting: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """Averages tensors over the ranks, in place; None if NaN or Inf is in any rank's.

        Those of `waiting` are not sent, and returned as they are. Residuals are kept only where
        all values are finite, and `prepare` has made the averages ready. Parameters that have no
        gradient on any rank are left out, and their residuals stay.
        """
        waiting = waiting or {}
        sent = {name: each.contiguous() for name, each in inputs.items()}
        idle = {name: self._residual(name) for name in sent if name in self._without_gradient}
        told = self._told_of({**sent, **waiting}, waiting)
        averages = Averages(sent, 1 / self.communicator.size, self._exchange)
        try:
            averages.start(self.steps)
            self.communicator.all_reduce(told, op="max")
            if (told == _IS_WRONG).any():
                averages.undo()
                return None
            averages.wait(prepare)
        except Error:
            averages.undo()
            raise
        except BaseException as error:
            self.communicator.abort(f"{type(error).__name__} in {self._kind}.step()")
            averages.undo()
            raise
        if not averages.finite:
            return None
        found = {**sent, **waiting}
        for name in [each for each, has in zip(found, told, strict=True) if not has]:
            if name in sent:
                self._reset_residual(name, idle[name])
            del found[name]
        return found

    def _told_of(
        self, names: Iterable[str], waiting: Mapping[str, torch.Tensor]
    ) -> NDArray[np.uint8]:
        """Collects what this rank tells of parameters: what is sent tells itself if it is wrong."""
        told = [
            _IS_WRONG
            if name in waiting and not are_finite([waiting[name]])
            else _HAS_GRADIENT * (name not in self._without_gradient)
            for name in names
        ]
        return np.array(told, np.uint8)

    def _residual(self, name: str) -> NDArray[np.float32]:
        """A copy of a parameter's residual; of no elements where there is none."""
        return np.zeros(0, np.float32) if self.feedback is None else self.feedback.residual(name)

    def _reset_residual(self, name: str, before: NDArray[np.float32]) -> None:
        """Makes a parameter's residual what it was; no elements stand for zeros."""
        now = self._residual(name)
        if self.feedback is not None and now.size:
            self.feedback.add(name, -now)  # in two sums, which are exact
            self.feedback.add(name, before if before.size else np.zeros_like(now))

    def _scale_residual(self, name: str, factors: torch.Tensor) -> None:
        """Multiplies a parameter's residual by a factor for each element."""
        kept = self._residual(name)
        if self.feedback is not None and kept.size:
            self.feedback.add(name, kept * factors.cpu().view(-1).numpy() - kept)
