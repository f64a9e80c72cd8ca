"""A trainer's residuals in a checkpoint, which torch.load(weights_only=True) can read.

An average over P ranks delivers 1/P of a residual. Over Q ranks its weight stays the same when the
sum of all residuals becomes Q/P of what it was. So the old ranks and the new ranks each divide one
line evenly, and a new rank gets the mean of the old ones over its part of the line: of 4 ranks, 2
get the means of two each; of 2 ranks, 4 get copies of one each. Velocities, whose mean counts,
follow the same rule.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch.exchange.gradient_scale import GradientScale
from gradwire.torch.exchange.rules import gradient_elements, gradient_shape

VERSION = 2  # version 1 does not say which rank it is of
_READS = (1, 2)

_log = logging.getLogger("gradwire")


def to_tensors(feedback: ErrorFeedback) -> dict[str, dict[str, Any]]:
    """Converts ErrorFeedback.state_dict() to tensors; residuals keep the dtype of the feedback."""
    found = {
        key: {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in kept.items()
        }
        for key, kept in feedback.state_dict().items()
    }
    for kept in found.values():
        kept["residual"] = kept["residual"].to(getattr(torch, feedback.dtype))
    return found


def to_arrays(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Converts tensors back to arrays, for ErrorFeedback.load_state_dict()."""
    return {
        key: {
            name: value.float().numpy() if isinstance(value, torch.Tensor) else value
            for name, value in kept.items()
        }
        for key, kept in saved.items()
    }


def scale_of(saved: Mapping[str, Any]) -> GradientScale:
    """The scale of a saved state's residuals and velocities."""
    ranks = saved.get("world_size", 0)
    return GradientScale(saved["loss_scale"] or 0.0, tuple(saved["learning_rates"]), ranks)


def stamp(communicator: Communicator, steps: int) -> dict[str, Any]:
    """The entries that identify a saved state: its version, rank, number of ranks and step."""
    return {
        "version": VERSION,
        "rank": communicator.rank,
        "world_size": communicator.size,
        "steps": steps,
    }


def require_version(saved: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for anything but a state_dict()'s result."""
    version = saved.get("version") if isinstance(saved, Mapping) else None
    if version not in _READS:
        raise InvalidArgument(
            f"the state's version is {version!r}, and this gradwire reads "
            f"{' and '.join(map(str, _READS))}: give what state.state_dict() returned"
        )


def for_rank(saved: Mapping[str, Any], rank: int, size: int) -> Mapping[str, Any]:
    """A rank's share of what `gather_state_dict` returned, or its own state as it is.

    Raises InvalidArgument for anything else.
    """
    require_version(saved)
    if "ranks" in saved:
        require_complete(saved)
        return share(saved, rank, size)
    require_own(saved, rank, size)
    return saved


def require_own(saved: Mapping[str, Any], rank: int, size: int) -> None:
    """Raises InvalidArgument for the state of another rank, or of another number of ranks."""
    if "rank" not in saved:
        _log.warning(
            "rank %d loads a state that an earlier gradwire has saved without its rank: make sure "
            "that each rank loads its own, and that there are as many as then",
            rank,
        )
        return
    its, of = int(saved["rank"]), int(saved["world_size"])
    if (its, of) == (rank, size):
        return
    if of == size:
        raise InvalidArgument(
            f"the state is that of rank {its} of {of}, and this is rank {rank} of {size}: each "
            "rank loads its own residuals; save one file a rank, or one of all ranks with "
            "gradwire.torch.gather_state_dict()"
        )
    raise InvalidArgument(
        f"the state is that of rank {its} of {of}, and this is rank {rank} of {size}: for another "
        "number of ranks load what gradwire.torch.gather_state_dict() made of all of them; a rank "
        "that goes on after others left gives resized=True"
    )


def check(feedback: Mapping[str, Mapping[str, Any]], names: Mapping[torch.Tensor, str]) -> None:
    """Raises InvalidArgument for residuals of another model; `names` are of its parameters."""
    sizes = {name: gradient_elements(parameter) for parameter, name in names.items()}
    for name, kept in feedback.items():
        if name not in sizes:
            raise InvalidArgument(f"the state has a residual of {name!r}, the model no parameter")
        if kept["residual"].numel() != sizes[name]:
            raise InvalidArgument(
                f"the state's residual of {name!r} has {kept['residual'].numel()} elements, the "
                f"model's parameter {sizes[name]}"
            )


def check_velocities(
    velocities: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str]
) -> None:
    """Raises InvalidArgument for velocities whose shapes or types are not the parameters'."""
    kinds = {
        name: (gradient_shape(parameter), parameter.dtype.to_real())
        for parameter, name in names.items()
    }
    for name, velocity in velocities.items():
        if name not in kinds:
            raise InvalidArgument(f"the state has a velocity of {name!r}, the model no parameter")
        shape, dtype = kinds[name]
        if (tuple(velocity.shape), velocity.dtype) != (shape, dtype):
            raise InvalidArgument(
                f"the state's velocity of {name!r} is {velocity.dtype} of shape "
                f"{tuple(velocity.shape)}, the model's parameter {dtype} of {shape}"
            )


