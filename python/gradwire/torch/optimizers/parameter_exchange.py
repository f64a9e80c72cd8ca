"""ParameterExchange: averages one tensor of each parameter, in codecs with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire._communicator import Communicator
from gradwire._errors import Error
from gradwire._feedback import ErrorFeedback
from gradwire.torch._ranks.settings import require_algorithm
from gradwire.torch.exchange.engine import Averages, are_finite, averaging_exchange
from gradwire.torch.exchange.rules import Rules

_HAS_GRADIENT, _IS_WRONG = 1, 2  # what a rank tells of a parameter; the highest number counts


class ParameterExchange:
    """What an optimizer sends: one tensor of each parameter in a step, and their residuals."""

    def __init__(
        self,
        communicator: Communicator,
        names: Mapping[torch.Tensor, str],
        rules: Rules,
        feedback: ErrorFeedback | None,
        *,
        algorithm: str,
        call: str,
    ) -> None:
        """`call` is named where it fails; raises InvalidArgument for an algorithm that can't be."""
        require_algorithm(algorithm, rules.lossy, communicator)
        self._communicator, self._feedback, self._call = communicator, feedback, call
        self._exchange = averaging_exchange(communicator, names, rules, feedback, algorithm)

    def average(
        self,
        inputs: Mapping[str, torch.Tensor],
        waiting: Mapping[str, torch.Tensor],
        step: int,
        without_gradient: Container[str],
        prepare: Callable[[dict[str, torch.Tensor]], None] | None,
    ) -> dict[str, torch.Tensor] | None:
        """As `ExchangingOptimizer._average`; `without_gradient` are those of this rank."""
        sent = {name: each.contiguous() for name, each in inputs.items()}
        idle = {name: self._residual(name) for name in sent if name in without_gradient}
        told = _told_of({**sent, **waiting}, waiting, without_gradient)
        averages = Averages(sent, 1 / self._communicator.size, self._exchange)
        try:
            averages.start(step)
            self._communicator.all_reduce(told, op="max")
            if (told == _IS_WRONG).any():
                averages.undo()
                return None
            averages.wait(prepare)
        except Error:
            averages.undo()
            raise
        except BaseException as error:
            self._communicator.abort(f"{type(error).__name__} in {self._call}")
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

    def scale_residual(self, name: str, factors: torch.Tensor) -> None:
        """Multiplies a parameter's residual by a factor for each element."""
        if self._feedback is not None and self._residual(name).size:
            self._feedback.multiply(name, factors.cpu().view(-1).numpy())

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals."""
        saved = self._exchange.residuals.state_dict()
        del saved["velocities"]
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces residuals; raises InvalidArgument, and changes nothing, for another model's."""
        self._exchange.residuals.load_state_dict(saved)

    def _residual(self, name: str) -> NDArray[np.float32]:
        """A copy of a parameter's residual; of no elements where there is none."""
        return np.zeros(0, np.float32) if self._feedback is None else self._feedback.residual(name)

    def _reset_residual(self, name: str, before: NDArray[np.float32]) -> None:
        """Makes a parameter's residual what it was; no elements stand for zeros."""
        now = self._residual(name)
        if self._feedback is not None and now.size:
            self._feedback.set(name, before if before.size else np.zeros_like(now))


def _told_of(
    names: Iterable[str], waiting: Mapping[str, torch.Tensor], without_gradient: Container[str]
) -> NDArray[np.uint8]:
    """Collects what this rank tells of parameters: what is sent tells itself if it is wrong."""
    told = [
        _IS_WRONG
        if name in waiting and not are_finite([waiting[name]])
        else _HAS_GRADIENT * (name not in without_gradient)
        for name in names
    ]
    return np.array(told, np.uint8)
