"""TrainingState: everything that stays from one step to the next, and how a step changes it.

A step is a transaction. Its calls work on copies of residuals and velocities, and `end_step` keeps
all of them or none, alike on all ranks: a step with NaN or Inf, or one that failed, must not leave
some parameters ahead of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire._calls.reductions import CodecLike
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys
from gradwire.torch._step import saved as saving
from gradwire.torch._step.buckets import codec_for_16_bits, compressible, pieces, real_view
from gradwire.torch._step.clipping import Clipping
from gradwire.torch._step.double_counting import AccumulationCheck
from gradwire.torch._step.gradient_scale import (
    GradientScale,
    Scaler,
    ScaleTracker,
    persistent_state_of,
)
from gradwire.torch._step.momentum import Momentum, Velocities
from gradwire.torch._step.repacking import Bucket, BucketRepacker
from gradwire.torch._step.rules import Rules, is_at_least_16_bits, is_biased, is_sparse
from gradwire.torch._step.unused import UnusedParameters


class Call(NamedTuple):
    """One all_reduce: the arrays that it averages, and how."""

    arrays: Sequence[torch.Tensor]
    codec: CodecLike
    keys: Keys | None = None  # with feedback
    rounded: Sequence[torch.Tensor] = ()  # 16-bit gradients that the averages are rounded into


class TrainingState:
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
        self.feedback, self.unused = feedback, unused
        self._names, self._rules = names, rules
        self._repacker, self._clipping = BucketRepacker(), clipping
        self.scales, self._persistent = (
            ScaleTracker(scaler, optimizer),
            persistent_state_of(feedback),
        )
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
        self.paused = False  # steps that begin neither use nor change anything here
        self._ranks = ranks
        self._rescale(GradientScale(ranks=ranks))
        # Of the step under way:
        self._loss_scale = 1.0
        self._paused = False
        self._sent_with_keys: dict[str, torch.Tensor] = {}
        self._sent_sparsely: list[str] = []
        self._sent_plainly: list[torch.Tensor] = []

    @property
    def is_counted(self) -> bool:
        """Whether the step under way is one of the training: it is not paused."""
        return not self._paused

    @property
    def holds_buckets(self) -> bool:
        """Whether buckets travel only when all buckets of the step are there."""
        return self._repacker.holds_buckets or self._clipping is not None

    def begin_step(self, step: int, scale: GradientScale) -> None:
        """Begins a step; `scale` is that of its gradients, the same on all ranks.

        Raises InvalidArgument when residuals cannot follow it.
        """
        self._paused = self.paused
        if not self._paused:
            self._rescale(scale)
            if self.feedback is not None:
                self.feedback.begin_step()
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
        ready = self._clipped(own, is_last)
        for i, bucket in enumerate(ready, start=1):
            if self._velocities is not None:
                self._velocities.apply(bucket)
            found += self._repacker.put(bucket, is_last and i == len(ready))
        return found

    def calls(self, bucket: Bucket, step: int) -> Iterator[Call]:
        """The all_reduces of a bucket, in the same order on every rank."""
        for call in self._calls(bucket, step):
            if self._paused:
                codec = "none" if is_biased(call.codec) else call.codec
                yield call._replace(codec=codec, keys=None)
                continue
            if call.keys is not None:
                names = [name for name, _ in call.keys]
                if self.unused is not None:
                    self._sent_with_keys.update(zip(names, call.arrays, strict=True))
                self._sent_sparsely += names if is_sparse(call.codec) else []
            elif self.feedback is not None or self._velocities is not None:
                self._sent_plainly += call.arrays
            yield call

    def end_step(self, ok: bool) -> bool:
        """Keeps all changes of the step or none, alike on all ranks; returns whether it did."""
        self._repacker.end_step(ok)
        if self._paused:
            return False
        if self._accumulated is not None and ok:
            self._accumulated.deliver(self._names.values())
        keep = ok and all(self._is_finite(each) for each in self._sent_plainly)
        if self.feedback is not None:
            keep = self.feedback.end_step(keep)
        if self.unused is not None and keep:
            self._put_back_unused(self.unused)
        if self._velocities is not None:
            self._velocities.end_step(keep, self._sent_sparsely, self.feedback)
        self._sent_with_keys, self._sent_plainly = (
            {},
            [],
        )  # they would keep buckets alive that DDP replaces
        return keep

    def remove_hooks(self) -> None:
        """Removes the hooks on parameters, which outlive this state; no step begins any more."""
        if self._accumulated is not None:
            self._accumulated.remove_hooks()

    def _is_finite(self, array: torch.Tensor) -> bool:
        """Whether an array is finite; for one on a GPU the step's end finds out there."""
        if not array.is_cuda:
            return bool(torch.isfinite(array).all())
        if self.feedback is not None:
            probe = array if array.dtype is torch.float32 else (array.float() * 0).sum()
            self.feedback._require_finite(probe.data_ptr(), probe.numel(), probe)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything to save, as tensors and plain values by parameter name."""
        velocities = {} if self._velocities is None else self._velocities.kept
        return {
            "layout": self._repacker.layout,
            "loss_scale": self._persistent.scale.loss_scale or None,
            "learning_rates": list(self._persistent.scale.rates),
            "feedback": {} if self.feedback is None else saving.to_tensors(self.feedback),
            "velocities": {name: each.clone() for name, each in velocities.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces everything by a saved state.

        Raises InvalidArgument for another model's, and for residuals or velocities that this hook
        does not keep.
        """
        self._check(saved)
        self._check_velocities(saved["velocities"])
        if self.feedback is not None:
            self.feedback.load_state_dict(saving.to_arrays(saved["feedback"]))
        if self._velocities is not None:
            self._velocities.load(saved["velocities"])
        self._persistent.scale = saving.scale_of(saved)
        self._rescale(GradientScale(ranks=self._ranks))
        self._repacker.resume(tuple(map(tuple, saved["layout"])), int(saved["steps"]))

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Adds another rank's residuals, in this rank's scale; raises like `load_state_dict`."""
        self._check(saved)
        its = saving.scale_of(saved)
        own = self._persistent.scale.or_else(its)
        factor = its.loss_factor(own) * its.rate_factor(own) * its.share_factor(own)
        for name, kept in saved["feedback"].items():
            assert self.feedback is not None  # checked
            self.feedback.add(name, kept["residual"].float().numpy() * factor)
        self._persistent.scale = own

    def _rescale(self, scale: GradientScale) -> None:
        before, self._loss_scale = self._persistent.scale, scale.loss_scale or 1.0
        loss = before.loss_factor(scale)
        factor = loss * before.rate_factor(scale) * before.share_factor(scale)
        if self.feedback is not None and factor != 1:
            self.feedback.scale(factor)
        if self._velocities is not None and loss != 1:
            self._velocities.scale(loss)
        self._persistent.scale = scale.or_else(before)

    def _clipped(self, bucket: Bucket, is_last: bool) -> Sequence[Bucket]:
        if self._clipping is None:
            return [bucket]
        return self._clipping.put(bucket, is_last, self._loss_scale)

    def _put_back_unused(self, unused: UnusedParameters) -> None:
        """Returns to residuals what was sent for parameters that no rank used: DDP drops it."""
        names = unused.names
        own = {} if self._velocities is None else self._velocities.take_back(names)
        for name in names & self._sent_with_keys.keys():
            assert self.feedback is not None  # which has keys
            back = self._sent_with_keys[name]
            self.feedback.add(name, (back - own[name] if name in own else back).cpu().numpy())

    def _check(self, saved: Mapping[str, Any]) -> None:
        saving.check(saved["feedback"], self._names)
        if saved["feedback"] and self.feedback is None:
            raise InvalidArgument(
                "the state holds residuals, and this hook keeps none: register it with "
                "feedback=True"
            )

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
        buffer = real_view(buffer)
        if not self._names:
            return Bucket([buffer], (), ())
        parameters = bucket.parameters()
        unknown = [each for each in parameters if each not in self._names]
        if unknown:
            raise InvalidArgument(
                f"bucket {bucket.index()} has a parameter of shape {tuple(unknown[0].shape)} that "
                "is none of the model's named_parameters()"
            )
        names = [self._names[each] for each in parameters]
        return Bucket([buffer], names, pieces(buffer, parameters, f"bucket {bucket.index()}"))

    def _calls(self, bucket: Bucket, step: int) -> Iterator[Call]:
        if not compressible(bucket.whole[0]):
            yield Call(bucket.whole, "none")
            return
        if not bucket.names:
            yield self._through_float32(Call(bucket.whole, self._rules.default(step)))
            return
        groups = bucket.groups(self._rules, step)
        if self.feedback is None and len(groups) == 1:
            yield self._through_float32(Call(bucket.whole, groups[0][0]))
            return
        for codec, indices in groups:
            arrays = [bucket.gradients[i] for i in indices]
            keys = [(bucket.names[i], bucket.gradients[i].numel()) for i in indices]
            yield self._through_float32(
                Call(arrays, codec, None if self.feedback is None else keys)
            )

    def _through_float32(self, call: Call) -> Call:
        """The call with 16-bit gradients as float32, for codecs with fewer bits and feedback."""
        dtype = call.arrays[0].dtype
        if dtype is torch.float32:
            return call
        codec = call.codec
        if is_at_least_16_bits(codec):
            if call.keys is None:
                return call._replace(codec="none")
            if self._rules.compresses:
                codec = codec_for_16_bits(dtype, self._ranks)
        return Call([each.float() for each in call.arrays], codec, call.keys, call.arrays)
