"""The parameters of an optimizer's groups: names, checks, gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire._base.arguments import number, wrong
from gradwire._errors import InvalidArgument

Groups = Sequence[Mapping[str, Any]]


def names(groups: Groups) -> dict[torch.Tensor, str]:
    """The name of each parameter: as given, or "group.index"; raises InvalidArgument.

    Refuses two of one name, and parameters that are not dense float32.
    """
    found: dict[torch.Tensor, str] = {}
    known = set()
    for position, group in enumerate(groups):
        given = group.get("param_names") or [f"{position}.{i}" for i in range(len(group["params"]))]
        for name, each in zip(given, group["params"], strict=True):
            if name in known:
                raise InvalidArgument(
                    f"two parameters have the name {name!r}: give those of several models names "
                    "of their own, [('a.' + name, each) for name, each in a.named_parameters()]"
                )
            _require_supported(name, each)
            known.add(name)
            found[each] = name
    return found


def options(groups: Groups) -> list[dict[str, Any]]:
    """The groups' options and numbers of parameters."""
    return [
        {key: each for key, each in group.items() if key not in ("params", "param_names")}
        | {"params": len(group["params"])}
        for group in groups
    ]


def require_rates(lr: Any, betas: Any, weight_decay: Any) -> None:
    """Raises InvalidArgument for a rate, a pair of momentum factors or a decay that cannot be."""
    if not (isinstance(lr, torch.Tensor) or 0 <= number(lr, "lr") < math.inf):
        raise InvalidArgument(f"lr={lr} is negative, or no number")
    if not (isinstance(betas, tuple | list) and len(betas) == 2):
        raise wrong(betas, "betas", "a pair of numbers from 0 to below 1")
    if not all(0 <= number(each, "betas") < 1 for each in betas):
        raise InvalidArgument(f"betas={betas} are not from 0 to below 1")
    if not 0 <= number(weight_decay, "weight_decay") < math.inf:
        raise InvalidArgument(f"weight_decay={weight_decay} is negative, or no number")


def gradients(
    groups: Groups, names: Mapping[torch.Tensor, str], factor: float = 1.0
) -> dict[str, torch.Tensor]:
    """Dense gradients times a factor, by name; zeros where there is none.

    They are those of parameters that require one, and may be the parameters' own ``grad``.
    """
    found = {}
    for group in groups:
        for each in group["params"]:
            if each.requires_grad:
                found[names[each]] = _gradient(each, factor)
    return found


def poison(gradients: dict[str, torch.Tensor]) -> None:
    """Makes this rank's gradients NaN, so that no rank makes the step."""
    for name, each in gradients.items():
        gradients[name] = torch.full_like(each, torch.nan)


def require_fitting(
    saved: Mapping[str, Any], groups: Groups, names: Mapping[torch.Tensor, str]
) -> None:
    """Raises InvalidArgument for a saved state of other parameters."""
    its, own = (
        [len(group["params"]) for group in each] for each in (saved["param_groups"], groups)
    )
    if its != own:
        raise InvalidArgument(f"the state has groups of {its} parameters, the optimizer of {own}")
    known = set(names.values())
    for name in saved["velocities"]:
        if name not in known:
            raise InvalidArgument(f"the state has a momentum of {name!r}, the optimizer has none")
    for place, (parameter, name) in enumerate(names.items()):
        tensors = dict(saved["state"].get(place, {}), velocity=saved["velocities"].get(name))
        for key, each in tensors.items():
            odd = isinstance(each, torch.Tensor) and each.shape not in (parameter.shape, ())
            if odd:
                raise InvalidArgument(
                    f"the state's {key} of {name!r} has shape {tuple(each.shape)}, the parameter "
                    f"{tuple(parameter.shape)}"
                )


def misfit(error: Exception) -> InvalidArgument:
    """The error for a value that is no saved state."""
    return InvalidArgument(
        f"the state is not that of this optimizer ({type(error).__name__}: {error}): give what "
        "its state_dict() returned, with the same parameter groups"
    )


def _require_supported(name: str, parameter: torch.Tensor) -> None:
    if hasattr(parameter, "full_tensor"):
        raise InvalidArgument(
            f"the parameter {name!r} is a DTensor, of which this rank has a part: give parameters "
            "that each rank has whole"
        )
    if parameter.dtype is not torch.float32 or parameter.layout is not torch.strided:
        raise InvalidArgument(
            f"the parameter {name!r} is {parameter.dtype} ({parameter.layout}): keep the model in "
            "dense float32, and use autocast for computing in 16 bits"
        )


def _gradient(parameter: torch.Tensor, factor: float) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return (gradient if factor == 1 else gradient * factor).contiguous()
