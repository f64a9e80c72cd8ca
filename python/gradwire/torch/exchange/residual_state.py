"""ResidualState: residuals, and the scale that they follow, from one step to the next.

A step is a transaction. Its calls work on copies of residuals, and `end_step` keeps all of them or
none, alike on all ranks: a step with NaN or Inf, or one that failed, must not leave some parameters
ahead of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire._calls.requests import CodecLike
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback, Keys
from gradwire.torch.exchange import saved as saving
from gradwire.torch.exchange.gradient_scale import (
    GradientScale,
    Scaler,
    ScaleTracker,
    persistent_state_of,
)
from gradwire.torch.exchange.rules import (
    Bucket,
    Rules,
    codec_for_16_bits,
    compressible,
    is_at_least_16_bits,
    is_biased,
    is_exact,
)


class Call(NamedTuple):
    """One reduction: the arrays that it averages, and how."""

    arrays: Sequence[torch.Tensor]
    codec: CodecLike
    keys: Keys | None = None  # with feedback
    rounded: Sequence[torch.Tensor] = ()  # 16-bit gradients that the averages are rounded into


class ResidualState:
    """One model's residuals and scale; only whole steps change them."""

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        ranks: int,
        rules: Rules,
        feedback: ErrorFeedback | None,
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Takes keys of residuals by tensors of their shapes; `ranks` is the number of ranks."""
        self.feedback = feedback
        self._names, self._rules = names, rules
        self.scales = ScaleTracker(scaler, optimizer)
        self._persistent = persistent_state_of(feedback)
        self.paused = False  # steps that begin neither use nor change anything here
        self._ranks = ranks
        # Of the step under way:
        self._step = 0  # its number, by which rules choose codecs
        self._used: dict[str, int] = {}  # keys of its residuals, and their elements
        self._paused = False

    def change_rules(self, rules: Rules, feedback: ErrorFeedback | None) -> None:
        """Takes other rules between two steps; `feedback` counts where there are no residuals."""
        self._rules = rules
        if self.feedback is None and feedback is not None:
            known, self._persistent = self._persistent, persistent_state_of(feedback)
            vars(self._persistent).update(vars(known))
            self.feedback = feedback

    @property
    def names(self) -> Mapping[torch.Tensor, str]:
        """The names of the parameters."""
        return self._names

    @property
    def is_counted(self) -> bool:
        """Whether the step under way is one of the training: it is not paused."""
        return not self._paused

    def follow_ranks(self) -> None:
        """Lets residuals follow the number of ranks at once, so that a state saved now is right."""
        self._rescale(GradientScale(ranks=self._ranks))

    def open_step(self, step: int, scale: GradientScale) -> None:
        """Begins a step of this number; `scale` is that of its gradients, the same on all ranks.

        Raises InvalidArgument when residuals cannot follow it.
        """
        self._step, self._paused, self._used = step, self.paused, {}
        if not self._paused:
            if scale.loss_scale:
                self._fetch_scale()
            self._loss_scale = scale.loss_scale or 1.0
            if scale.loss_scale or scale.rates or scale.ranks:
                self._rescale(scale)
            if not scale.loss_scale and self.scales.followed:
                self._follow_on_gpu()
            if self.feedback is not None:
                self.feedback.begin_step()

    def calls(self, bucket: Bucket) -> Iterator[Call]:
        """The reductions of a bucket, in the same order on every rank."""
        for arrays, codec, keys in self._groups(bucket):
            call = Call(arrays, codec, keys)
            if arrays[0].dtype is not torch.float32:
                call = self._through_float32(call)
            if self._paused:
                codec = "none" if is_biased(call.codec) else call.codec
                yield call._replace(codec=codec, keys=None)
                continue
            self._note(call)
            self._used.update(call.keys or ())
            yield call

    def end_step(self, ok: bool) -> bool:
        """Keeps all changes of the step or none, alike on all ranks; returns whether it did."""
        if self._paused:
            return False
        if self.feedback is None:
            return ok
        kept = self.feedback.end_step(ok)
        if kept and self._persistent.decay != 1:
            self._let_decay(self.feedback)
        return kept

    def remove_hooks(self) -> None:
        """Removes hooks on parameters, which outlive this state; no step begins any more."""

    def state_dict(self) -> dict[str, Any]:
        """Everything to save, as tensors and plain values by key."""
        self._fetch_scale()
        return {
            "layout": (),
            "loss_scale": self._persistent.scale.loss_scale or None,
            "learning_rates": list(self._persistent.scale.rates),
            "feedback": {} if self.feedback is None else saving.to_tensors(self.feedback),
            "velocities": {},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replaces everything by a saved state.

        Raises InvalidArgument for another model's, and for residuals that this hook does not keep.
        """
        self._check(saved)
        if self.feedback is not None:
            self.feedback.load_state_dict(saving.to_arrays(saved["feedback"]))
        self._persistent.scale, self._persistent.on_gpu = saving.scale_of(saved), None
        self.follow_ranks()

    def add_residuals(self, saved: Mapping[str, Any]) -> None:
        """Adds another rank's residuals, in this rank's scale; raises like `load_state_dict`."""
        self._check(saved)
        self._fetch_scale()
        its = saving.scale_of(saved)
        own = self._persistent.scale.or_else(its)
        factor = its.loss_factor(own) * its.rate_factor(own) * its.share_factor(own)
        for name, kept in saved["feedback"].items():
            assert self.feedback is not None  # checked
            self.feedback.add(name, kept["residual"].float().numpy() * factor)
        self._persistent.scale = own

    def _note(self, call: Call) -> None:
        """Takes note of a call of the step under way."""

    def _let_decay(self, feedback: ErrorFeedback) -> None:
        """Multiplies the residuals that the step has used; others wait for their own steps."""
        decay = self._persistent.decay
        if self._used.keys() == feedback.keys().keys():
            feedback.scale(decay)
            return
        for name, elements in self._used.items():
            if len(feedback.residual(name)):
                feedback.multiply(name, np.full(elements, decay, np.float32))

    def _follow_on_gpu(self) -> None:
        """Lets residuals follow a loss scale on a GPU, where only that GPU knows it from now on."""
        scale, persistent = self.scales.on_gpu(), self._persistent
        if scale is None:
            return
        last = persistent.scale.loss_scale
        self._follow(scale, last or persistent.on_gpu)
        if self.feedback is not None:
            stream = torch.cuda.current_stream(scale.device).cuda_stream
            self.feedback._follow(scale.device.index, scale.data_ptr(), stream, last)
        persistent.on_gpu = scale.clone()
        persistent.scale = dataclasses.replace(persistent.scale, loss_scale=0.0)

    def _follow(self, scale: torch.Tensor, before: float | torch.Tensor | None) -> None:
        """Takes the loss scale on a GPU of the step that begins, and what it was before."""

    def _fetch_scale(self) -> None:
        """Fetches the loss scale of the residuals from a GPU, where only that knows it."""
        persistent = self._persistent
        if persistent.on_gpu is not None and not persistent.scale.loss_scale:
            last = float(persistent.on_gpu)
            persistent.scale = dataclasses.replace(persistent.scale, loss_scale=last)
        persistent.on_gpu = None

    def _rescale(self, scale: GradientScale) -> None:
        before = self._persistent.scale
        factor = before.loss_factor(scale) * before.rate_factor(scale) * before.share_factor(scale)
        if self.feedback is not None and factor != 1:
            self.feedback.scale(factor)
        self._persistent.scale = scale.or_else(before)

    def _check(self, saved: Mapping[str, Any]) -> None:
        saving.check(saved["feedback"], self._names)
        if saved["feedback"] and self.feedback is None:
            raise InvalidArgument(
                "the state holds residuals, and this hook keeps none: register it with "
                "feedback=True"
            )

    def _groups(
        self, bucket: Bucket
    ) -> Iterable[tuple[Sequence[torch.Tensor], CodecLike, Keys | None]]:
        """The arrays of a bucket that travel together, their codec, and keys with feedback."""
        if not compressible(bucket.whole[0]):
            return [(bucket.whole, "none", None)]
        if not bucket.names:
            return [(bucket.whole, self._rules.default(self._step), None)]
        groups = self._rules.groups(bucket.names, bucket.gradients, self._step)
        if self.feedback is None and len(groups) == 1:
            return [(bucket.whole, groups[0][0], None)]
        return [
            (
                [bucket.gradients[i] for i in indices],
                codec,
                None
                if self.feedback is None
                else [(bucket.names[i], bucket.gradients[i].numel()) for i in indices],
            )
            for codec, indices in groups
        ]

    def _through_float32(self, call: Call) -> Call:
        """The call with 16-bit gradients as float32, for codecs with fewer bits and feedback."""
        dtype, codec = call.arrays[0].dtype, call.codec
        if is_at_least_16_bits(codec):
            if call.keys is None:
                return call if is_exact(codec) else call._replace(codec="none")
            if self._rules.compresses:
                codec = codec_for_16_bits(dtype, self._ranks)
        return Call([each.float() for each in call.arrays], codec, call.keys, call.arrays)
