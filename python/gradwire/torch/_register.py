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

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch._buffers import broadcast_buffers_by
from gradwire.torch._gpu import require_features
from gradwire.torch._group import communicator_of
from gradwire.torch._guard import Guard
from gradwire.torch._hook import comm_hook
from gradwire.torch._joined import Active, join_by
from gradwire.torch._momentum import Momentum
from gradwire.torch._rules import Rules, Wanted
from gradwire.torch._scales import Scaler
from gradwire.torch._state import State
from gradwire.torch._stats import Stats

_log = logging.getLogger("gradwire")
_states: weakref.WeakKeyDictionary[DistributedDataParallel, State] = weakref.WeakKeyDictionary()


def register(
    ddp: DistributedDataParallel,
    codec: Wanted = "none",
    algorithm: str = "auto",
    communicator: Communicator | None = None,
    *,
    feedback: ErrorFeedback | bool | None = None,
    rules: Sequence[tuple[str, Wanted]] = (),
    min_elements: int = 1024,
    momentum: Momentum | None = None,
    clip_norm: float | None = None,
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    timeout: float = 300,
) -> State:
    """Makes a DDP model average its gradients with gradwire; every rank calls it, before training.

    `codec` is as in `Communicator.all_reduce`, or a function of the step (`Stages`, `warm_up`), and
    applies to float32 gradients; those of other types, as of bfloat16 parameters, travel as they
    are, of which gradwire's log warns. `rules` are pairs of a pattern and a codec: a parameter
    whose name it matches (as in fnmatch: ``"*.bias"``) travels with that of the first such rule.
    Where the codec is biased, a parameter of less than `min_elements` elements travels as it is.

    What a codec loses is kept by parameter and sent later, with `feedback`: None if a codec needs
    it or changes with the step, True also if none does, False never. Or it goes on, where the model
    is wrapped anew because ranks left or parameters were frozen or thawed: close the old state, and
    give its `feedback`, to which scale, rates and velocities belong, too. (Its `state_dict`, loaded
    into the new state, brings all that and the number of steps.) With `scaler`, a GradScaler, it
    follows the loss scale; with `optimizer` it follows the learning rate, so that it moves weights
    as far as it would have when it was kept.

    `momentum` moves momentum from the optimizer into the hook. `clip_norm` clips each rank's own
    gradient, of all parameters together, to the L2 norm clip_norm / sqrt(ranks) before it is added
    to what was held back, in place of clipping the average (Lin et al. 2018, "Deep Gradient
    Compression", sec. 3.2); with `scaler` the norm is that of unscaled gradients. Nothing travels
    before all gradients are there then.

    Without a communicator, one with `timeout` (seconds) is made over the ranks of
    `ddp.process_group`, which must be able to exchange CPU tensors, as gloo's are. Raises
    RendezvousError, and InvalidArgument for an unknown codec or algorithm and for a communicator of
    another size or another order of ranks.

    Within `ddp.join()` averages are over all ranks or, with `divide_by_initial_world_size=False`,
    over those that still train. Buffers (of batch normalisation) travel over gradwire too. Forward,
    backward and the end of a `ddp.join()` block raise gradwire's errors, which name the rank that
    failed; within such a block, backward may raise torch's. Backward raises when DDP left the hook
    out.
    """
    require_features(ddp, momentum=momentum, clip_norm=clip_norm)
    compresses = Rules(codec, rules).compresses  # refuses an unknown codec before the ranks meet
    owns = communicator is None
    if communicator is None:
        communicator = communicator_of(ddp.process_group, timeout)
    _require_same_ranks(communicator, ddp.process_group)
    active = Active(ddp)
    state = State(
        communicator,
        codec,
        algorithm,
        parameters=ddp.module.named_parameters(),
        feedback=feedback,
        rules=rules,
        min_elements=min_elements,
        momentum=momentum,
        clip_norm=clip_norm,
        scaler=scaler,
        optimizer=optimizer,
        find_unused=ddp.find_unused_parameters and not ddp.static_graph,
        active=active,
        owns_communicator=owns,
    )
    _release_from_old(ddp)
    ddp.register_comm_hook(state, comm_hook)
    _watch(ddp, state, active)
    broadcast_buffers_by(ddp, state)
    join_by(ddp, state)
    _states[ddp] = state
    if compresses and communicator.rank == 0:
        _warn_of_other_types(ddp)
    return state


def stats(ddp: DistributedDataParallel) -> Stats:
    """Prints a table of the hook's counters on this rank, and returns them.

    Raises InvalidArgument for a model without gradwire's hook.
    """
    if ddp not in _states:
        raise InvalidArgument("the model has no hook of gradwire's: call register() first")
    found = _states[ddp].stats()
    print(found)
    return found


def _warn_of_other_types(ddp: DistributedDataParallel) -> None:
    trained = {each.dtype for each in ddp.module.parameters() if each.requires_grad}
    others = sorted(map(str, trained - {torch.float32}))
    if others:
        _log.warning(
            "gradients of %s travel as they are: codecs are for float32", ", ".join(others)
        )


def _release_from_old(ddp: DistributedDataParallel) -> None:
    """If an old model still exists, its reducer may wait for gradients, and take these for its."""
    own = set(ddp.module.parameters())
    for other, state in list(_states.items()):
        remove = getattr(other, "_remove_autograd_hooks", None)  # torch has no public one
        over = state.closed or state.error is not None
        if over and remove and not own.isdisjoint(other.module.parameters()):
            remove()


def _watch(ddp: DistributedDataParallel, state: State, active: Active) -> None:
    """Has every forward in training raise the state's error, and look after its backward."""
    guard = Guard(list(ddp.module.parameters()), partial(getattr, state._steps, "handed_over"))
    state._guard = guard
    ddp.register_forward_pre_hook(partial(_before_forward, state, guard))
    ddp.register_forward_hook(partial(_after_forward, state, guard, active))


def _before_forward(state: State, guard: Guard, ddp: DistributedDataParallel, _: Any) -> None:
    if not (ddp.training and torch.is_grad_enabled()):
        return
    state._steps.raise_error()
    if ddp.require_backward_grad_sync:
        guard.require_averaged()


def _after_forward(
    state: State, guard: Guard, active: Active, ddp: DistributedDataParallel, _: Any, output: Any
) -> None:
    if torch.is_grad_enabled() and ddp.require_backward_grad_sync and not state.closed:
        active.note_forward()
        guard.after_forward(output)


def _require_same_ranks(communicator: Communicator, group: dist.ProcessGroup) -> None:
    have, want = (communicator.rank, communicator.size), (group.rank(), group.size())
    if have != want:
        raise InvalidArgument(
            f"the communicator says rank {have[0]} of {have[1]}, the model's process group says "
            f"rank {want[0]} of {want[1]}: they must consist of the same ranks in the same order"
        )
