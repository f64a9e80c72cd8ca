"""OuterParameters: values of parameters that all ranks share, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.engine import round_into
from gradwire.torch.outer.checks import not_finite

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_KEPT = (torch.float32, torch.float64)


class OuterOptimizer(NamedTuple):
    """SGD with momentum as in torch.optim.SGD, and the same bits."""

    lr: float
    momentum: float
    nesterov: bool

    def step(
        self, value: torch.Tensor, gradient: torch.Tensor, velocity: torch.Tensor | None
    ) -> None:
        """Moves a value against its gradient, which it overwrites."""
        direction = gradient
        if velocity is not None:
            velocity.mul_(self.momentum).add_(gradient)
            direction = gradient.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        value.add_(direction, alpha=-self.lr)


class Piece(NamedTuple):
    """A parameter, or some of its rows, which are its parts along the first dimension."""

    parameter: torch.nn.Parameter
    rows: slice | None = None  # all

    @property
    def tensor(self) -> torch.Tensor:
        """A view of it."""
        whole = self.parameter.detach()
        return whole if self.rows is None else whole[self.rows]

    @property
    def real(self) -> torch.Tensor:
        """A view of it as real numbers, of any strides."""
        return torch.view_as_real(self.tensor) if self.tensor.is_complex() else self.tensor


class OuterParameters:
    """Some parameters of a model, or rows of them, with common values and their velocities.

    Values are float32, or float64 for parameters of that type. Complex ones are pairs of them.
    """

    def __init__(self, pieces: Mapping[str, Piece], optimizer: OuterOptimizer) -> None:
        """Takes the values of the parameters as they are."""
        self._pieces, self._optimizer = dict(pieces), optimizer
        self.values = {name: _values_of(each.real) for name, each in self._pieces.items()}
        self.velocities: dict[str, torch.Tensor] = {}
        if optimizer.momentum:
            self.velocities = {name: torch.zeros_like(each) for name, each in self.values.items()}

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Views of the parameters as they are now, as real numbers, by name."""
        return {name: each.real for name, each in self._pieces.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Values and velocities, all that ranks must have in common, by name."""
        return {
            **self.values,
            **{f"velocity of {name}": each for name, each in self.velocities.items()},
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Outer gradients: the values less what inner steps have made of them on this rank."""
        return {
            name: self._installed(name, parameter).sub_(parameter)
            for name, parameter in self.parameters.items()
        }

    def update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Makes an outer step with the gradients, which it overwrites."""
        for name, value in self.values.items():
            self._optimizer.step(value, gradients[name], self.velocities.get(name))

    def install(self, mix: float = 0.0) -> None:
        """Sets the parameters to the values, but for a share `mix` of what they were."""
        for name, target in self.parameters.items():
            value = self.values[name]
            if mix:
                value = torch.lerp(value, target.to(value.dtype), mix)
            round_into(target, value)

    def problem(self) -> str:
        """The parameters that have NaN or Inf on this rank, as a text; empty if none has."""
        return not_finite(self.parameters)

    def _installed(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """A copy of the value, rounded as the parameter was when it was set."""
        value = self.values[name]
        if target.dtype is value.dtype:
            return value.clone()
        rounded = torch.empty_like(value, dtype=target.dtype)
        round_into(rounded, value)
        return rounded.to(value.dtype)


def fragments_of(
    parameters: Mapping[str, torch.nn.Parameter], count: int
) -> list[dict[str, Piece]]:
    """Cuts the parameters, in their order, into parts of as many elements each, but for a row.

    A larger one would not be there in time over a link that has just the rate of the average. Names
    of cut parameters end in their rows.
    """
    starts = list(accumulate(map(rows, parameters.values()), initial=0))
    ends = list(accumulate((each.numel() for each in parameters.values()), initial=0))
    cuts = [0]
    for part in range(1, count):
        nearest = round(np.interp(ends[-1] * part / count, ends, starts))
        cuts.append(min(max(nearest, cuts[-1] + 1), starts[-1] - count + part))  # none is empty
    return [
        dict(_between(begin, end, starts, parameters))
        for begin, end in pairwise([*cuts, starts[-1]])
    ]


def rows(parameter: torch.Tensor) -> int:
    """Into how many rows a parameter can be cut."""
    return len(parameter) if parameter.dim() and parameter.numel() else 1


def _between(
    begin: int, end: int, starts: list[int], parameters: Mapping[str, torch.nn.Parameter]
) -> Iterator[tuple[str, Piece]]:
    """The parameters, or parts of them, in some of the model's rows."""
    for (start, after), (name, each) in zip(pairwise(starts), parameters.items(), strict=True):
        first, last = max(begin, start) - start, min(end, after) - start
        if first == 0 and last == after - start:
            yield name, Piece(each)
        elif first < last:
            yield f"{name}[{first}:{last}]", Piece(each, slice(first, last))


def require_supported(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises InvalidArgument for parameters that cannot be averaged."""
    for name, each in parameters.items():
        dtype = each.dtype.to_real() if each.is_complex() else each.dtype
        if hasattr(each, "full_tensor"):
            raise InvalidArgument(
                f"the parameter {name!r} is a DTensor, of which this rank has a part: make DiLoCo "
                "for a model that each rank has whole"
            )
        if dtype not in (*_WIDER, *_KEPT) or each.layout is not torch.strided:
            raise InvalidArgument(
                f"the parameter {name!r} is {each.dtype} ({each.layout}): DiLoCo averages dense "
                "float32, float64, float16, bfloat16 and complex parameters; freeze it"
            )


def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors, by name."""
    return {name: each.detach().clone() for name, each in tensors.items()}


def copy_into(
    own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], what: str
) -> None:
    """Copies tensors of the same names and shapes; raises InvalidArgument for others."""
    if own.keys() != given.keys():
        odd = sorted(own.keys() ^ given.keys())[0]
        where = "the state lacks" if odd in own else "only the state has"
        raise InvalidArgument(f"{where} {odd!r} of the {what}: give the same model and settings")
    for name, each in own.items():
        if each.shape != given[name].shape or each.dtype != given[name].dtype:
            raise InvalidArgument(
                f"the state's {what} {name!r}: {given[name].dtype} of shape "
                f"{tuple(given[name].shape)}; the model's: {each.dtype} of {tuple(each.shape)}"
            )
    for name, each in own.items():
        each.copy_(given[name])


def _values_of(real: torch.Tensor) -> torch.Tensor:
    dtype = _WIDER.get(real.dtype, real.dtype)
    return torch.empty_like(real, dtype=dtype, memory_format=torch.contiguous_format).copy_(real)
