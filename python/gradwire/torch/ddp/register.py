"""register: makes a DDP model average its gradients with gradwire."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire._base import arguments
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch._ranks.settings import made_alike, require_settings
from gradwire.torch.ddp.automatic import AUTO, choose
from gradwire.torch.ddp.checks import require_features, require_model, require_momentum
from gradwire.torch.ddp.guard import Guard
from gradwire.torch.ddp.hook import comm_hook
from gradwire.torch.ddp.join_tracker import JoinTracker
from gradwire.torch.ddp.momentum import Momentum
from gradwire.torch.ddp.overrides import (
    broadcast_buffers_by,
    copy_without_hook,
    explain_in_forward,
    join_by,
)
from gradwire.torch.ddp.state import State
from gradwire.torch.exchange.buckets import compressible
from gradwire.torch.exchange.defaults import Model, settings, tell
from gradwire.torch.exchange.gradient_scale import Scaler
from gradwire.torch.exchange.hook_state import HookState
from gradwire.torch.exchange.rules import CodecChoice, Rules
from gradwire.torch.exchange.stats import Stats

_log = logging.getLogger("gradwire")
_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()


def register(
    ddp: DistributedDataParallel,
    codec: CodecChoice = "none",
    algorithm: str = "auto",
    communicator: Communicator | None = None,
    *,
    feedback: ErrorFeedback | bool | None = None,
    rules: Sequence[tuple[str, CodecChoice]] = (),
    min_elements: int = 1024,
    momentum: Momentum | None = None,
    clip_norm: float | None = None,
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    warm_up: int | None = None,
    timeout: float | None = None,
) -> State:
    """Makes a DDP model average its gradients with gradwire; every rank calls it, before training.

    `codec` is as in `Communicator.all_reduce`, or a function of the step (`Stages`, `warm_up`), or
    "auto": none, fp16, int8 or lowrank, by the cost model's rate of the links and times of
    exchanges, by the model and by `optimizer`; the log and the state's `why` say why. lowrank is
    chosen only for an `optimizer` that is not adaptive. A codec applies to float32 gradients, and
    to those of complex64 parameters as pairs of float32. On the CPU it also applies to bfloat16 and
    float16 gradients: these go through float32, feedback included, and the averages are rounded;
    with none, fp16 and bf16, and without feedback, they travel as they are. Gradients of other
    types travel as they are, and gradwire's log warns of it.

    A biased codec of gradwire's (onebit, threshold, topk, lowrank) that does not change with the
    step comes with what it needs to train. The first `warm_up` steps go in int8: 500 by default,
    about as many as the trainings in docs/compression.md had; a fifth of all steps is a good number
    where that is known. The first and the last layer, embeddings, and parameters that are small or
    no matrices stay in int8, unless `rules` are given. Give `optimizer` too: where it is SGD with
    momentum, gradwire's log says how to move that into the hook. ``warm_up=0`` leaves everything as
    it is given.

    `rules` are pairs of a pattern and a codec: a parameter whose name matches (as in fnmatch:
    ``"*.bias"``) travels with the codec of the first such rule. Parameters of fewer than
    `min_elements` elements travel uncompressed where the codec is biased.

    `feedback` keeps what a codec loses, by parameter, and sends it later. None keeps it if a codec
    needs it or changes with the step; True always; False never; ErrorFeedback("bfloat16") in half
    the memory. When the model is wrapped anew, because ranks left or parameters were frozen or
    thawed, close the old state and give its `feedback`, with which its scale, rates and velocities
    go on. (Its `state_dict`, loaded into the new state with `resized=True` if ranks left, brings
    all that and the number of steps.) With `scaler`, a GradScaler, residuals follow the loss scale.
    With `optimizer` they follow the learning rate, so that a residual moves weights as far as it
    would have when it was kept (Zheng et al. 2019, "Communication-Efficient Distributed Blockwise
    Momentum SGD with Error-Feedback", Algorithm 1).

    `momentum` moves momentum from the optimizer into the hook (Lin et al. 2018, "Deep Gradient
    Compression", sec. 3): an optimizer with momentum of its own is refused, here or by its first
    step; Adam's `betas` only cause a warning in the log. `clip_norm` clips each rank's own
    gradient, of all parameters together, to the L2 norm clip_norm / sqrt(ranks) before residuals
    are added, instead of clipping the average (the same, sec. 3.2); with `scaler` the norm is that
    of unscaled gradients. Nothing travels then before all gradients are there. With `momentum` or
    `clip_norm`, a backward that adds to an average delivered before is refused; accumulate within
    `no_sync`.

    Without a communicator, one with `timeout` (seconds; the group's if None) is made over the ranks
    of `ddp.process_group`, which must be able to exchange CPU tensors, as gloo's can. Raises
    RendezvousError, and InvalidArgument for an unknown codec or algorithm, for a communicator of
    another size or another order of ranks, and, on all ranks, when their settings differ or one of
    them cannot go on.

    Within `ddp.join()` averages are over all ranks or, with `divide_by_initial_world_size=False`,
    over those that still train. Buffers (of batch normalisation) travel over gradwire too. Forward,
    backward and the end of a `ddp.join()` block raise gradwire's errors, which name the rank that
    failed; within such a block, backward may raise torch's. Backward raises when DDP bypassed the
    hook, and an optimizer's step when no forward of `ddp` came before its gradients.
    """
    require_model(ddp)
    require_momentum(momentum)
    require_settings(scaler, optimizer, feedback, rules)
    require_features(ddp.module, feedback)
    if timeout is not None:
        arguments.seconds(timeout)
    if communicator is not None:
        arguments.instance(communicator, "communicator", Communicator, "a gradwire.Communicator")
    model = Model(ddp.module, dict(_averaged(ddp)))
    known: CodecChoice = "none" if codec == AUTO else codec
    Rules(known, rules, min_elements)  # refuses what is wrong on this rank before the ranks meet
    chosen = settings(model, known, rules, warm_up, min_elements)
    owns = communicator is None
    if communicator is None:
        communicator = communicator_of(ddp.process_group, timeout)
    _require_same_ranks(communicator, ddp.process_group)
    joins = JoinTracker(ddp)
    if codec == AUTO:
        chosen = choose(model, communicator, rules, warm_up, min_elements, optimizer)
    make = partial(
        State,
        communicator,
        chosen.codec,
        algorithm,
        parameters=model.parameters.items(),
        feedback=feedback,
        rules=chosen.rules,
        min_elements=min_elements,
        momentum=momentum,
        clip_norm=clip_norm,
        scaler=scaler,
        optimizer=optimizer,
        find_unused=ddp.find_unused_parameters and not ddp.static_graph,
        joins=joins,
        owns_communicator=owns,
    )
    state = made_alike(
        make,
        communicator,
        owns_communicator=owns,
        momentum=momentum,
        clip_norm=clip_norm,
        min_elements=min_elements,
        warm_up=warm_up,
        scaler=scaler is not None,
        optimizer=optimizer is not None,
        codec=f"auto, which chose {chosen.codec}" if codec == AUTO else "another than auto",
    )
    _release_from_old(ddp)
    ddp.register_comm_hook(state, comm_hook)
    hooks = _install_forward_hooks(ddp, state, joins)
    broadcast_buffers_by(ddp, state)
    explain_in_forward(ddp, state)
    join_by(ddp, state)
    copy_without_hook(ddp, hooks)
    _states[ddp] = state
    state.why = chosen.why
    if communicator.rank == 0:
        tell(chosen, None if momentum else optimizer)
        if state._rules.compresses:
            _warn_of_other_types(ddp)
    return state


def stats(model: DistributedDataParallel | HookState) -> Stats:
    """Prints a table of the hook's counters on this rank, and returns them.

    Takes the DDP model, compiled or not, or what `register` and `register_fsdp` return. Bytes are
    per rank, times in seconds (in the table in MB and ms). Raises InvalidArgument for a model
    without gradwire's hook.
    """
    found = _state_of(model).stats()
    print(found)
    return found


def _state_of(model: Any) -> HookState:
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


def _install_forward_hooks(
    ddp: DistributedDataParallel, state: State, joins: JoinTracker
) -> Sequence[RemovableHandle]:
    """Makes every forward with gradients raise the state's error and guard its backward.

    In eval() too: trainers call train() on the module inside, and leave the wrapper as it was.
    """
    guard = Guard(dict(_averaged(ddp)), partial(getattr, state._steps, "submitted_steps"))
    state._guard = guard
    guard.on_backward = state._steps.spans.begin_backward
    return (
        ddp.register_forward_pre_hook(partial(_before_forward, state, guard)),
        ddp.register_forward_hook(partial(_after_forward, state, guard, joins)),
    )


def _before_forward(state: State, guard: Guard, _: DistributedDataParallel, __: Any) -> None:
    guard.remove_leaf_hooks()
    if torch.is_grad_enabled():
        if not state._has_forward:
            state._has_forward = True
            state._watch.note_forward()
        state._steps.raise_error()
        state._steps.spans.begin_forward()


def _after_forward(
    state: State,
    guard: Guard,
    joins: JoinTracker,
    ddp: DistributedDataParallel,
    _: Any,
    output: Any,
) -> None:
    state._steps.spans.end_forward()
    if torch.is_grad_enabled() and ddp.require_backward_grad_sync and not state.closed:
        guard.require_averaged()  # after DDP's own forward, whose error is more precise
        joins.note_forward()
        guard.after_forward(output)


def _require_same_ranks(communicator: Communicator, group: dist.ProcessGroup) -> None:
    have, want = (communicator.rank, communicator.size), (group.rank(), group.size())
    if have != want:
        raise InvalidArgument(
            f"the communicator says rank {have[0]} of {have[1]}, the model's process group says "
            f"rank {want[0]} of {want[1]}: they must consist of the same ranks in the same order"
        )
