"""Parcels: gradients that travel together. DDP's buckets, or those that they are to be packed into.

How ring and tree fold depends on where in a buffer an element lies. A job begins with buckets that
DDP rebuilds a step or two later, whose layout nobody knows before. So that a training which is
interrupted has the bits of one that is not, its first steps are packed as the job's first one is,
which every job with the same settings has in common: in parts, one for each parameter, where DDP
has them, so that nothing is copied. From then on the layout is that of DDP's own buckets; a job
that resumes there packs copies as the saved state says until DDP has rebuilt its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from gradwire._calls.reductions import CodecLike
from gradwire.codec import Codec
from gradwire.torch._step.rules import Rules

Layout: TypeAlias = tuple[tuple[str, ...], ...]  # by bucket, the names of its parameters

_REBUILT_BY = 3  # steps of a job after which DDP has rebuilt its buckets if it ever will
_ALIKE = 4  # steps of a training; a job that begins in one of them has rebuilt buckets after them

_log = logging.getLogger("gradwire")


class Parcel(NamedTuple):
    """Gradients of several parameters."""

    whole: Sequence[torch.Tensor]  # all of it, end to end: one flat tensor, or the gradients
    names: Sequence[str]  # of the parameters; none where they are not known
    gradients: Sequence[torch.Tensor]  # of the parameters' shapes

    def groups(self, rules: Rules, step: int) -> list[tuple[CodecLike, list[int]]]:
        """Each codec and the parameters that it is for; in the same order on every rank."""
        found: dict[object, tuple[CodecLike, list[int]]] = {}
        for i, (name, gradient) in enumerate(zip(self.names, self.gradients, strict=True)):
            codec = rules.codec(name, gradient.numel(), step)
            # A user's own need not be hashable.
            same = id(codec) if isinstance(codec, Codec) else codec
            found.setdefault(same, (codec, []))[1].append(i)
        return list(found.values())


class Packing:
    """Turns a step's buckets into parcels, and their results back."""

    def __init__(self) -> None:
        self._step = 0  # of the training
        self._wanted: Layout = ()  # in this step; empty for DDP's own
        self._loaded: Layout = ()  # until DDP has it
        self._resumed = False  # and DDP's buckets may not yet be as they will stay
        self._steps = 0  # of the job
        self._first: Layout = ()  # of its first step
        self._rebuilt: Layout = ()
        self._buckets: list[Parcel] = []
        self._packed: list[Parcel] = []

    @property
    def layout(self) -> Layout:
        """What a resumed job is to follow; empty while DDP may yet rebuild its buckets."""
        return self._loaded or self._rebuilt

    def resume(self, layout: Layout, step: int) -> None:
        """Packs like this until DDP does, or has buckets that it will not rebuild."""
        self._loaded, self._resumed = layout, True
        if not layout and step >= _ALIKE:
            self._warn()

    def begin_step(self, step: int) -> None:
        """`step` is the training's."""
        self._step = step
        self._wanted = self._first if step < _ALIKE else self._loaded

    @property
    def holds(self) -> bool:
        """Whether all buckets of the step must be there before any can travel."""
        return bool(self._wanted)

    def put(self, bucket: Parcel, is_last: bool) -> list[Parcel]:
        """What can travel now."""
        self._buckets.append(bucket)
        if not self._wanted:
            return [self._as_alike(bucket)]
        return [self._as_alike(each) for each in self._pack()] if is_last else []

    def end_step(self, well: bool) -> None:
        """Writes the results back."""
        if well:
            for parcel in self._packed:
                self._unpack(parcel)
            self._follow(self._layout_now())
        self._buckets, self._packed = [], []

    def _layout_now(self) -> Layout:
        """Of DDP's buckets; empty where parameters have no names."""
        return tuple(tuple(each.names) for each in self._buckets if each.names)

    def _follow(self, now: Layout) -> None:
        """Learns what DDP's buckets are, and goes on with them when they are as they will stay."""
        self._steps += 1
        if self._steps == 1:
            self._first = now
        if now == self._first and self._steps < _REBUILT_BY and now != self._loaded:
            return
        if self._resumed and not self._is_as_interrupted(now):
            self._warn()
        self._loaded, self._rebuilt, self._resumed = (), now, False

    def _is_as_interrupted(self, now: Layout) -> bool:
        if self._loaded:
            return now == self._loaded
        return now == self._first or self._step <= _ALIKE

    def _warn(self) -> None:
        self._resumed = False
        _log.warning(
            "DDP's buckets are not, or not yet, those of the interrupted run: sums may differ from "
            "that run's in rounding"
        )

    def _pack(self) -> list[Parcel]:
        parts = self._parts()
        names = sorted(name for bucket in self._wanted for name in bucket)
        now = tuple(tuple(each.names) for each in self._buckets)
        if now == self._wanted or names != sorted(parts):
            self._wanted = now
            return self._buckets
        packed = [_in_parts(bucket, [parts[name] for name in bucket]) for bucket in self._wanted]
        if self._step < _ALIKE:
            return packed
        self._packed = [_copied(each) for each in packed]  # cut as one tensor is, not as its parts
        return self._packed

    def _as_alike(self, parcel: Parcel) -> Parcel:
        """In the first steps in parts, which are in place whatever DDP's buckets are."""
        alike = self._step < _ALIKE and parcel.names
        return _in_parts(parcel.names, parcel.gradients) if alike else parcel

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


def _in_parts(names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Parcel:
    return Parcel(gradients, names, gradients)


def _copied(parcel: Parcel) -> Parcel:
    """The same in a flat tensor."""
    buffer = torch.cat([each.reshape(-1) for each in parcel.gradients])
    parts = buffer.split([each.numel() for each in parcel.gradients])
    views = [part.view_as(each) for part, each in zip(parts, parcel.gradients, strict=True)]
    return Parcel([buffer], parcel.names, views)
