"""DeMo: momentum that stays on its rank, but for its fast components."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from gradwire._base.arguments import number, whole
from gradwire._errors import Error, InvalidArgument
from gradwire.torch._ranks.ranks import RanksLike
from gradwire.torch._ranks.settings import require_algorithm
from gradwire.torch.exchange.gradient_scale import Scaler
from gradwire.torch.optimizers.dct import Tiles
from gradwire.torch.optimizers.replicated import ReplicatedOptimizer

_MOST = 128  # on a side of a tile, whose places are sent as 16-bit integers


class DeMo(ReplicatedOptimizer):
    """Decoupled momentum: ranks send the largest components of their momenta, and keep the rest::

        opt = gradwire.torch.DeMo(model.named_parameters(), lr=1e-3)

    A rank's momentum is multiplied by `decay` and gets its gradient. It is cut into tiles of about
    `chunk` by `chunk` elements (vectors into runs of `chunk`), and of the discrete cosine transform
    of each the `top_k` largest components are taken out of it and sent to all ranks. Parameters
    move by `lr` along the sign of what all ranks have sent (Peng et al. 2024, "DeMo: Decoupled
    Momentum Optimization", Algorithm 1): of each component the mean over the ranks that have sent
    it, as in the authors' program. What is not sent stays in the momentum, which thus is the
    residual of an error feedback that forgets slowly.

    It is used as `OneBitAdam`: `step` exchanges, the model is a plain module. Each component takes
    6 bytes, a tile of 64 by 64 elements ``6 * top_k``; a rank sends them to each of the others, so
    that bytes grow with the number of ranks.

    Parameters have the same bits on all ranks if these have the same kind of processor and the same
    number of threads, on which the rounding of matrix products depends; `check_agreement` tells.
    """

    _local = "momentum"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        decay: float = 0.999,
        top_k: int = 32,
        chunk: int = 64,
        weight_decay: float = 0.0,
        algorithm: str = "auto",
        scaler: Scaler | None = None,
        ranks: RanksLike = None,
    ) -> None:
        """Gives all ranks rank 0's parameters; every rank calls it, before training.

        `lr` is about that of Lion or of sign descent: each element moves by it in each step.
        `weight_decay` is decoupled. Groups may have `lr`, `decay` and `weight_decay` of their own.
        `algorithm` is as in `Communicator.all_gather`. The other arguments are as in `OneBitAdam`.
        """
        self._top_k = whole(top_k, "top_k", least=1)
        self._chunk = whole(chunk, "chunk", least=2)
        if self._chunk > _MOST:
            raise InvalidArgument(f"chunk={chunk} is more than {_MOST}")
        self._algorithm = algorithm
        super().__init__(
            params,
            {"lr": lr, "decay": decay, "weight_decay": weight_decay},
            {"top_k": top_k, "chunk": chunk},
            scaler=scaler,
            ranks=ranks,
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        if not 0 <= number(group["decay"], "decay") <= 1:
            raise InvalidArgument(f"decay={group['decay']} is not from 0 to 1")

    def _joined(self) -> None:
        require_algorithm(self._algorithm, None, self.communicator, "all_gather")

    def _step_with(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        parts = [
            self._extract(name, parameter, gradients[name], group)
            for name, parameter, group in self._trained()
            if parameter.numel()
        ]
        if not parts:  # all are frozen, or of no elements
            return True
        flags = [float(each.name not in self._without_gradient) for each in parts]
        own = [each.values for each in parts]
        values = self._gather([*own, own[0].new_tensor(flags)])
        places = self._gather([each.places for each in parts])
        if not bool(torch.isfinite(values).all()):
            return False
        sizes = [each.values.numel() for each in parts]
        *columns, has_gradient = values.split([*sizes, len(parts)], 1)
        moved = has_gradient.any(0).tolist()
        rows = zip(parts, columns, places.split(sizes, 1), moved, strict=True)
        for part, its_values, its_places, moves in rows:
            if not moves:
                continue
            move = part.tiles.restore(part.mean(its_values, its_places)).sign_()
            lr = float(part.group["lr"])
            part.parameter.mul_(1 - lr * part.group["weight_decay"]).add_(move, alpha=-lr)
            self.state[part.parameter][self._local] = part.rest()
        return True

    def _extract(
        self, name: str, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> _Part:
        """The next momentum of a parameter, and its largest components."""
        momentum = gradient
        if parameter in self.state:
            momentum = torch.add(gradient, self.state[parameter][self._local], alpha=group["decay"])
        tiles = Tiles(parameter.shape, self._chunk)
        coefficients = tiles.transform(momentum)
        places = coefficients.abs().topk(min(self._top_k, tiles.elements), sorted=False).indices
        values = coefficients.gather(1, places)
        return _Part(name, parameter, group, tiles, momentum, values, places)

    def _gather(self, own: list[torch.Tensor]) -> torch.Tensor:
        """All ranks' tensors: one row for each rank."""
        flat = torch.cat([each.view(-1) for each in own])
        every = self.communicator.all_gather(flat, algorithm=self._algorithm)
        found: torch.Tensor = every.view(self.communicator.size, -1)
        return found


class _Part(NamedTuple):
    """One parameter's share of a step."""

    name: str
    parameter: torch.Tensor
    group: dict[str, Any]
    tiles: Tiles
    momentum: torch.Tensor  # with what is sent
    values: torch.Tensor  # by tile
    own_places: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """The places of the values in their tiles, as they travel."""
        return self.own_places.to(torch.int16)

    def mean(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The components, each the mean over the ranks that have sent one other than 0.

        They are added up in the ranks' order.
        """
        elements = self.tiles.elements
        total = values.new_zeros(self.tiles.count, elements)
        senders = torch.zeros_like(total)
        for its, where in zip(values, places, strict=True):
            index = where.view(self.tiles.count, -1).long()
            if not bool(((index >= 0) & (index < elements)).all()):
                raise Error(f"a rank has sent a component that is beyond the {elements} of a tile")
            sent = its.view(self.tiles.count, -1)
            total.scatter_add_(1, index, sent)
            senders.scatter_add_(1, index, sent.ne(0).to(total.dtype))
        return total.div_(senders.clamp_(min=1))

    def rest(self) -> torch.Tensor:
        """The momentum without what was sent."""
        sent = self.values.new_zeros(self.tiles.count, self.tiles.elements)
        sent.scatter_(1, self.own_places, self.values)
        return self.momentum - self.tiles.restore(sent)
