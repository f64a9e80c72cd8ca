"""Plans of `parallelize`: which layers are split, whether they can be, and which go together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._base.arguments import wrong
from gradwire._errors import InvalidArgument

DATA, MODEL = "data", "model"

# Modules that treat each element alone, so that they can work on some of the features.
_ELEMENTWISE = {
    nn.CELU,
    nn.Dropout,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
}


def require_plain(model: Any) -> None:
    """Raises InvalidArgument for what is no module, or is compiled or wrapped already."""
    if not isinstance(model, nn.Module):
        raise wrong(model, "model", "a torch.nn.Module")
    if isinstance(model, DistributedDataParallel):
        raise InvalidArgument("the model is a DistributedDataParallel: give its .module")
    for name, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled or isinstance(module, torch.jit.ScriptModule):
            what = f"{name!r}, a part of the model," if name else "the model"
            raise InvalidArgument(f"{what} is compiled: compile what parallelize() returns")


def checked_plan(model: nn.Module, plan: Any, size: int) -> list[str]:
    """The names of the layers that a plan splits, in the model's order; checks all of it."""
    if not isinstance(plan, Mapping):
        raise wrong(plan, "plan", "a dict of layers' names: {'classifier.0': 'model'}")
    modules = dict(model.named_modules())
    for name, kind in plan.items():
        if name not in modules:
            linear = [each for each, module in modules.items() if type(module) is nn.Linear]
            raise InvalidArgument(
                f"the plan names {name!r}, which is no module of the model: its linear layers are "
                f"{', '.join(linear) or 'none'}"
            )
        if kind not in (DATA, MODEL):
            raise InvalidArgument(f"the plan has {name!r}: {kind!r}: give 'data' or 'model'")
    split = [name for name in modules if plan.get(name) == MODEL]
    owners = owners_of(model)
    for name in split:
        _require_linear(name, modules[name])
        _require_own(name, modules[name], owners)
    _require_divisible(modules, split, pairs_of(model, split), size)
    return split


def is_splittable(name: str, module: nn.Module, owners: Mapping[nn.Parameter, list[str]]) -> bool:
    """Whether a plan may split the layer, whatever its sizes; `owners` are from `owners_of`."""
    try:
        _require_linear(name, module)
        _require_own(name, module, owners)
    except InvalidArgument:
        return False
    return True


def pairs_of(model: nn.Module, split: Iterable[str]) -> dict[str, str]:
    """The layers whose outputs stay split, and for each the layer that takes them so."""
    chosen, pairs = set(split), dict[str, str]()
    for path, module in model.named_modules():
        if type(module).forward is nn.Sequential.forward:
            pairs.update(_pairs_in(path, module, chosen))
    return pairs


def _pairs_in(path: str, sequence: nn.Module, split: Collection[str]) -> dict[str, str]:
    pairs, first = dict[str, str](), None
    for child, module in sequence._modules.items():
        name = f"{path}.{child}".lstrip(".")
        if name not in split:
            first = first if type(module) in _ELEMENTWISE else None
        elif first is None:
            first = name
        else:
            pairs[first] = name
            first = None
    return pairs


def _require_linear(name: str, module: nn.Module) -> None:
    if type(module) is not nn.Linear:
        inside = [
            f"{name}.{each}".lstrip(".")
            for each, part in module.named_modules()
            if type(part) is nn.Linear
        ]
        remedy = f"name linear layers in it: {', '.join(inside)}" if inside else "give 'data'"
        raise InvalidArgument(
            f"the plan splits {name!r}, a {type(module).__name__}, and only nn.Linear can be "
            f"split: {remedy}"
        )
    if type(module.weight) is not nn.Parameter:
        raise InvalidArgument(
            f"the plan splits {name!r}, whose weight is a {type(module.weight).__name__}: it is "
            "split or reparametrized already"
        )


def owners_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    return owners


def _require_own(name: str, module: nn.Module, owners: Mapping[nn.Parameter, list[str]]) -> None:
    for parameter in module.parameters():
        if len(owners[parameter]) > 1:
            raise InvalidArgument(
                f"the plan splits {name!r}, and {' and '.join(owners[parameter])} are one "
                "parameter: give 'data'"
            )


def _require_divisible(
    modules: Mapping[str, Any], split: Iterable[str], pairs: Mapping[str, str], size: int
) -> None:
    seconds = set(pairs.values())
    for name in split:
        features = "in_features" if name in seconds else "out_features"
        count = getattr(modules[name], features)
        if count % size:
            raise InvalidArgument(
                f"the plan splits {name!r}, whose {features}={count} cannot be divided by "
                f"{size} ranks: give 'data'"
            )
