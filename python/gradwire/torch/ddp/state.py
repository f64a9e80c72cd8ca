"""State: everything that the DDP hook keeps between buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._base.rules import require_matches
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.settings import require_algorithm
from gradwire.torch.ddp.clipping import Clipping
from gradwire.torch.ddp.hook import Steps
from gradwire.torch.ddp.momentum import momentum_of
from gradwire.torch.ddp.training_state import TrainingState
from gradwire.torch.ddp.unused import UnusedParameters
from gradwire.torch.exchange.automatic import Later
from gradwire.torch.exchange.compression import START, CompressionLike, compression_of
from gradwire.torch.exchange.gradient_scale import Scaler, persistent_state_of
from gradwire.torch.exchange.hook_state import BY_PARAMETER, HookState
from gradwire.torch.exchange.optimizer_watch import OptimizerWatch, require_no_momentum


class State(HookState):
    """The hook's state for one DDP model. Made by `register`.

    `error` is the first error, and final: its backward raises it, and so do all later backwards
    and, when `register` made the state, every forward with gradients. Gradients are undefined then;
    build a new DDP model to go on.
    """

    _steps: Steps

    def __init__(
        self,
        communicator: Communicator,
        compression: CompressionLike = "none",
        *,
        algorithm: str = "auto",
        parameters: Iterable[tuple[str, torch.Tensor]] = (),
        momentum: float | None = None,
        nesterov: bool = False,
        factor_masking: bool = True,
        clip_norm: float | None = None,
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        find_unused: bool = False,
        ddp: DistributedDataParallel | None = None,
        owns_communicator: bool = False,
        later: Later | None = None,
    ) -> None:
        """Takes the options of `register`; `parameters` are the model's (name, parameter) pairs.

        Codec and rules count as they are given, as with ``warm_up=0``.

        `find_unused` says that DDP looks for parameters without a gradient, `owns_communicator`
        that `close` closes the communicator too; `ddp` is the model. `later` chooses the codec
        again after the first steps. Raises InvalidArgument.
        """
        self._names = {parameter: name for name, parameter in parameters}
        given = compression_of(compression)
        self._rules = given.table
        lossy = self._rules.lossy or (None if later is None else START)
        require_algorithm(algorithm, lossy, communicator)
        self.communicator, self.codec, self.algorithm = communicator, given.codec, algorithm
        kept = given.residuals(self._rules)
        if kept is not None:
            persistent_state_of(kept).require_free(self._names)
        if self._names:
            require_matches(given.rules, self._names.values())
        elif kept is not None or momentum is not None or given.rules:
            raise InvalidArgument(f"feedback, momentum and rules are by parameter: {BY_PARAMETER}")
        has_momentum = bool(momentum)
        if has_momentum and optimizer is not None:
            require_no_momentum(optimizer, self._names)
        keeps = kept is not None or momentum is not None or later is not None
        unused = UnusedParameters(self._names) if find_unused and keeps else None
        clipping = None if clip_norm is None else Clipping(clip_norm, communicator.size)
        self._training = TrainingState(
            self._names,
            self._rules,
            kept,
            momentum_of(momentum, nesterov, factor_masking),
            scaler,
            optimizer,
            unused,
            clipping,
            communicator.size,
        )
        self._steps = Steps(communicator, algorithm, self._training, ddp)
        self._guarded: Callable[[], None] | None = None  # raises if a backward bypassed the hook
        self._has_forward = False  # since `register`, with gradients
        self._watch = OptimizerWatch(self, momentum=has_momentum)
        if optimizer is not None:
            self._watch.look_at(optimizer, self)
        self._begin(owns_communicator, later)

    def __repr__(self) -> str:
        failed = f", error={self.error!r}" if self.error else ""
        why = f"; {self.why}" if self.why else ""
        return (
            f"State(rank {self.communicator.rank} of {self.communicator.size}, "
            f"codec={self.codec!r}, algorithm={self.algorithm!r}, steps={self.steps}, "
            f"bytes={self.bytes}{failed}{why})"
        )

    def _is_reached(self) -> bool:
        return self._has_forward or self._steps.submitted_steps > 0

    def _require_pausable(self) -> None:
        if self._steps.in_join:
            raise InvalidArgument(
                "paused() is not possible within ddp.join(): ranks that have joined cannot pause "
                "with the others; run these backwards within no_sync()"
            )

    def _require_averaged(self) -> None:
        if self._guarded is not None and self.error is None:
            self._guarded()
