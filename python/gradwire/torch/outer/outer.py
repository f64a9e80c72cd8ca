"""OuterParameters: values of parameters that all ranks share, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gradwire._errors import InvalidArgument
from gradwire.torch.exchange.engine import round_into

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


class OuterParameters:
    """Some parameters of a model, with the values that all ranks share, and their velocities.

    Values are float32, or float64 for parameters of that type. Complex ones are pairs of them.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizer: OuterOptimizer
    ) -> None:
        """Takes the values of the parameters as they are."""
        self.parameters, self._optimizer = dict(parameters), optimizer
        self.values = {name: _values_of(each) for name, each in self.parameters.items()}
        self.velocities: dict[str, torch.Tensor] = {}
        if optimizer.momentum:
            self.velocities = {name: torch.zeros_like(each) for name, each in self.values.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Values and velocities, all that ranks must have in common, by name."""
        return {
            **self.values,
            **{f"velocity of {name}": each for name, each in self.velocities.items()},
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Outer gradients: the values less what inner steps have made of them on this rank."""
        return {
            name: self._installed(name).sub_(_real(parameter))
            for name, parameter in self.parameters.items()
        }

    def update(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Makes an outer step with the gradients, which it overwrites."""
        for name, value in self.values.items():
            self._optimizer.step(value, gradients[name], self.velocities.get(name))

    def install(self, mix: float = 0.0) -> None:
        """Sets the parameters to the values, but for a share `mix` of what they were."""
        for name, parameter in self.parameters.items():
            value, target = self.values[name], _real(parameter)
            if mix:
                value = torch.lerp(value, target.to(value.dtype), mix)
            round_into(target, value)

    def problem(self) -> str:
        """The parameters that have NaN or Inf on this rank, as a text; empty if none has."""
        named = [
            repr(name) for name, each in self.parameters.items() if not torch.isfinite(each).all()
        ]
        if not named:
            return ""
        more = ", ..." if len(named) > 3 else ""
        return f"{', '.join(named[:3])}{more} had NaN or Inf after the inner steps"

    def _installed(self, name: str) -> torch.Tensor:
        """A copy of the value, rounded as the parameter was when it was set."""
        value, target = self.values[name], _real(self.parameters[name])
        if target.dtype is value.dtype:
            return value.clone()
        rounded = torch.empty_like(value, dtype=target.dtype)
        round_into(rounded, value)
        return rounded.to(value.dtype)


def fragments_of(
    parameters: Mapping[str, torch.nn.Parameter], count: int
) -> list[dict[str, torch.nn.Parameter]]:
    """Cuts the parameters, in their order, into parts of about as many elements each."""
    names, total = list(parameters), sum(each.numel() for each in parameters.values())
    parts: list[dict[str, torch.nn.Parameter]] = [{}]
    done = 0
    for i, name in enumerate(names):
        size, missing = parameters[name].numel(), count - len(parts)
        full = done + size / 2 > total * len(parts) / count
        if missing and parts[-1] and (full or len(names) - i == missing):
            parts.append({})
        parts[-1][name] = parameters[name]
        done += size
    return parts


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


def _real(parameter: torch.Tensor) -> torch.Tensor:
    """A view of the parameter as real numbers, of any strides."""
    detached = parameter.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def _values_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    real = _real(parameter)
    dtype = _WIDER.get(real.dtype, real.dtype)
    return torch.empty_like(real, dtype=dtype, memory_format=torch.contiguous_format).copy_(real)
