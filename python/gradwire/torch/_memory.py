"""Memory: what stays from one step to the next, and how a step changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys
from gradwire._reductions import CodecLike
from gradwire.torch import _saved
from gradwire.torch._clipping import Clipping
from gradwire.torch._momentum import Momentum, Velocities
from gradwire.torch._parcels import Packing, Parcel
from gradwire.torch._rules import Rules, is_sparse
from gradwire.torch._scales import LearningRate, LossScale, Scaler
from gradwire.torch._unused import Unused


class Call(NamedTuple):
    """What one all_reduce averages, and how."""

    arrays: Sequence[torch.Tensor]
    codec: CodecLike
    keys: Keys | None = None  # where there is feedback


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
    ) -> None:
        self.feedback, self.unused = feedback, unused
        self._names, self._rules = names, rules
        self._packing, self._clipping = Packing(), clipping
        self._velocities = None if momentum is None else Velocities(momentum)
        self._loss_scale, self._learning_rate = LossScale(scaler), LearningRate(optimizer)
        # Of the step under way:
        self._keyed: dict[str, torch.Tensor] = {}
        self._sparse: list[str] = []
        self._plain: list[torch.Tensor] = []

    @property
    def holds(self) -> bool:
        """Whether a step's buckets travel only when all of them are there."""
        return self._packing.holds or self._clipping is not None

    def begin_step(self, step: int) -> None:
        """Raises InvalidArgument for scales that cannot be followed."""
        loss_scale = self._loss_scale.factor()
        factor = loss_scale * self._learning_rate.factor()
        if self._velocities is not None and loss_scale != 1:
            self._velocities.scale(loss_scale)
        if self.feedback is not None and factor != 1:
            self.feedback.scale(factor)
        if self.feedback is not None:
            self.feedback.begin_step()
        self._packing.begin_step(step)
        if self._clipping is not None:
            self._clipping.begin_step()
        self._keyed, self._sparse, self._plain = {}, [], []

    def parcels(self, bucket: dist.GradBucket, is_last: bool) -> list[Parcel]:
        """What is to travel now that this bucket is there."""
        found: list[Parcel] = []
        ready = self._clipped(self._parcel(bucket), is_last)
        for i, parcel in enumerate(ready, start=1):
            if self._velocities is not None:
                self._velocities.apply(parcel)
            found += self._packing.put(parcel, is_last and i == len(ready))
        return found

    def calls(self, parcel: Parcel, step: int) -> Iterator[Call]:
        """A parcel's all_reduces, in the same order on every rank."""
        for call in self._calls(parcel, step):
            if call.keys is not None:
                names = [name for name, _ in call.keys]
                self._keyed.update(zip(names, call.arrays, strict=True))
                self._sparse += names if is_sparse(call.codec) else []
            elif self.feedback is not None or self._velocities is not None:
                self._plain += call.arrays
            yield call

    def end_step(self, well: bool) -> bool:
        """Keeps what the step has changed, or nothing of it: the same on all ranks; says which."""
        self._packing.end_step(well)
        keep = well and all(bool(torch.isfinite(each).all()) for each in self._plain)
        if self.feedback is not None:
            keep = self.feedback.end_step(keep)
            self._put_back(keep)
        if self._velocities is not None:
            self._velocities.end_step(keep, self._sparse, self.feedback)
        return keep

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, by parameter name."""
        velocities = {} if self._velocities is None else self._velocities.kept
        return {
            "layout": self._packing.layout,
            "loss_scale": self._loss_scale.last,
            "learning_rates": list(self._learning_rate.last),
            "feedback": {} if self.feedback is None else _saved.to_tensors(self.feedback),
            "velocities": {name: each.clone() for name, each in velocities.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Raises InvalidArgument for residuals of another model, or without feedback."""
        self._check(saved)
        if self.feedback is not None:
            self.feedback.load_state_dict(_saved.to_arrays(saved["feedback"]))
        if self._velocities is not None:
            self._velocities.load(saved["velocities"])
        self._loss_scale.last = saved["loss_scale"]
        self._learning_rate.last = list(saved["learning_rates"])
        self._packing.resume(tuple(map(tuple, saved["layout"])), int(saved["steps"]))

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Those of another rank, in this one's units; raises InvalidArgument like the above."""
        self._check(saved)
        own, its = self._loss_scale.last, saved["loss_scale"]
        factor = own / its if own and its else 1
        for name, kept in saved["feedback"].items():
            assert self.feedback is not None  # checked
            self.feedback.add(name, kept["residual"].numpy() * factor)

    def _clipped(self, bucket: Parcel, is_last: bool) -> Sequence[Parcel]:
        if self._clipping is None:
            return [bucket]
        return self._clipping.put(bucket, is_last, self._loss_scale.last or 1)

    def _put_back(self, kept: bool) -> None:
        """What residuals delivered to parameters that no rank used: DDP drops it."""
        if self.unused is None or self.feedback is None or not kept:
            return
        for name in self.unused.of(self._keyed):
            self.feedback.add(name, self._keyed[name].numpy())

    def _check(self, saved: Mapping[str, Any]) -> None:
        sizes = {name: parameter.numel() for parameter, name in self._names.items()}
        _saved.check(saved["feedback"], sizes)
        if saved["feedback"] and self.feedback is None:
            raise InvalidArgument(
                "the state holds residuals, and this hook keeps none: register it with "
                "feedback=True"
            )

    def _parcel(self, bucket: dist.GradBucket) -> Parcel:
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            shapes = ", ".join(str(tuple(each.shape)) for each in bucket.parameters())
            raise InvalidArgument(
                f"bucket {bucket.index()} has sparse gradients, for parameters of shape {shapes}; "
                "gradwire averages dense ones: build the embedding with sparse=False"
            )
        if not self._names:
            return Parcel(buffer, (), ())
        parameters = bucket.parameters()
        unknown = [each for each in parameters if each not in self._names]
        if unknown:
            raise InvalidArgument(
                f"bucket {bucket.index()} has a parameter of shape {tuple(unknown[0].shape)} that "
                "is none of the model's named_parameters()"
            )
        return Parcel(buffer, [self._names[each] for each in parameters], bucket.gradients())

    def _calls(self, parcel: Parcel, step: int) -> Iterator[Call]:
        if parcel.buffer.dtype is not torch.float32:
            # A codec would have to convert twice or lose range.
            yield Call([parcel.buffer], "none")
            return
        if not parcel.names:
            yield Call([parcel.buffer], self._rules.default(step))
            return
        groups = parcel.groups(self._rules, step)
        if self.feedback is None and len(groups) == 1:
            yield Call([parcel.buffer], next(iter(groups)))
            return
        for codec, indices in groups.items():
            arrays = [parcel.gradients[i] for i in indices]
            keys = [(parcel.names[i], parcel.gradients[i].numel()) for i in indices]
            yield Call(arrays, codec, None if self.feedback is None else keys)
