"""OneBitAdam: AdamW whose momenta travel compressed, once its second moments are frozen."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradwire._base.arguments import number, whole
from gradwire._errors import InvalidArgument
from gradwire.torch._ranks.ranks import RanksLike
from gradwire.torch.exchange.compression import CompressionLike, compression_of
from gradwire.torch.exchange.gradient_scale import Scaler
from gradwire.torch.exchange.rules import CodecChoice
from gradwire.torch.optimizers import clipping
from gradwire.torch.optimizers.exchanging import ExchangingOptimizer
from gradwire.torch.optimizers.warm_up_rules import WarmUpRules

_log = logging.getLogger("gradwire")

# The least that a frozen denominator may be, as a share of its parameter's root mean square.
_FLOOR = 0.1


class OneBitAdam(ExchangingOptimizer):
    """AdamW that sends one bit of each element, and trains as AdamW does::

        opt = gradwire.torch.OneBitAdam(model.named_parameters(), lr=1e-3, warm_up=steps * 3 // 10)
        for inputs, labels in batches:
            loss(model(inputs), labels).backward()
            opt.step()
            opt.zero_grad()

    It is for transformers. On a CNN (0.2 M parameters, Fashion-MNIST, 300 steps, a learning rate of
    0.008, ``warm_up`` 29 % of the steps) it ended 3.3 % above AdamW's loss, and with
    ``compression="int8"`` 0.5 %: give CNNs int8, or SGD and `register`.

    `step` exchanges, so the model is a plain module: do not wrap it in DistributedDataParallel.
    Accumulation is several backwards before a `step`. After each step the parameters have the same
    bits on all ranks.

    Adam's second moment is not linear in the gradient, so error feedback in front of it does not
    make good what a codec loses. Therefore the first `warm_up` steps are those of
    torch.optim.AdamW, of gradients averaged in `warm_up_codec`. Then the second moment is frozen,
    and the step is linear: each rank adds its gradient to the common momentum, and the sums travel
    in `codec` with error feedback. Their average, as it was delivered, is the momentum that all
    ranks go on with (Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training
    with Adam's Convergence Speed", Algorithm 1). The codec compresses on both ways of a schedule,
    as there on the server's.

    Other than there, both moments have Adam's bias correction, the second one the one that it had
    when it was frozen; so the first step after the warm-up is as long as the last one before it.
    And what travels is the momentum divided by the frozen root of the second moment, so that the
    elements of a block, of which a codec sends a mean, are of one size. That divisor is at least
    a tenth of its root mean square over the parameter, and what a gradient adds is at most
    ``sqrt(1 / (1 - betas[1]))``, as in Adam: else an element whose gradients begin after the
    warm-up, such as a rare word's, would move by any length.
    """

    _local = "own_avg"  # this rank's momentum between exchanges

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        warm_up: int,
        compression: CompressionLike = "onebit",
        warm_up_codec: CodecChoice = "int8",
        every: int = 1,
        clip_norm: float | None = None,
        algorithm: str = "auto",
        scaler: Scaler | None = None,
        ranks: RanksLike = None,
    ) -> None:
        """Gives all ranks rank 0's parameters; every rank calls it, before training.

        `params` are ``model.named_parameters()``, or groups with options of their own, ``{"params":
        [(name, parameter), ...], "lr": 1e-4}``; parameters without names are called "group.index".
        They are float32. Frozen ones take no part while they are. `lr`, `betas`, `eps` and
        `weight_decay` (decoupled) are as in torch.optim.AdamW; schedulers may change `lr`, alike on
        all ranks.

        `warm_up` is in steps, 20 to 30 % of the training, and longer than the learning rate's own
        warm-up. It counts by parameter: one that is thawed or added later has its own.
        `warm_up_codec` should be close to lossless: "none", "bf16", "int8". `compression` is that
        of momenta, a codec or a `Compression` without `warm_up`; its rules hold after the warm-up.
        A function of the step (`Stages`) gets the number of steps made. `algorithm` is as in
        `Communicator.all_reduce`.

        With `every` above 1, momenta travel only at every so many steps after the warm-up, those
        with `steps` a multiple of it. In the steps between, each rank moves by its own momentum, so
        that parameters differ between ranks. Then the ranks' moves since the last exchange are
        averaged, divided by their length, and this is the momentum that all go on with (Lu et al.
        2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", Algorithm
        1). The other steps exchange a byte for each parameter, which tells of NaN.

        `clip_norm` limits the norm of the averaged gradient, all parameters together, as
        torch.nn.utils.clip_grad_norm_ does under DDP. After the warm-up there is no such average:
        then each rank's own gradient is clipped, to ``clip_norm * sqrt(ranks)``, which is the norm
        that independent gradients have whose average has `clip_norm`.

        `scaler` is the GradScaler of the loss, if there is one; ``scaler.step(opt)`` and
        ``scaler.unscale_(opt)`` are as usual. `ranks` are torch's default group if None; see
        `Ranks`. Raises RendezvousError, and InvalidArgument, on all ranks for settings or
        parameters that differ between ranks.
        """
        self._warm_up = whole(warm_up, "warm_up", least=1)
        self._every = whole(every, "every", least=1)
        self._clip_norm = None if clip_norm is None else clipping.require_norm(clip_norm)
        given = compression_of(compression, warms_up=False)
        self._choices = WarmUpRules(given, warm_up_codec)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            {"warm_up": warm_up, "every": every, "clip_norm": clip_norm},
            given,
            self._choices,
            algorithm=algorithm,
            scaler=scaler,
            ranks=ranks,
        )
        self._warn_of_convolutions()

    def _warn_of_convolutions(self) -> None:
        """A vision transformer has one, which cuts patches; a network of several loses accuracy."""
        kernels = [name for name, each, _ in self._trained() if each.dim() > 3]
        codec = self._choices.biased(self._warm_up)
        if len(kernels) > 1 and codec is not None and self.communicator.rank == 0:
            _log.warning(
                "OneBitAdam: %d parameters, such as %s, are kernels of convolutions; a CNN ended "
                '3.3 %% above AdamW\'s loss, and with compression="int8" 0.5 %%',
                len(kernels),
                kernels[0],
            )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if not 0 <= number(group["eps"], "eps") < math.inf:
            raise InvalidArgument(f"eps={group['eps']} is negative, or no number")

    def _step_with(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        trained = list(self._trained())
        for name, parameter, group in trained:
            self._freeze_if_due(name, parameter, group)
        frozen = {name for name, each, _ in trained if "denominator" in self.state.get(each, ())}
        self._choices.warming = frozenset(gradients.keys() - frozen)
        factor = self._own_factor([gradients[name] for name in sorted(frozen)])
        exchanges = (self.steps + 1) % self._every == 0
        if exchanges:  # what has moved alone becomes the same on all ranks, gradient or not
            apart = {name for name, each, _ in trained if "anchor" in self.state.get(each, ())}
            self._without_gradient -= apart
        sent: dict[str, torch.Tensor] = {}
        waiting: dict[str, torch.Tensor] = {}
        for name, parameter, group in trained:
            if name not in frozen:
                sent[name] = gradients[name].clone()
                continue
            own = self._momentum(self.state[parameter], gradients[name], factor, group)
            if exchanges:
                sent[name] = self._mean_momentum(parameter, own, group)
            else:
                waiting[name] = own
        found = self._average(sent, self._clip, waiting)
        if found is None:
            return False
        for name, parameter, group in trained:
            if name not in found:
                continue
            if name in waiting:
                self._move_alone(parameter, found[name], group)
            else:
                move = self._move if name in frozen else self._move_as_adamw
                move(parameter, found[name], group)
        return True

    def _freeze_if_due(self, name: str, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """Ends a parameter's warm-up; from here on its momentum is a preconditioned one.

        A parameter that has not had any gradient stays in its warm-up. The residual holds gradients
        that were not delivered, and becomes what they would have added to the momentum.
        """
        state = self.state.get(parameter)
        if not state or "denominator" in state or state["step"] < self._warm_up:
            return
        if not state["exp_avg_sq"].any():
            return
        beta1, beta2 = group["betas"]
        root = state.pop("exp_avg_sq").sqrt_().div_(math.sqrt(1 - beta2 ** state["step"].item()))
        least = _FLOOR * root.square().mean().sqrt()
        state["denominator"] = root.clamp_(min=least.item()).add_(group["eps"])
        state["exp_avg"] = state["exp_avg"] / state["denominator"]
        self._exchange.scale_residual(name, (1 - beta1) / state["denominator"])

    def _momentum(
        self, state: Mapping[str, Any], gradient: torch.Tensor, factor: float, group: dict[str, Any]
    ) -> torch.Tensor:
        """Returns this rank's next momentum, preconditioned, in a new tensor."""
        beta1, beta2 = group["betas"]
        own = gradient / state["denominator"]
        if factor != 1:
            own.mul_(factor)
        before = state.get(self._local, state["exp_avg"])
        return clipping.clamp(own, (1 - beta2) ** -0.5).lerp_(before, beta1)

    def _mean_momentum(
        self, parameter: torch.Tensor, own: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        """The mean of this rank's momenta since the last exchange, by the lengths of the moves."""
        state = self.state[parameter]
        left, length = self._step_sizes(state, group)
        total = length + float(state.get("length", 0))
        if "anchor" not in state or total == 0:
            return own
        moved = torch.mul(state["anchor"], float(state["left"])).sub_(parameter).mul_(left)
        return moved.add_(own, alpha=length).div_(total)

    def _move_alone(
        self, parameter: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Makes a step along this rank's momentum."""
        state = self.state[parameter]
        if "anchor" not in state:
            anchor = parameter.detach().clone()
            state.update(anchor=anchor, left=_scalar(1.0), length=_scalar(0.0))
        left, length = self._step_sizes(state, group)
        state["step"] += 1
        state["left"] *= left
        state["length"] += length
        state[self._local] = momentum
        parameter.mul_(left).add_(momentum, alpha=-length)

    def _move(self, parameter: torch.Tensor, momentum: torch.Tensor, group: dict[str, Any]) -> None:
        """Makes a step along the averaged momentum, which is kept.

        It takes the place of what this rank's momenta were since the last exchange.
        """
        state = self.state[parameter]
        left, length = self._step_sizes(state, group)
        state["step"] += 1
        if "anchor" in state:
            parameter.copy_(state.pop("anchor")).mul_(float(state.pop("left")))
            length += float(state.pop("length"))
            del state[self._local]
        state["exp_avg"] = momentum
        parameter.mul_(left).add_(momentum, alpha=-length)

    def _step_sizes(self, state: Mapping[str, Any], group: dict[str, Any]) -> tuple[float, float]:
        """Returns what is left of a parameter, and how far it moves along its momentum."""
        lr, steps = float(group["lr"]), state["step"].item() + 1
        return 1 - lr * group["weight_decay"], lr / (1 - group["betas"][0] ** steps)

    def _take_over(self, root: int) -> None:
        """Gives all ranks the root's state; momenta of their own end where its have."""
        super()._take_over(root)
        for state in self.state.values():
            if "anchor" not in state:
                state.pop(self._local, None)

    def _common(self) -> dict[str, torch.Tensor]:
        """All tensors that are the same on all ranks: parameters as the last exchange left them."""
        found = super()._common()
        for parameter, name in self._names.items():
            if "anchor" in self.state.get(parameter, ()):
                found[name] = self.state[parameter]["anchor"]
        return found

    def _move_as_adamw(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Makes torch.optim.AdamW's step, with the same operations in the same order."""
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(gradient)
            state.update(step=_scalar(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
        state["step"] += 1
        step, lr, (beta1, beta2) = state["step"].item(), float(group["lr"]), group["betas"]
        parameter.mul_(1 - lr * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction = (1 - beta2**step) ** 0.5
        denominator = (state["exp_avg_sq"].sqrt() / correction).add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-(lr / (1 - beta1**step)))

    def _own_factor(self, gradients: Sequence[torch.Tensor]) -> float:
        """The factor that clips this rank's own gradients."""
        if self._clip_norm is None or not gradients:
            return 1.0
        limit = self._clip_norm * math.sqrt(self.communicator.size)
        return clipping.factor(clipping.norm(gradients), limit)

    def _clip(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Clips averaged gradients of parameters in their warm-up.

        On all ranks by rank 0's norm: others may round its last bit in another way.
        """
        gradients = [each for name, each in averages.items() if name in self._choices.warming]
        if self._clip_norm is None or not gradients:
            return
        norm = np.array([clipping.norm(gradients)])
        self.communicator.broadcast(norm)
        factor = clipping.factor(float(norm[0]), self._clip_norm)
        if factor != 1:
            torch._foreach_mul_(gradients, factor)


def _scalar(value: float) -> torch.Tensor:
    """A number of an optimizer's state, which torch keeps as tensors on the CPU."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")
