"""Residuals of shards, in a checkpoint and when the number of ranks changes.

With replicas a rank reduces its shard, and keeps a residual of it under the parameter's name.
Without them it reduces whole gradients, and what it keeps of a parameter is a residual for each
rank that the parts go to, under ``name[rank]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.nn.functional import pad

from gradwire._errors import InvalidArgument
from gradwire.torch.exchange import saved as saving
from gradwire.torch.exchange.residual_state import ResidualState
from gradwire.torch.fsdp.shards import Shard, empty


class ShardResiduals(ResidualState):
    """Residuals of one rank's shards, which travel between replicas."""

    def __init__(
        self, shards: Sequence[Shard], shard: tuple[int, int], size: int, *options: Any
    ) -> None:
        """`shard` is the rank among those that share the parameters, and their number.

        `size` is the number of replicas.
        """
        names = {empty(each.shape): each.name for each in shards}
        super().__init__(names, size, *options)
        self._shard = shard
        self.follow_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Everything to save, as tensors and plain values by parameter name."""
        return {**super().state_dict(), "shard": list(self._shard)}

    def _check(self, saved: Mapping[str, Any]) -> None:
        its = tuple(saved.get("shard", ()))
        if its != self._shard:
            what = f"of shard {its[0]} of {its[1]}" if its else "not of a model with replicas"
            raise InvalidArgument(
                f"the state is {what}, and this rank has shard {self._shard[0]} of "
                f"{self._shard[1]}: load the state of the same shard; if the number of shards has "
                "changed, go on without the old residuals"
            )
        super()._check(saved)


class PartResiduals(ResidualState):
    """Residuals of whole gradients, part by part, which travel to the ranks that share a model."""

    def __init__(self, shards: Sequence[Shard], size: int, *options: Any) -> None:
        """`size` is the number of ranks that share the parameters."""
        self._shards = shards
        super().__init__(_part_names(shards, size), size, *options)
        self.follow_ranks()

    def state_dict(self) -> dict[str, Any]:
        """Everything to save, as tensors and plain values by key."""
        return {**super().state_dict(), "parts": self._ranks}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces everything by a saved state, from any number of ranks; raises as its base."""
        super().load_state_dict(self._cut_anew(saved))

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Adds another rank's residuals, in this rank's scale; raises like `load_state_dict`."""
        super().add_residuals(self._cut_anew(saved))

    def _cut_anew(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        before = saved.get("parts")
        if before is None:
            raise InvalidArgument(
                "the state is not of a model that FSDP shards without replicas: give what "
                "state.state_dict() returned for such a model"
            )
        if before == self._ranks:
            return saved
        saving.check(saved["feedback"], _part_names(self._shards, before))
        cut: dict[str, Any] = {}
        for each in self._shards:
            cut |= _cut_anew(saved["feedback"], each, before, self._ranks)
        return {**saved, "feedback": cut, "parts": self._ranks}


def part_name(name: str, rank: int) -> str:
    """The key of the part of a parameter that goes to a rank."""
    return f"{name}[{rank}]"


def _part_names(shards: Sequence[Shard], size: int) -> dict[torch.Tensor, str]:
    """The keys of all parts, by tensors of their shapes."""
    return {
        empty((prod(_part_shape(each.whole_shape, each.dim, size)),)): part_name(each.name, rank)
        for each in shards
        for rank in range(size)
    }


def _cut_anew(
    saved: Mapping[str, Any], shard: Shard, before: int, after: int
) -> dict[str, dict[str, Any]]:
    """One parameter's residuals for another number of ranks."""
    parts = [saved.get(part_name(shard.name, rank)) for rank in range(before)]
    known = [each for each in parts if each is not None]
    if not known:
        return {}
    dim, shape = shard.dim, shard.whole_shape
    part_shape = _part_shape(shape, dim, before)
    blank = torch.zeros(part_shape, dtype=torch.float32, device="cpu")
    blocks = [
        blank if each is None else each["residual"].float().view(part_shape) for each in parts
    ]
    whole = torch.cat(blocks, dim).narrow(dim, 0, shape[dim])
    new_shape = _part_shape(shape, dim, after)
    missing = new_shape[dim] * after - shape[dim]
    padded = pad(whole.movedim(dim, -1), (0, missing)).movedim(-1, dim)
    return {
        part_name(shard.name, rank): {**known[0], "residual": part.flatten()}
        for rank, part in enumerate(padded.split(new_shape[dim], dim))
    }


def _part_shape(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [-(-n // size) if i == dim else n for i, n in enumerate(shape)]
