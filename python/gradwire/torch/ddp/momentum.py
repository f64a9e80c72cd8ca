"""Momentum correction and factor masking (Lin et al. 2018, "Deep Gradient Compression", sec. 3).

A sparse codec delivers an element late. If the optimizer applied momentum after that, the velocity
would miss the steps in between. So each rank keeps the velocity of its own gradients, and sends the
velocity (Algorithm 3). It clears the velocity of the elements that it has just sent, which would
push them in a stale direction (sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gradwire._base import arguments
from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch.ddp.clipping import scale_by
from gradwire.torch.exchange.rules import Bucket


@dataclass(frozen=True)
class Momentum:
    """Momentum in the hook; the optimizer's own must be 0."""

    factor: float
    nesterov: bool
    masking: bool


def momentum_of(momentum: float | None, nesterov: bool, factor_masking: bool) -> Momentum | None:
    """Checks what `register` was given; None without momentum. Raises InvalidArgument."""
    arguments.flag(nesterov, "nesterov")
    arguments.flag(factor_masking, "factor_masking")
    if momentum is None:
        if nesterov:
            raise InvalidArgument("nesterov=True needs a momentum=, such as 0.9")
        return None
    if not 0 <= arguments.number(momentum, "momentum") < 1:
        raise InvalidArgument(f"momentum={momentum} is not from 0 to below 1")
    return Momentum(momentum, nesterov, factor_masking)


class Velocities:
    """Velocities of this rank by parameter; a step's changes are final when the step is kept."""

    def __init__(self, momentum: Momentum, kept: dict[str, torch.Tensor]) -> None:
        """Starts from the velocities in `kept`, and stores those after each step there."""
        self._momentum = momentum
        self.kept = kept
        self._next: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # buffers of earlier velocities, for reuse

    def apply(self, bucket: Bucket) -> None:
        """Replaces the gradients of a bucket by the velocities to send."""
        factor = self._momentum.factor
        for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
            velocity = self._spare.pop(name, None)
            if velocity is None or velocity.shape != gradient.shape:
                velocity = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            if name in self.kept:
                torch.add(gradient, self.kept[name].view_as(gradient), alpha=factor, out=velocity)
            else:
                velocity.copy_(gradient)
            self._next[name] = velocity
            if self._momentum.nesterov:
                gradient.add_(velocity, alpha=factor)
            else:
                gradient.copy_(velocity)

    def take_back(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Undoes the step for parameters without a gradient; returns what was sent for them."""
        taken = {name: self._next.pop(name) for name in names if name in self._next}
        if self._momentum.nesterov:
            return {name: each * self._momentum.factor for name, each in taken.items()}
        return taken

    def on_gpu(self) -> torch.Tensor | None:
        """One of the step's velocities that are on a GPU; None without any."""
        return next((each for each in self._next.values() if each.is_cuda), None)

    def end_step(
        self,
        keep: bool,
        sparse: Iterable[str],
        feedback: ErrorFeedback | None,
        finite: torch.Tensor | None = None,
    ) -> None:
        """Ends a step; `sparse` are the parameters of which only some elements were sent.

        `finite` is on a GPU, where it says whether the step is kept, which the host does not know.
        """
        if keep and self._momentum.masking and feedback is not None:
            self._mask(sorted(self._next.keys() & sparse), feedback)
        if keep and finite is not None:
            for name, velocity in self._next.items():
                self._keep_if(finite, name, velocity)
        if keep:
            former = {name: self.kept.get(name) for name in self._next}
            self.kept.update(self._next)
            self._spare = {name: each for name, each in former.items() if each is not None}
        else:
            self._spare = self._next
        self._next = {}

    def _mask(self, names: list[str], feedback: ErrorFeedback) -> None:
        velocities = [self._next[name].view(-1) for name in names]
        masked = [each.float() for each in velocities]  # the same, unless they are bfloat16
        on_gpu = list[tuple[str, int, int]]()
        for name, each in zip(names, masked, strict=True):
            if each.is_cuda:
                on_gpu.append((name, each.data_ptr(), each.numel()))
            else:
                feedback._core.mask(name, each.numpy())
        if on_gpu:
            device = masked[0].device
            feedback._mask(on_gpu, torch.cuda.current_stream(device).cuda_stream)
        for velocity, each in zip(velocities, masked, strict=True):
            if each is not velocity:
                velocity.copy_(each)

    def _keep_if(self, finite: torch.Tensor, name: str, velocity: torch.Tensor) -> None:
        """Puts the former velocity in place of the new one unless the step is finite."""
        # Without one it is -0: x + factor · -0 is x, also for x = -0.
        before = self.kept.get(name)
        if before is None:
            before = torch.full_like(velocity, -0.0)
        torch.where(finite, velocity, before.view_as(velocity), out=velocity)

    def load(self, kept: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]) -> None:
        """Replaces all velocities by saved ones, on the devices of their parameters."""
        self.kept.clear()
        for name, each in kept.items():
            self.kept[name] = each.to(devices[name], copy=True)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies all velocities, when the loss scale changes by `factor`."""
        for velocity in self.kept.values():
            if isinstance(factor, torch.Tensor):
                scale_by(velocity, factor)
            else:
                velocity.mul_(factor)
