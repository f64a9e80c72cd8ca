"""ExchangingOptimizer: averages one tensor of each parameter, in codecs with error feedback."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradwire._base.rules import require_matches
from gradwire._errors import Error
from gradwire._feedback import ErrorFeedback
from gradwire.torch._optimizers.replicated import ReplicatedOptimizer
from gradwire.torch._ranks.settings import require_algorithm
from gradwire.torch._step.exchange import Exchange
from gradwire.torch._step.gradient_scale import GradientScale, persistent_state_of
from gradwire.torch._step.hook_state import feedback_for
from gradwire.torch._step.residual_state import ResidualState
from gradwire.torch._step.rules import CodecChoice, Rules


class ExchangingOptimizer(ReplicatedOptimizer):
    """The common part of optimizers whose steps average one tensor of each parameter."""

    feedback: ErrorFeedback | None

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        settings: Mapping[str, object],
        rules: Rules,
        patterns: Sequence[tuple[str, CodecChoice]],
        *,
        feedback: ErrorFeedback | bool | None,
        algorithm: str,
        **others: Any,
    ) -> None:
        """`rules` say in which codec each parameter's tensor travels; `patterns` are theirs."""
        self.feedback = feedback_for(feedback, rules, named=True)
        self._rules, self._patterns, self._algorithm = rules, patterns, algorithm
        keeps = {"feedback": self.feedback is not None}
        super().__init__(params, defaults, {**settings, **keeps}, **others)
        persistent_state_of(self.feedback).state = weakref.ref(self)

    def _check(self) -> None:
        require_matches(self._patterns, self._names.values(), "the parameters")
        persistent_state_of(self.feedback).require_free(self._names)

    def _joined(self) -> None:
        """Makes residuals follow the number of ranks at once, so that a saved state is right."""
        ranks = self.communicator.size
        require_algorithm(self._algorithm, self._rules.lossy, self.communicator)
        self._residuals = ResidualState(self._names, ranks, self._rules, self.feedback)
        self._residuals.open_step(GradientScale(ranks=ranks))
        self._residuals.end_step(False)

    def _residuals_to_save(self) -> dict[str, Any]:
        saved = self._residuals.state_dict()
        del saved["velocities"]
        return saved

    def _load_residuals(self, saved: Mapping[str, Any]) -> None:
        self._residuals.load_state_dict(saved)

    def _average(
        self,
        inputs: Mapping[str, torch.Tensor],
        prepare: Callable[[dict[str, torch.Tensor]], None] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """Averages tensors over the ranks, in place; None if NaN or Inf is in any rank's.

        Residuals are kept only where all averages are finite, and `prepare` has made them ready.
        """
        sent = {name: each.contiguous() for name, each in inputs.items()}
        exchange = Exchange(sent, 1 / self.communicator.size, self._residuals)
        try:
            exchange.start(self.communicator, self._algorithm, self.steps)
            exchange.land(prepare)
        except Error:
            raise
        except BaseException as error:
            self.communicator.abort(f"{type(error).__name__} in {self._kind}.step()")
            exchange.drop()
            raise
        return sent if exchange.finite else None

    def _scale_residual(self, name: str, factors: torch.Tensor) -> None:
        """Multiplies a parameter's residual by a factor for each element."""
        if self.feedback is None:
            return
        kept = self.feedback.residual(name)
        if kept.size:
            self.feedback.add(name, kept * factors.cpu().view(-1).numpy() - kept)
