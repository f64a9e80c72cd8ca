"""Momentum correction and factor masking (Lin et al. 2018, "Deep Gradient Compression", sec. 3).

A sparse codec delivers an element late. Were momentum applied after that, by the optimizer, the
steps that it missed would be lost to the velocity. So each rank keeps the velocity of its own
gradients, and sends that (Algorithm 3); and it forgets that of elements it has just sent, lest
they are pushed in a stale direction (sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gradwire._errors import InvalidArgument
from gradwire._feedback import ErrorFeedback
from gradwire.torch._step.packing import Parcel


@dataclass(frozen=True)
class Momentum:
    """Momentum in the hook; the optimizer's own must be 0.

    `masking` is factor masking, of parameters that travel with a sparse codec: of the elements of
    which nothing waits after a step. (`threshold` and half-width values of `topk` leave a rest.)
    """

    factor: float = 0.9
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.factor < 1:
            raise InvalidArgument(f"momentum factor={self.factor} is not from 0 to below 1")


class Velocities:
    """This rank's, by parameter; changed for good when the step is kept."""

    def __init__(self, momentum: Momentum, kept: dict[str, torch.Tensor]) -> None:
        """Goes on from `kept`, and keeps there what it has after each step."""
        self._momentum = momentum
        self.kept = kept
        self._next: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # memory of former ones, for the next

    def apply(self, parcel: Parcel) -> None:
        """Turns the gradients of a bucket into what is to be sent."""
        factor = self._momentum.factor
        for name, gradient in zip(parcel.names, parcel.gradients, strict=True):
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
        """Lets parameters without a gradient be as before the step; returns what they sent."""
        taken = {name: self._next.pop(name) for name in names if name in self._next}
        if self._momentum.nesterov:
            return {name: each * self._momentum.factor for name, each in taken.items()}
        return taken

    def end_step(self, keep: bool, sparse: Iterable[str], feedback: ErrorFeedback | None) -> None:
        """`sparse` are the parameters of which only some elements were sent."""
        if keep and self._momentum.masking and feedback is not None:
            for name in self._next.keys() & sparse:
                velocity = self._next[name].view(-1)
                masked = velocity.float()  # the same, unless it is bfloat16
                feedback._core.mask(name, masked.numpy())
                if masked is not velocity:
                    velocity.copy_(masked)
        if keep:
            former = {name: self.kept.get(name) for name in self._next}
            self.kept.update(self._next)
            self._spare = {name: each for name, each in former.items() if each is not None}
        else:
            self._spare = self._next
        self._next = {}

    def load(self, kept: Mapping[str, torch.Tensor]) -> None:
        """In place of what there was."""
        self.kept.clear()
        self.kept.update((name, each.clone()) for name, each in kept.items())

    def scale(self, factor: float) -> None:
        """For a changed loss scale."""
        for velocity in self.kept.values():
            velocity.mul_(factor)
