"""Parcels: gradients that travel together. DDP's buckets, or those of a saved state.

How ring and tree fold depends on where in a buffer an element lies. After a resume DDP begins with
one bucket for the whole model, and has the buckets of the interrupted run back a step or two later.
Until then the gradients are packed as they were, so that results have the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from gradwire._reductions import CodecLike
from gradwire.torch._rules import Rules

Layout: TypeAlias = tuple[tuple[str, ...], ...]  # by bucket, the names of its parameters

_REBUILT_BY = 3  # steps after which DDP has rebuilt its buckets if it ever will

_log = logging.getLogger("gradwire")


class Parcel(NamedTuple):
    """A flat tensor and its parts, one for each parameter, end to end."""

    buffer: torch.Tensor
    names: Sequence[str]  # of the parameters; none where they are not known
    gradients: Sequence[torch.Tensor]  # views of the buffer, of the parameters' shapes

    def groups(self, rules: Rules, step: int) -> dict[CodecLike, list[int]]:
        """By codec, the parameters that it is for; in the same order on every rank."""
        found: dict[CodecLike, list[int]] = {}
        for i, (name, gradient) in enumerate(zip(self.names, self.gradients, strict=True)):
            found.setdefault(rules.codec(name, gradient.numel(), step), []).append(i)
        return found


class Packing:
    """Turns a step's buckets into parcels, and their results back."""

    def __init__(self) -> None:
        self.layout: Layout = ()  # of the last whole step
        self._wanted: Layout = ()
        self._steps = 0  # since it is wanted
        self._first: Layout = ()
        self._buckets: list[Parcel] = []
        self._packed: list[Parcel] = []

    def resume(self, layout: Layout) -> None:
        """Packs like this until DDP does, or has buckets that it will not rebuild."""
        self._wanted, self._steps = layout, 0

    @property
    def holds(self) -> bool:
        """Whether all buckets of the step must be there before any can travel."""
        return bool(self._wanted)

    def put(self, bucket: Parcel, is_last: bool) -> list[Parcel]:
        """What can travel now."""
        self._buckets.append(bucket)
        if not self._wanted:
            return [bucket]
        return self._pack() if is_last else []

    def end_step(self, well: bool) -> None:
        """Writes the results back."""
        if well:
            for parcel in self._packed:
                self._unpack(parcel)
            now = tuple(tuple(each.names) for each in self._buckets)
            self.layout = self._wanted or now
            self._follow(now)
        self._buckets, self._packed = [], []

    def _follow(self, now: Layout) -> None:
        """Goes on with DDP's own buckets when these are as wanted, or as they will stay."""
        if not self._wanted:
            return
        self._steps += 1
        self._first = now if self._steps == 1 else self._first
        if now == self._wanted:
            self._wanted = ()
        elif now != self._first or self._steps == _REBUILT_BY:
            _log.warning(
                "DDP's buckets are not those of the loaded state: from here on sums may differ from"
                " the interrupted run's in rounding"
            )
            self._wanted, self.layout = (), now

    def _pack(self) -> list[Parcel]:
        parts = self._parts()
        names = sorted(name for bucket in self._wanted for name in bucket)
        now = tuple(tuple(each.names) for each in self._buckets)
        if now == self._wanted or names != sorted(parts):
            self._wanted = now
            return self._buckets
        for bucket in self._wanted:
            buffer = torch.cat([parts[name].reshape(-1) for name in bucket])
            self._packed.append(_parcel(buffer, bucket, [parts[name] for name in bucket]))
        return self._packed

    def _unpack(self, parcel: Parcel) -> None:
        parts = self._parts()
        for name, result in zip(parcel.names, parcel.gradients, strict=True):
            parts[name].copy_(result)

    def _parts(self) -> dict[str, torch.Tensor]:
        return {
            name: part
            for bucket in self._buckets
            for name, part in zip(bucket.names, bucket.gradients, strict=True)
        }


def _parcel(buffer: torch.Tensor, names: Sequence[str], like: Sequence[torch.Tensor]) -> Parcel:
    flat = buffer.split([each.numel() for each in like])
    return Parcel(
        buffer, names, [part.view(each.shape) for part, each in zip(flat, like, strict=True)]
    )
