"""OptimizerWatch: tells of optimizers that a hook's codec or momentum does not suit.

It sees each step of every optimizer, since `register` need not be given the one that steps the
model, and since schedulers (OneCycleLR) and checkpoints set momentum later than `register`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire._calls.requests import CodecLike
from gradwire._communicator import Communicator
from gradwire._errors import Error, InvalidArgument
from gradwire.torch.exchange.rules import Rules

# Of torch.optim's, those without `betas` that divide by what gradients were, or take their sign.
_OTHERS = ("Adadelta", "Adafactor", "Adagrad", "Muon", "RMSprop", "Rprop")

_log = logging.getLogger("gradwire")


class _HookState(Protocol):
    """The parts of a hook's state that are needed here."""

    communicator: Communicator
    _rules: Rules

    @property
    def closed(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    def _stepped(self) -> Mapping[torch.Tensor, str]: ...

    def _is_reached(self) -> bool: ...


class OptimizerWatch:
    """Checks each step of any optimizer of a model's parameters, until the hook's state is closed.

    Raises Error where an optimizer steps gradients before any came to the hook, and InvalidArgument
    for momentum in both the optimizer and the hook. Warns once, on rank 0, of adaptive optimizers
    after a biased codec, and of their `betas` beside the hook's momentum. Does not keep the state
    alive, nor the parameters, which would.
    """

    def __init__(self, state: _HookState, *, momentum: bool = False) -> None:
        """`momentum` says that the hook has it."""
        self._state, self._momentum = weakref.ref(state), momentum
        first = state.communicator.rank == 0
        self._told_of_betas = not (momentum and first)
        self._told_of_codec = not (state._rules.needs_feedback and first)
        self._handle = register_optimizer_step_pre_hook(self)
        weakref.finalize(state, self._handle.remove)

    def note_forward(self) -> None:
        """Notes that the hook will get gradients; ends the watch if that was all to look for."""
        if self._told_of_betas and self._told_of_codec and not self._momentum:
            self._handle.remove()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Checks an optimizer; torch calls it before each step of any."""
        state = self._state()
        if state is None or state.closed:
            return
        if not state._is_reached():
            _require_no_gradients(optimizer, state._stepped())
        self.look_at(optimizer, state)

    def look_at(self, optimizer: torch.optim.Optimizer, state: _HookState) -> None:
        """Checks the settings of an optimizer that steps, or will step, the state's parameters."""
        if self._momentum:
            require_no_momentum(optimizer, state._stepped())
        if not self._told_of_betas:
            self._told_of_betas = warn_of_betas(optimizer, state._stepped())
        if not self._told_of_codec:
            self._told_of_codec = self._warn_of_codec(optimizer, state)

    def _warn_of_codec(self, optimizer: torch.optim.Optimizer, state: _HookState) -> bool:
        if not is_adaptive(optimizer) or not _steps_any(optimizer, state._stepped()):
            return False
        codec = state._rules.biased(max(state.steps - 1, 0))
        if codec is None:
            return False
        _log.warning("%s", advice(optimizer, codec))
        return True


def is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are not linear in gradients: they are divided by the size of earlier ones."""
    others = tuple(getattr(torch.optim, name) for name in _OTHERS if hasattr(torch.optim, name))
    its = getattr(optimizer, "optimizer", optimizer)  # of a trainer's that is wrapped around it
    return isinstance(its, others) or any("betas" in each for each in optimizer.param_groups)


def advice(optimizer: torch.optim.Optimizer, codec: CodecLike) -> str:
    """Tells what to use in place of an adaptive optimizer after a biased codec."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("gradwire."):
        return (
            f"{name} averages by itself, and the hook has averaged before it: leave out register(),"
            " or run backwards within no_sync()"
        )
    adam = "Adam" in name  # not for Lion, Muon and others, which step otherwise
    instead = "gradwire.torch.OneBitAdam, which compresses after that, or " if adam else ""
    return (
        f"{name} after the codec {codec} ends at a higher loss than without a codec: its steps are "
        "not linear in the gradient, so error feedback does not make up for what the codec loses. "
        f"Use {instead}codec='int8'"
    )


def warn_of_own_momentum(optimizer: torch.optim.Optimizer, codec: object) -> None:
    """Says how to move the momentum of an SGD into the hook, where the codec trains better so."""
    its = getattr(optimizer, "optimizer", optimizer)  # of a trainer's that is wrapped around it
    if not isinstance(its, torch.optim.SGD) or str(codec).startswith("lowrank"):
        return
    for group in optimizer.param_groups:
        own, nesterov = group["momentum"], group["nesterov"]
        if own and not group["dampening"]:
            more = ", nesterov=True" if nesterov else ""
            _log.warning(
                "SGD has momentum=%s of its own, and %s can train better with it in the hook, "
                "before the codec: build SGD with momentum=0, and give "
                "register(momentum=%s%s)",
                *(own, codec, own, more),
            )
            return


def _require_no_gradients(
    optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]
) -> None:
    """Raises Error where a step would use gradients that no hook can have averaged."""
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None and each in parameters:
                raise Error(
                    f"{type(optimizer).__name__} steps {parameters[each]!r}, and no gradient of "
                    "the model came to gradwire's hook: call the DistributedDataParallel model, "
                    "and not the module inside, whose gradients stay on their rank; where a "
                    "trainer wraps the model, call register() for what it has made (Lightning "
                    "ignores ddp_comm_hook= on CPUs, and accelerate a comm_hook= of yours)"
                )


def _steps_any(optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]) -> bool:
    return any(_has_any(group, parameters) for group in optimizer.param_groups)


def require_no_momentum(
    optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]
) -> None:
    """Raises InvalidArgument for an optimizer with momentum of its own for one of these."""
    for group in optimizer.param_groups:
        own = group.get("momentum") or 0
        if own > 0 and _has_any(group, parameters):
            raise InvalidArgument(
                f"{type(optimizer).__name__} has momentum={own} and gradwire's hook momentum= too, "
                "which would count it twice: build the optimizer with momentum=0, or leave "
                "momentum= out of register(); OneCycleLR needs cycle_momentum=False"
            )


def warn_of_betas(optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, str]) -> bool:
    """Logs when an optimizer like Adam smooths gradients again; returns whether it does."""
    for group in optimizer.param_groups:
        betas = group.get("betas")
        if betas and betas[0] and _has_any(group, parameters):
            _log.warning(
                "%s has momentum of its own (betas=%s) and gradwire's hook momentum= too, so "
                "gradients are smoothed twice: leave momentum= out of register(), or set the first "
                "beta to 0",
                type(optimizer).__name__,
                tuple(betas),
            )
            return True
    return False


def _has_any(group: Mapping[str, Any], parameters: Mapping[torch.Tensor, str]) -> bool:
    """Whether a parameter group of an optimizer has any of these."""
    return any(each in parameters for each in group["params"])
