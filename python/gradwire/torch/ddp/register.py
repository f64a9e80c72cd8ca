"""register: makes a DDP model average its gradients with gradwire."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.ranks import RanksLike, ranks_of
from gradwire.torch._ranks.settings import made_alike, require_settings
from gradwire.torch.ddp.checks import require_features, require_model
from gradwire.torch.ddp.hook import comm_hook
from gradwire.torch.ddp.model_hooks import install
from gradwire.torch.ddp.momentum import momentum_of
from gradwire.torch.ddp.state import State
from gradwire.torch.exchange.automatic import choose, told
from gradwire.torch.exchange.compression import CompressionLike, compression_of
from gradwire.torch.exchange.defaults import Model, tell
from gradwire.torch.exchange.gradient_scale import Scaler
from gradwire.torch.exchange.hook_state import HookState
from gradwire.torch.exchange.rules import compressible
from gradwire.torch.exchange.steps import Stats

_log = logging.getLogger("gradwire")
_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()


def register(
    ddp: DistributedDataParallel,
    compression: CompressionLike = "none",
    *,
    algorithm: str = "auto",
    momentum: float | None = None,
    nesterov: bool = False,
    factor_masking: bool = True,
    clip_norm: float | None = None,
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ranks: RanksLike = None,
) -> State:
    """Makes a DDP model average its gradients with gradwire; every rank calls it, before training.

    `compression` is a codec, or a `Compression`: a codec with its rules, residuals and warm-up.
    "auto" is none, lossless, fp16, int8, int4 or lowrank, by the links, which it measures, the
    model and `optimizer`, and once more by the first steps' time; the log and the state's `why` say
    why. int4 and lowrank are chosen only for an `optimizer` that is not adaptive. On the CPU codecs
    also apply to bfloat16 and float16 gradients: these go through float32, feedback included, and
    the averages are rounded; with none, lossless, fp16 and bf16, and without feedback, they travel
    as they are.
    Gradients of other types travel as they are, and gradwire's log warns of it. `algorithm` is as
    in `Communicator.all_reduce`.

    With `scaler`, a GradScaler, residuals follow the loss scale. With `optimizer` they follow the
    learning rate, so that a residual moves weights as far as it would have when it was kept (Zheng
    et al. 2019, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback",
    Algorithm 1), and where it is SGD with momentum, gradwire's log says how to move that into the
    hook. When the model is wrapped anew, because ranks left or parameters were frozen or thawed,
    close the old state and give its `feedback` to the new Compression; its scale, rates and
    velocities go on with it. (Its `state_dict`, loaded into the new state with `resized=True` if
    ranks left, brings all that and the number of steps.)

    `momentum`, from 0 to below 1, and `nesterov` move momentum from the optimizer into the hook
    (Lin et al. 2018, "Deep Gradient Compression", sec. 3): an optimizer with momentum of its own is
    refused, here or by its first step; Adam's `betas` only cause a warning in the log. With
    `factor_masking` (sec. 3.2) the velocity of elements whose residual is 0 after a step is cleared
    for parameters with a sparse codec. (`threshold`, and `topk` with 16-bit values, leave a
    residual of most elements.) `clip_norm` clips each rank's own
    gradient, of all parameters together, to the L2 norm clip_norm / sqrt(ranks) before residuals
    are added, instead of clipping the average (the same, sec. 3.2); with `scaler` the norm is that
    of unscaled gradients. Nothing travels then before all gradients are there. With `momentum` or
    `clip_norm`, a backward that adds to an average delivered before is refused; accumulate within
    `no_sync`.

    `ranks` are those of `ddp.process_group`, over which a communicator is made; give another
    communicator of the same ranks, or `Ranks(timeout=...)`. Raises RendezvousError, and
    InvalidArgument for an unknown codec or algorithm, for other ranks or another order of them,
    and, on all ranks, when their settings differ or one of them cannot go on.

    Within `ddp.join()` averages are over all ranks or, with `divide_by_initial_world_size=False`,
    over those that still train. Buffers (of batch normalisation) travel over gradwire too. Forward,
    backward and the end of a `ddp.join()` block raise gradwire's errors, which name the rank that
    failed; within such a block, backward may raise torch's. Backward raises when DDP bypassed the
    hook, and an optimizer's step when no forward of `ddp` came before its gradients.
    """
    require_model(ddp)
    velocity: dict[str, Any] = {
        "momentum": momentum,
        "nesterov": nesterov,
        "factor_masking": factor_masking,
    }
    momentum_of(**velocity)  # raises
    require_settings(scaler, optimizer)
    given, ranks = compression_of(compression, auto=True), ranks_of(ranks)
    require_features(ddp.module, given.feedback)
    model = Model(ddp.module, dict(_averaged(ddp)))
    communicator, owns = ranks.connect(ddp.process_group, alone=True)
    chosen, later = choose(model, communicator, given, optimizer)
    make = partial(
        State,
        communicator,
        chosen.compression,
        algorithm=algorithm,
        parameters=model.parameters.items(),
        **velocity,
        clip_norm=clip_norm,
        scaler=scaler,
        optimizer=optimizer,
        find_unused=ddp.find_unused_parameters and not ddp.static_graph,
        ddp=ddp,
        owns_communicator=owns,
        later=later,
    )
    state = made_alike(
        make,
        communicator,
        owns_communicator=owns,
        **velocity,
        clip_norm=clip_norm,
        scaler=scaler is not None,
        optimizer=optimizer is not None,
        codec=told(given, chosen, later),
        **given.alike,
    )
    _release_from_old(ddp)
    ddp.register_comm_hook(state, comm_hook)
    install(ddp, state, model.parameters)
    _states[ddp] = state
    state.why = chosen.why
    if communicator.rank == 0:
        tell(chosen, None if momentum else optimizer)
        if state._rules.compresses:
            _warn_of_other_types(ddp)
    return state


def stats(model: DistributedDataParallel | HookState) -> Stats:
    """Counters of the hook on this rank; ``print(stats(model))`` prints a table of them.

    Takes the DDP model, compiled or not, or what `register` and `register_fsdp` return. Bytes are
    per rank, times in seconds (in the table in MB and ms). Raises InvalidArgument for a model
    without gradwire's hook.
    """
    return state_of(model).stats()


def state_of(model: Any) -> HookState:
    """The hook of a model, or the hook itself; raises InvalidArgument where there is none."""
    if isinstance(model, HookState):
        return model
    model = getattr(model, "_orig_mod", model)  # of torch.compile()
    if not isinstance(model, DistributedDataParallel):
        raise arguments.wrong(
            model, "model", "a DDP model with gradwire's hook, or what register() returned"
        )
    if model not in _states:
        raise InvalidArgument("the model has no hook of gradwire's: call register() first")
    return _states[model]


def _averaged(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters by name, but for those that DDP was told to leave alone."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [each for each in ddp.module.named_parameters() if each[0] not in ignored]


def _warn_of_other_types(ddp: DistributedDataParallel) -> None:
    trained = [each for _, each in _averaged(ddp) if each.requires_grad]
    others = sorted({str(each.dtype.to_real()) for each in trained if not compressible(each)})
    if others:
        _log.warning(
            "gradients of %s travel as they are: codecs are for float32, and on the CPU bfloat16 "
            "and float16",
            ", ".join(others),
        )


def _release_from_old(ddp: DistributedDataParallel) -> None:
    """Removes hooks of an old model, whose reducer would take this model's gradients."""
    own = set(ddp.module.parameters())
    for other, state in list(_states.items()):
        remove = getattr(other, "_remove_autograd_hooks", None)  # torch has no public one
        over = state.closed or state.error is not None
        if over and remove and not own.isdisjoint(other.module.parameters()):
            remove()
