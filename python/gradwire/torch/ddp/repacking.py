"""BucketRepacker: sends other buckets than DDP's, so that a resumed run has the same bits.

How ring and tree fold depends on where in a buffer an element lies. A job begins with buckets that
DDP rebuilds a step or two later, in a layout that nobody knows before. So that an interrupted
training has the bits of one that is not, its first steps are packed like the first step of a job,
which every job with the same settings has in common: in parts, one for each parameter, where DDP
has them, so that nothing is copied. From then on the layout is that of DDP's own buckets; a job
that resumes there packs copies in the saved layout until DDP has rebuilt its own.
"""

from __future__ import annotations

import logging
from typing import TypeAlias

import torch

from gradwire.torch.exchange.buckets import Bucket

Layout: TypeAlias = tuple[tuple[str, ...], ...]  # by bucket, the names of its parameters

_REBUILT_BY = 3  # steps of a job after which DDP has rebuilt its buckets if it ever will
# Steps of a training that all runs pack alike. A job that begins in one of them has rebuilt buckets
# after them.
_FIRST_STEPS = 4

_log = logging.getLogger("gradwire")


class BucketRepacker:
    """Turns a step's DDP buckets into those that travel, and copies the averages back."""

    def __init__(self) -> None:
        self._target: Layout = ()  # in which this step's buckets travel; empty for DDP's own
        self._loaded: Layout = ()  # of a saved state, until DDP has the same
        self._resumed = False  # from a saved state, and DDP may still rebuild its buckets
        self._job_steps = 0  # of this job
        self._first: Layout = ()  # of this job's first step
        self._rebuilt: Layout = ()
        self._buckets: list[Bucket] = []
        self._repacked: list[Bucket] = []

    @property
    def layout(self) -> Layout:
        """The layout for a resumed job; empty while DDP may still rebuild its buckets."""
        return self._loaded or self._rebuilt

    def resume(self, layout: Layout, step: int) -> None:
        """Uses this layout until DDP has the same, or has buckets that it will not rebuild."""
        self._loaded, self._resumed = layout, True
        if not layout and step >= _FIRST_STEPS:
            self._warn()

    def begin_step(self, step: int) -> None:
        """Begins a step; `step` counts those of the whole training."""
        self._step = step  # of the training, over all its jobs
        self._target = self._first if step < _FIRST_STEPS else self._loaded

    @property
    def holds_buckets(self) -> bool:
        """Whether all buckets of the step must be there before any can travel."""
        return bool(self._target)

    def put(self, bucket: Bucket, is_last: bool) -> list[Bucket]:
        """Takes one of DDP's buckets; returns the buckets that can travel now."""
        self._buckets.append(bucket)
        ready = [bucket]
        if self._target:
            ready = self._repack() if is_last else []
        if self._step < _FIRST_STEPS:  # parts lie in place in any layout
            ready = [_in_parts(each) for each in ready]
        return ready

    def end_step(self, ok: bool) -> None:
        """Ends a step; copies the averages back if it went `ok`."""
        if ok:
            for bucket in self._repacked:
                self._copy_back(bucket)
            self._note_layout(self._current_layout())
        self._buckets, self._repacked = [], []

    def _current_layout(self) -> Layout:
        """The layout of DDP's buckets; empty when parameters have no names."""
        return tuple(tuple(each.names) for each in self._buckets if each.names)

    def _note_layout(self, now: Layout) -> None:
        """Notes DDP's layout, and uses it from now on once DDP will not rebuild it any more."""
        self._job_steps += 1
        if self._job_steps == 1:
            self._first = now
        if now == self._first and self._job_steps < _REBUILT_BY and now != self._loaded:
            return
        if self._resumed and not self._is_as_interrupted(now):
            self._warn()
        self._loaded, self._rebuilt, self._resumed = (), now, False

    def _is_as_interrupted(self, now: Layout) -> bool:
        if self._loaded:
            return now == self._loaded
        return now == self._first or self._step <= _FIRST_STEPS

    def _warn(self) -> None:
        self._resumed = False
        _log.warning(
            "DDP's buckets are not, or not yet, those of the interrupted run: sums may differ from "
            "that run's in rounding"
        )

    def _repack(self) -> list[Bucket]:
        parts = self._parts()
        names = sorted(name for bucket in self._target for name in bucket)
        now = tuple(tuple(each.names) for each in self._buckets)
        if now == self._target or names != sorted(parts):
            self._target = now
            return self._buckets
        grouped = [[parts[name] for name in bucket] for bucket in self._target]
        packed = [Bucket(own, names, own) for own, names in zip(grouped, self._target, strict=True)]
        if self._step < _FIRST_STEPS:
            return packed
        self._repacked = [
            _copied(each) for each in packed
        ]  # as flat tensors, since chunks of one are cut elsewhere than those of parts
        return self._repacked

    def _copy_back(self, bucket: Bucket) -> None:
        parts = self._parts()
        for name, result in zip(bucket.names, bucket.gradients, strict=True):
            parts[name].copy_(result)

    def _parts(self) -> dict[str, torch.Tensor]:
        return {
            name: part
            for bucket in self._buckets
            for name, part in zip(bucket.names, bucket.gradients, strict=True)
        }


def _in_parts(bucket: Bucket) -> Bucket:
    """The bucket in parts, one for each parameter, if these are known."""
    return bucket._replace(whole=bucket.gradients) if bucket.names else bucket


def _copied(bucket: Bucket) -> Bucket:
    """A copy of the bucket in one flat tensor."""
    buffer = torch.cat([each.reshape(-1) for each in bucket.gradients])
    parts = buffer.split([each.numel() for each in bucket.gradients])
    views = [part.view_as(each) for part, each in zip(parts, bucket.gradients, strict=True)]
    return Bucket([buffer], bucket.names, views)