def require_complete(gathered: Any) -> None:
    """Raises InvalidArgument for anything but a `gather_state_dict` result."""
    if not isinstance(gathered, Mapping) or not isinstance(gathered.get("ranks"), list | tuple):
        raise InvalidArgument(
            "there are no states of all ranks: give what gather_state_dict() returned"
        )
    states = gathered["ranks"]
    ranks = [(each.get("rank"), each.get("world_size")) for each in states]
    if not ranks or ranks != [(rank, len(states)) for rank in range(len(states))]:
        raise InvalidArgument(
            f"the states are of (rank, number of ranks) {ranks}: give those of all ranks, in order"
        )
    steps = sorted({int(each["steps"]) for each in states})
    if len(steps) > 1:
        raise InvalidArgument(
            f"the ranks' states are of different steps, {', '.join(map(str, steps))}: save all "
            "after the same step"
        )
    _require_one_model(states)


def _require_one_model(states: Sequence[Mapping[str, Any]]) -> None:
    known: dict[str, int] = {}
    for rank, state in enumerate(states):
        for key, kept in state["feedback"].items():
            elements = kept["residual"].numel()
            if known.setdefault(key, elements) != elements:
                raise InvalidArgument(
                    f"rank {rank}'s state has {elements} elements of {key!r}, another's has "
                    f"{known[key]}: give those of one model"
                )


def share(gathered: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The state for a rank of a job of `size` ranks; residuals keep their weight in averages."""
    states = gathered["ranks"]
    if len(states) == size:
        return dict(states[rank])
    parts = _old_ranks_of(rank, size, len(states))
    of = [states[old] for old in parts]
    shares = [part / sum(parts.values()) for part in parts.values()]
    main = dict(of[shares.index(max(shares))])  # supplies what codecs have adapted or remember
    return {
        **main,
        "rank": rank,
        "world_size": size,
        "feedback": _weighted_feedback([each["feedback"] for each in of], shares, main["feedback"]),
        "velocities": _weighted([each["velocities"] for each in of], shares),
    }


def _old_ranks_of(rank: int, size: int, before: int) -> dict[int, int]:
    """The old ranks that share a new rank's part of the line, and how much each had of it."""
    found = {
        old: min((rank + 1) * before, (old + 1) * size) - max(rank * before, old * size)
        for old in range(before)
    }
    return {old: part for old, part in found.items() if part > 0}


def _weighted_feedback(
    of: Sequence[Mapping[str, Any]], shares: Sequence[float], main: Mapping[str, Any]
) -> dict[str, Any]:
    residuals = _weighted(
        [{key: kept["residual"].float() for key, kept in its.items()} for its in of], shares
    )
    kept = {key: each for its in of for key, each in its.items()} | dict(main)
    return {key: {**kept[key], "residual": each} for key, each in residuals.items()}


def _weighted(of: Sequence[Mapping[str, torch.Tensor]], shares: Sequence[float]) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    for its, part in zip(of, shares, strict=True):
        for key, values in its.items():
            found[key] = found[key] + values * part if key in found else values * part
    return found
