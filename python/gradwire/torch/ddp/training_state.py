"""TrainingState: everything that stays from one step to the next under DDP."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch.ddp.clipping import Clipping
from gradwire.torch.ddp.double_counting import AccumulationCheck
from gradwire.torch.ddp.momentum import Momentum, Velocities
from gradwire.torch.ddp.unused import UnusedParameters
from gradwire.torch.exchange import saved as saving
from gradwire.torch.exchange.gradient_scale import GradientScale, Scaler
from gradwire.torch.exchange.residual_state import Call, ResidualState
from gradwire.torch.exchange.rules import Bucket, BucketLayout, Rules, is_sparse, real_view

Layout: TypeAlias = tuple[tuple[str, ...], ...]  # by bucket, the names of its parameters

_REBUILT_BY = 3  # steps of a job after which DDP has rebuilt its buckets if it ever will
# Steps of a training that all runs pack alike. A job that begins in one of them has rebuilt buckets
# after them.
_FIRST_STEPS = 4

_log = logging.getLogger("gradwire")


class TrainingState(ResidualState):
    """One model's residuals, velocities, scale and bucket layout; only whole steps change it."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        rules: Rules,
        feedback: ErrorFeedback | None,
        momentum: Momentum | None = None,
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        unused: UnusedParameters | None = None,
        clipping: Clipping | None = None,
        ranks: int = 0,
    ) -> None:
        """Takes what `register` was given; `ranks` is their number. Raises InvalidArgument."""
        super().__init__(names, ranks, rules, feedback, scaler, optimizer)
        self.unused = unused
        self._repacker, self._clipping = BucketRepacker(), clipping
        once = (
            momentum is not None or clipping is not None
        )  # these must see each gradient only once
        self._accumulated = AccumulationCheck(names) if once else None
        self._velocities: Velocities | None = None
        if momentum is not None:
            self._velocities = Velocities(momentum, self._persistent.velocities)
            known = self._persistent.velocities.keys() & names.values()
            saving.check_velocities(
                {name: self._persistent.velocities[name] for name in known}, names
            )
        self.follow_ranks()
        self._layouts: dict[tuple[int, ...], BucketLayout] = {}  # by parameters, in their order
        # Of the step under way:
        self._sent_with_keys: dict[str, torch.Tensor] = {}
        self._sent_sparsely: list[str] = []
        self._sent_plainly: list[torch.Tensor] = []
        self._scale_on_gpu: torch.Tensor | None = None

    @property
    def holds_buckets(self) -> bool:
        """Whether buckets travel only when all buckets of the step are there."""
        return self._repacker.holds_buckets or self._clipping is not None

    def open_step(self, step: int, scale: GradientScale) -> None:
        """Begins a step of this number; `scale` is that of its gradients, the same on all ranks.

        Raises InvalidArgument when residuals cannot follow it.
        """
        self._scale_on_gpu = None
        super().open_step(step, scale)
        self._repacker.begin_step(step)
        if self._clipping is not None:
            self._clipping.begin_step()
        self._sent_with_keys, self._sent_sparsely, self._sent_plainly = {}, [], []

    def ready_buckets(self, given: dist.GradBucket, is_last: bool) -> list[Bucket]:
        """Takes one of DDP's buckets; returns the buckets that can travel now."""
        found: list[Bucket] = []
        own = self._read_bucket(given)
        if self._paused:
            return self._repacker.put(own, is_last)
        if self._accumulated is not None:
            self._accumulated.require_none(own.names)
        ready = [own] if self._clipping is None else self._clipped(self._clipping, own, is_last)
        for i, bucket in enumerate(ready, start=1):
            if self._velocities is not None:
                self._velocities.apply(bucket)
            found += self._repacker.put(bucket, is_last and i == len(ready))
        return found

    def end_step(self, ok: bool) -> bool:
        """Keeps all changes of the step or none, alike on all ranks; returns whether it did."""
        self._repacker.end_step(ok)
        if self._paused:
            return False
        if self._accumulated is not None and ok:
            self._accumulated.deliver(self._names.values())
        ok = ok and all(self._is_finite(each) for each in self._sent_plainly)
        finite = self._finite_on_gpu()
        keep = super().end_step(ok)
        if self.unused is not None and keep:
            self._put_back_unused(self.unused, finite)
        if self._velocities is not None:
            self._velocities.end_step(keep, self._sent_sparsely, self.feedback, finite)
        self._sent_with_keys, self._sent_plainly = (
            {},
            [],
        )  # they would keep buckets alive that DDP replaces
        return keep

    def remove_hooks(self) -> None:
        """Removes the hooks on parameters, which outlive this state; no step begins any more."""
        if self._accumulated is not None:
            self._accumulated.remove_hooks()

    def state_dict(self) -> dict[str, Any]:
        """Everything to save, as tensors and plain values by parameter name."""
        velocities = {} if self._velocities is None else self._velocities.kept
        return {
            **super().state_dict(),
            "layout": self._repacker.layout,
            "velocities": {name: each.to("cpu", copy=True) for name, each in velocities.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces everything by a saved state.

        Raises InvalidArgument for another model's, and for residuals or velocities that this hook
        does not keep.
        """
        self._check(saved)
        self._check_velocities(saved["velocities"])
        super().load_state_dict(saved)
        if self._velocities is not None:
            devices = {name: parameter.device for parameter, name in self._names.items()}
            self._velocities.load(saved["velocities"], devices)
        self._repacker.resume(tuple(map(tuple, saved["layout"])), int(saved["steps"]))

    def _note(self, call: Call) -> None:
        if call.keys is not None:
            names = [name for name, _ in call.keys]
            if self.unused is not None:
                self._sent_with_keys.update(zip(names, call.arrays, strict=True))
            self._sent_sparsely += names if is_sparse(call.codec) else []
        elif self.feedback is not None or self._velocities is not None:
            self._sent_plainly += call.arrays

    def _is_finite(self, array: torch.Tensor) -> bool:
        """Whether an array is finite; for one on a GPU the step's end finds out there."""
        if not array.is_cuda:
            return bool(torch.isfinite(array).all())
        if self.feedback is not None:
            probe = array if array.dtype is torch.float32 else (array.float() * 0).sum()
            self.feedback._require_finite(probe.data_ptr(), probe.numel(), probe)
        return True

    def _finite_on_gpu(self) -> torch.Tensor | None:
        """Whether the step is finite, as a bool on the GPU; None where the host knows it."""
        some = None if self._velocities is None else self._velocities.on_gpu()
        if some is None:
            some = next((each for each in self._sent_with_keys.values() if each.is_cuda), None)
        if some is None:
            return None
        flags = some.new_zeros(1, dtype=torch.int32)
        if self.feedback is not None:
            stream = torch.cuda.current_stream(flags.device).cuda_stream
            self.feedback._copy_flags(flags.data_ptr(), stream)
        finite = [torch.isfinite(each).all() for each in self._sent_plainly if each.is_cuda]
        return torch.stack([*finite, (flags == 0).all()]).all()

    def _follow(self, scale: torch.Tensor, before: float | torch.Tensor | None) -> None:
        self._scale_on_gpu = scale
        if self._velocities is None or before is None:
            return
        now = scale.double().view(())
        factor = now / (before.double().view(()) if isinstance(before, torch.Tensor) else before)
        follows = torch.isfinite(factor) & (factor > 0)
        self._velocities.scale(torch.where(follows, factor, torch.ones_like(factor)))

    def _rescale(self, scale: GradientScale) -> None:
        before = self._persistent.scale
        super()._rescale(scale)
        if self._velocities is not None and before.loss_factor(scale) != 1:
            self._velocities.scale(before.loss_factor(scale))

    def _clipped(self, clipping: Clipping, bucket: Bucket, is_last: bool) -> Sequence[Bucket]:
        scale = self._loss_scale if self._scale_on_gpu is None else self._scale_on_gpu
        return clipping.put(bucket, is_last, scale)

    def _put_back_unused(self, unused: UnusedParameters, finite: torch.Tensor | None) -> None:
        """Returns to residuals what was sent for parameters that no rank used: DDP drops it.

        Not so where a GPU finds the step not `finite`: then residuals are as before.
        """
        names = unused.names
        own = {} if self._velocities is None else self._velocities.take_back(names)
        back_to = names & self._sent_with_keys.keys()
        if back_to and finite is not None and not finite:
            return
        for name in back_to:
            assert self.feedback is not None  # which has keys
            back = self._sent_with_keys[name]
            self.feedback.add(name, (back - own[name] if name in own else back).cpu().numpy())

    def _check_velocities(self, saved: Mapping[str, torch.Tensor]) -> None:
        saving.check_velocities(saved, self._names)
        if saved and self._velocities is None:
            raise InvalidArgument(
                "the state holds velocities, and this hook keeps none: register it with momentum="
            )

    def _read_bucket(self, bucket: dist.GradBucket) -> Bucket:
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            shapes = ", ".join(str(tuple(each.shape)) for each in bucket.parameters())
            raise InvalidArgument(
                f"bucket {bucket.index()} has sparse gradients, for parameters of shape {shapes}; "
                "gradwire averages dense ones: build the embedding with sparse=False"
            )
        if buffer.is_complex():
            buffer = real_view(buffer)
        if not self._names:
            return Bucket([buffer], (), ())
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = self._layout_of(bucket, parameters)
        return self._layouts[key].bucket(buffer, f"bucket {bucket.index()}")

    def _layout_of(
        self, bucket: dist.GradBucket, parameters: Sequence[torch.Tensor]
    ) -> BucketLayout:
        unknown = [each for each in parameters if each not in self._names]
        if unknown:
            raise InvalidArgument(
                f"bucket {bucket.index()} has a parameter of shape {tuple(unknown[0].shape)} that "
                "is none of the model's named_parameters()"
            )
        return BucketLayout.of({self._names[each]: each for each in parameters})


class BucketRepacker:
    """Turns a step's DDP buckets into those that travel, and copies the averages back.

    How ring and tree fold depends on where in a buffer an element lies. A job begins with buckets
    that DDP rebuilds a step or two later, in a layout that nobody knows before. So that an
    interrupted training has the bits of one that is not, its first steps are packed like the first
    step of a job, which every job with the same settings has in common: in parts, one for each
    parameter, where DDP has them, so that nothing is copied. From then on the layout is that of
    DDP's own buckets; a job that resumes there packs copies in the saved layout until DDP has
    rebuilt its own.
    """

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
