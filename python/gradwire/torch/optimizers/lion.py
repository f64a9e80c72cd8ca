"""DistributedLion: Lion whose ranks vote on the direction of each element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from gradwire._base.arguments import wrong
from gradwire.torch._ranks.ranks import RanksLike
from gradwire.torch.exchange.compression import CompressionLike, compression_of
from gradwire.torch.exchange.gradient_scale import Scaler
from gradwire.torch.optimizers import clipping
from gradwire.torch.optimizers.exchanging import ExchangingOptimizer


class DistributedLion(ExchangingOptimizer):
    """Lion whose ranks send the signs of their updates, and get back those of the majority::

        opt = gradwire.torch.DistributedLion(model.named_parameters(), lr=1e-4, weight_decay=0.1)

    Each rank has a momentum of its own gradients, and votes with the sign of what Lion would
    subtract (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2). All
    parameters move by `lr` where the majority points, so that they have the same bits on all ranks;
    an element with as many votes against as for does not move, or where such elements are few in a
    block of the codec, moves as if the vote was for it (Liu et al. 2024, "Communication Efficient
    Distributed Training with Distributed Lion", Algorithm 1). With ``vote="mean"`` it moves by the
    mean of the signs. With one rank both are Lion.

    It is used as `OneBitAdam`: `step` exchanges, the model is a plain module.
    """

    _local = "exp_avg"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        vote: Literal["majority", "mean"] = "majority",
        compression: CompressionLike = "onebit",
        algorithm: str = "direct",
        scaler: Scaler | None = None,
        ranks: RanksLike = None,
    ) -> None:
        """Gives all ranks rank 0's parameters; every rank calls it, before training.

        `lr` is usually 3 to 10 times less than with AdamW, and `weight_decay`, which is decoupled,
        as many times more. `betas` are the factors of the momentum in the vote and in the momentum
        itself.

        `compression` is how votes of -1, 0 and 1 travel. ``"onebit"`` is exact in ``"direct"``, in
        which one rank counts all votes of an element; other algorithms encode partial counts. A
        majority needs no votes that were lost, so ``feedback=None`` keeps none there. The other
        arguments are as in `OneBitAdam`.
        """
        if vote not in ("majority", "mean"):
            raise wrong(vote, "vote", "'majority' or 'mean'")
        self._by_majority = vote == "majority"
        given = compression_of(compression, warms_up=False)
        if self._by_majority and given.feedback is None:
            given = replace(given, feedback=False)
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            {"vote": vote},
            given,
            given.table,
            algorithm=algorithm,
            scaler=scaler,
            ranks=ranks,
        )

    def _step_with(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        votes = {}
        for name, parameter, group in self._trained():
            own = torch.mul(gradients[name], 1 - group["betas"][0])
            if parameter in self.state:
                own.add_(self.state[parameter]["exp_avg"], alpha=group["betas"][0])
            votes[name] = clipping.signs(own)
        averages = self._average(votes)
        if averages is None:
            return False
        for name, parameter, group in self._trained():
            if name not in averages:
                continue
            self._remember(parameter, gradients[name], group["betas"][1])
            lr = float(group["lr"])
            parameter.mul_(1 - lr * group["weight_decay"])
            moves = averages[name].sign_() if self._by_majority else averages[name]
            parameter.add_(moves, alpha=-lr)
        return True

    def _remember(self, parameter: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(gradient)
        state["exp_avg"].lerp_(gradient, 1 - factor)
