"""Memory: what stays from one step to the next, and how a step changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire._calls.reductions import CodecLike
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys
from gradwire.torch._step import saved as saving
from gradwire.torch._step.buckets import codec_of_16_bits, compressible, pieces, real_view
from gradwire.torch._step.clipping import Clipping
from gradwire.torch._step.double_counting import Accumulated
from gradwire.torch._step.momentum import Momentum, Velocities
from gradwire.torch._step.packing import Packing, Parcel
from gradwire.torch._step.rules import Rules, is_at_least_16_bits, is_biased, is_sparse
from gradwire.torch._step.units import Scaler, Scales, Units, kept_with
from gradwire.torch._step.unused import Unused


class Call(NamedTuple):
    """What one all_reduce averages, and how."""

    arrays: Sequence[torch.Tensor]
    codec: CodecLike
    keys: Keys | None = None  # where there is feedback
    rounded: Sequence[torch.Tensor] = ()  # where the averages go, where not into the arrays


class Memory:
    """One model's residuals, velocities, scales and bucket layout; changed by whole steps."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        rules: Rules,
        feedback: ErrorFeedback | None,
        momentum: Momentum | None = None,
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        unused: Unused | None = None,
        clipping: Clipping | None = None,
        ranks: int = 0,
    ) -> None:
        """Averages are over `ranks`. Raises InvalidArgument."""
        self.feedback, self.unused = feedback, unused
        self._names, self._rules = names, rules
        self._packing, self._clipping = Packing(), clipping
        self.scales, self._kept = Scales(scaler, optimizer), kept_with(feedback)
        once = momentum is not None or clipping is not None  # a step sees each gradient once
        self._accumulated = Accumulated(names) if once else None
        self._velocities: Velocities | None = None
        if momentum is not None:
            self._velocities = Velocities(momentum, self._kept.velocities)
            known = self._kept.velocities.keys() & names.values()
            saving.check_velocities({name: self._kept.velocities[name] for name in known}, names)
        self.paused = False  # nothing kept is used or changed in steps that begin
        self._ranks = ranks
        self._follow(Units(ranks=ranks))
        # Of the step under way:
        self._loss_scale = 1.0
        self._paused = False
        self._keyed: dict[str, torch.Tensor] = {}
        self._sparse: list[str] = []
        self._plain: list[torch.Tensor] = []

    @property
    def counts(self) -> bool:
        """Whether the step under way is one of the training, and not paused."""
        return not self._paused

    @property
    def holds(self) -> bool:
        """Whether a step's buckets travel only when all of them are there."""
        return self._packing.holds or self._clipping is not None

    def begin_step(self, step: int, units: Units) -> None:
        """`units` are those of the gradients to come, the same on all ranks.

        Raises InvalidArgument where what was kept cannot follow them.
        """
        self._paused = self.paused
        if not self._paused:
            self._follow(units)
            if self.feedback is not None:
                self.feedback.begin_step()
        self._packing.begin_step(step)
        if self._clipping is not None:
            self._clipping.begin_step()
        self._keyed, self._sparse, self._plain = {}, [], []

    def parcels(self, bucket: dist.GradBucket, is_last: bool) -> list[Parcel]:
        """What is to travel now that this bucket is there."""
        found: list[Parcel] = []
        its = self._parcel(bucket)
        if self._paused:
            return self._packing.put(its, is_last)
        if self._accumulated is not None:
            self._accumulated.require_none(its.names)
        ready = self._clipped(its, is_last)
        for i, parcel in enumerate(ready, start=1):
            if self._velocities is not None:
                self._velocities.apply(parcel)
            found += self._packing.put(parcel, is_last and i == len(ready))
        return found

    def calls(self, parcel: Parcel, step: int) -> Iterator[Call]:
        """A parcel's all_reduces, in the same order on every rank."""
        for call in self._calls(parcel, step):
            if self._paused:
                codec = "none" if is_biased(call.codec) else call.codec
                yield call._replace(codec=codec, keys=None)
                continue
            if call.keys is not None:
                names = [name for name, _ in call.keys]
                if self.unused is not None:
                    self._keyed.update(zip(names, call.arrays, strict=True))
                self._sparse += names if is_sparse(call.codec) else []
            elif self.feedback is not None or self._velocities is not None:
                self._plain += call.arrays
            yield call

    def end_step(self, well: bool) -> bool:
        """Keeps what the step has changed, or nothing of it: the same on all ranks; says which."""
        self._packing.end_step(well)
        if self._paused:
            return False
        if self._accumulated is not None and well:
            self._accumulated.deliver(self._names.values())
        keep = well and all(self._is_finite(each) for each in self._plain)
        if self.feedback is not None:
            keep = self.feedback.end_step(keep)
        if self.unused is not None and keep:
            self._put_back(self.unused)
        if self._velocities is not None:
            self._velocities.end_step(keep, self._sparse, self.feedback)
        self._keyed, self._plain = {}, []  # lest they keep buckets that DDP makes anew
        return keep

    def let_go(self) -> None:
        """Of the parameters, which outlive it: no step begins any more."""
        if self._accumulated is not None:
            self._accumulated.let_go()

    def _is_finite(self, array: torch.Tensor) -> bool:
        """Of one on a GPU it is asked there, and the step's end answers."""
        if not array.is_cuda:
            return bool(torch.isfinite(array).all())
        if self.feedback is not None:
            probe = array if array.dtype is torch.float32 else (array.float() * 0).sum()
            self.feedback._require_finite(probe.data_ptr(), probe.numel(), probe)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, by parameter name."""
        velocities = {} if self._velocities is None else self._velocities.kept
        return {
            "layout": self._packing.layout,
            "loss_scale": self._kept.units.loss_scale or None,
            "learning_rates": list(self._kept.units.rates),
            "feedback": {} if self.feedback is None else saving.to_tensors(self.feedback),
            "velocities": {name: each.clone() for name, each in velocities.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Raises InvalidArgument for what is of another model, and where nothing is to keep it."""
        self._check(saved)
        self._check_velocities(saved["velocities"])
        if self.feedback is not None:
            self.feedback.load_state_dict(saving.to_arrays(saved["feedback"]))
        if self._velocities is not None:
            self._velocities.load(saved["velocities"])
        self._kept.units = saving.units(saved)
        self._follow(Units(ranks=self._ranks))
        self._packing.resume(tuple(map(tuple, saved["layout"])), int(saved["steps"]))

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Those of another rank, in this one's units; raises InvalidArgument like the above."""
        self._check(saved)
        its = saving.units(saved)
        own = self._kept.units.over(its)
        factor = its.loss_factor(own) * its.rate_factor(own) * its.share_factor(own)
        for name, kept in saved["feedback"].items():
            assert self.feedback is not None  # checked
            self.feedback.add(name, kept["residual"].float().numpy() * factor)
        self._kept.units = own

    def _follow(self, units: Units) -> None:
        before, self._loss_scale = self._kept.units, units.loss_scale or 1.0
        loss = before.loss_factor(units)
        factor = loss * before.rate_factor(units) * before.share_factor(units)
        if self.feedback is not None and factor != 1:
            self.feedback.scale(factor)
        if self._velocities is not None and loss != 1:
            self._velocities.scale(loss)
        self._kept.units = units.over(before)

    def _clipped(self, bucket: Parcel, is_last: bool) -> Sequence[Parcel]:
        if self._clipping is None:
            return [bucket]
        return self._clipping.put(bucket, is_last, self._loss_scale)

    def _put_back(self, unused: Unused) -> None:
        """What travelled of parameters that no rank used: DDP drops it."""
        names = unused.names
        own = {} if self._velocities is None else self._velocities.take_back(names)
        for name in names & self._keyed.keys():
            assert self.feedback is not None  # which has keys
            back = self._keyed[name]
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

    def _parcel(self, bucket: dist.GradBucket) -> Parcel:
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            shapes = ", ".join(str(tuple(each.shape)) for each in bucket.parameters())
            raise InvalidArgument(
                f"bucket {bucket.index()} has sparse gradients, for parameters of shape {shapes}; "
                "gradwire averages dense ones: build the embedding with sparse=False"
            )
        buffer = real_view(buffer)
        if not self._names:
            return Parcel([buffer], (), ())
        parameters = bucket.parameters()
        unknown = [each for each in parameters if each not in self._names]
        if unknown:
            raise InvalidArgument(
                f"bucket {bucket.index()} has a parameter of shape {tuple(unknown[0].shape)} that "
                "is none of the model's named_parameters()"
            )
        names = [self._names[each] for each in parameters]
        return Parcel([buffer], names, pieces(buffer, parameters, f"bucket {bucket.index()}"))

    def _calls(self, parcel: Parcel, step: int) -> Iterator[Call]:
        if not compressible(parcel.whole[0]):
            yield Call(parcel.whole, "none")
            return
        if not parcel.names:
            yield self._widened(Call(parcel.whole, self._rules.default(step)))
            return
        groups = parcel.groups(self._rules, step)
        if self.feedback is None and len(groups) == 1:
            yield self._widened(Call(parcel.whole, groups[0][0]))
            return
        for codec, indices in groups:
            arrays = [parcel.gradients[i] for i in indices]
            keys = [(parcel.names[i], parcel.gradients[i].numel()) for i in indices]
            yield self._widened(Call(arrays, codec, None if self.feedback is None else keys))

    def _widened(self, call: Call) -> Call:
        """Of 16-bit gradients: through float32, for codecs with fewer bits and for feedback."""
        dtype = call.arrays[0].dtype
        if dtype is torch.float32:
            return call
        codec = call.codec
        if is_at_least_16_bits(codec):
            if call.keys is None:
                return call._replace(codec="none")
            if self._rules.compresses:
                codec = codec_of_16_bits(dtype, self._ranks)
        return Call([each.float() for each in call.arrays], codec, call.keys, call.arrays)
