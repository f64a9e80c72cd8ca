"""Checks of settings that several ways of training have: on each rank alone, and that all agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire._base.arguments import wrong
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument, ScheduleError, describe
from gradwire._schedules.schedule import Schedule
from gradwire.torch.exchange.hook_state import HookState

_State = TypeVar("_State", bound=HookState)
_RankSettings = tuple[str, dict[str, str]]  # why a rank has failed, and its settings


def require_settings(scaler: Any, optimizer: Any) -> None:
    """Raises InvalidArgument for settings of a wrong type."""
    if scaler is not None and (isinstance(scaler, type) or not hasattr(scaler, "get_scale")):
        raise wrong(scaler, "scaler", "the GradScaler that scales the loss")
    groups = None if isinstance(optimizer, type) else getattr(optimizer, "param_groups", None)
    if optimizer is not None and groups is None:
        raise wrong(optimizer, "optimizer", "the optimizer that steps the model's parameters")


def require_algorithm(
    algorithm: str, codec: str | None, communicator: Communicator, collective: str = "all_reduce"
) -> None:
    """Raises InvalidArgument for an algorithm that these ranks or a lossy codec cannot have."""
    if algorithm == "auto":
        return
    try:
        made = Schedule.generate(
            algorithm, communicator.size, collective=collective, groups=communicator.hosts
        )
    except ScheduleError as error:
        raise InvalidArgument(f"algorithm={algorithm!r}: {error}") from error
    if codec is not None and not made.verify().in_tree:
        raise InvalidArgument(
            f"algorithm={algorithm!r} adds a partial sum to several others, which the lossy "
            f"codec={codec!r} cannot: use auto, ring, direct or a tree"
        )


def require_alike(
    communicator: Communicator,
    call: str,
    settings: Mapping[str, object],
    failure: Exception | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raises on all ranks when one of them has failed, or has other settings than the others.

    Raises the failure where that was, and InvalidArgument elsewhere, which names `call`. The ranks
    of `group` are compared after those of the communicator.
    """
    own = {name: repr(value) for name, value in settings.items()}
    why = "" if failure is None else f"{type(failure).__name__}: {describe(failure)}"
    why = _problem(call, communicator.all_gather_object((why, own)))
    if group is not None:
        why = _problem(call, _all_gather_object(group, (why, own)))
    if why:
        raise failure or InvalidArgument(why)


def made_alike(
    make: Callable[[], _State],
    communicator: Communicator,
    *,
    owns_communicator: bool,
    group: dist.ProcessGroup | None = None,
    **settings: object,
) -> _State:
    """Calls `make` and returns its state if every rank has made its own with the same settings.

    Otherwise raises on all ranks, the error of `make` or InvalidArgument, and closes the state, or
    the communicator that it was to own. With a `group`, the ranks of a mesh of two dimensions call
    it, and this is the dimension that the communicator is not of.
    """
    state: _State | None = None
    failure: Exception | None = None
    try:
        state = make()
    except Exception as error:
        failure = error
    kept = state is not None and state.feedback is not None
    try:
        require_alike(communicator, "register()", {**settings, "feedback": kept}, failure, group)
    except BaseException:
        if state is not None:
            state.close()
        elif owns_communicator:
            communicator.close()
        raise
    assert state is not None
    return state


def _problem(call: str, every: Sequence[_RankSettings]) -> str:
    """The first failure or difference between ranks, as a text; empty without one."""
    for rank, (why, _) in enumerate(every):
        if why:
            return f"{call} failed on rank {rank}: {why}"
    settings = [its for _, its in every]
    return next(filter(None, (_difference(call, name, settings) for name in settings[0])), "")


def _all_gather_object(group: dist.ProcessGroup, own: _RankSettings) -> Sequence[_RankSettings]:
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, own, group=group)
    return every


def _difference(call: str, name: str, settings: Sequence[Mapping[str, str]]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, its in enumerate(settings):
        ranks.setdefault(its[name], []).append(str(rank))
    if len(ranks) == 1:
        return ""
    by_value = "; ".join(f"{value} on rank {', '.join(on)}" for value, on in ranks.items())
    return (
        f"{call} was called with a different {name}= by rank: {by_value}: give the same one on "
        "all ranks"
    )
