"""Layers of a torch module, found by a forward pass on the meta device, which computes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradwire._errors import InvalidArgument
from gradwire.lab.planner.tables.network import CONV, EMBEDDING, LINEAR, OTHER, Layer, Network

_DEFAULT_DTYPE = "float32"
_BATCH = 2  # samples: batch normalization refuses a single one of 1 × 1


def walk(path: str, sample: str | Sequence[str] | None) -> Network:
    """Walks what `module:callable` returns, with one sample of the given shape.

    `sample` is "3,224,224" or "1024:int64", without the batch, or such a text for each input.
    Raises InvalidArgument where the module cannot be made or walked, with its own error.
    """
    texts = [sample] if isinstance(sample, str) else list(sample or ())
    if not texts:
        raise InvalidArgument(f"{path} is walked with a sample: give its shape, as 3,224,224")
    torch = _torch()
    try:
        with torch.device("meta"):
            module = _make(path)
            if not isinstance(module, torch.nn.Module):
                raise InvalidArgument(f"{path} returns a {type(module).__name__}, no nn.Module")
            layers = layers_of(module, *(_sample(torch, each) for each in texts))
    except InvalidArgument:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        text = " ".join(str(error).split())[:200]
        raise InvalidArgument(
            f"{path} cannot be walked with a sample of {' and '.join(texts)}: "
            f"{type(error).__name__}: {text}"
        ) from error
    what = "a tensor" if len(texts) == 1 else "tensors"
    return Network(path, f"{what} of {' and '.join(texts)}", tuple(layers))


def layers_of(module: Any, *inputs: Any) -> list[Layer]:
    """The layers that have parameters of their own, in the order in which the forward runs them."""
    owners: dict[int, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found: dict[str, Layer] = {}
    counted: set[int] = set()

    def note(name: str) -> Any:
        def hook(each: Any, inputs: Any, output: Any) -> None:
            layer = _layer(name, each, inputs, output, counted, owners)
            found[name] = _sum(found[name], layer) if name in found else layer

        return hook

    handles = [
        each.register_forward_hook(note(name))
        for name, each in module.named_modules()
        if any(True for _ in each.parameters(recurse=False))
    ]
    try:
        module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise InvalidArgument("the module has no parameters, or its forward uses none")
    return _with_unseen(module, found, counted, owners)


def _with_unseen(
    module: Any, found: dict[str, Layer], counted: set[int], owners: dict[int, int]
) -> list[Layer]:
    """Adds modules whose parameters another one uses, after it: attention uses its out_proj."""
    layers = dict(found)
    for name, each in module.named_modules():
        own = list(each.parameters(recurse=False))
        if name in found or all(id(parameter) in counted for parameter in own):
            continue
        user = layers.get(name.rpartition(".")[0])
        parts = list(layers.values())
        at = parts.index(user) + 1 if user else len(parts)
        outputs = user.outputs if user else 0
        parts.insert(at, _unseen(name, each, outputs, counted, owners))
        layers = {part.name: part for part in parts}
    return list(layers.values())


def _unseen(
    name: str, module: Any, outputs: int, counted: set[int], owners: dict[int, int]
) -> Layer:
    own = [each for each in module.parameters(recurse=False) if id(each) not in counted]
    counted.update(id(each) for each in own)
    matrices = [each for each in own if each.dim() > 1]
    return Layer(
        name,
        OTHER,
        sum(each.numel() for each in matrices),
        sum(each.numel() for each in own),
        outputs,
        outputs,
        sum(2.0 * each[0].numel() * outputs for each in matrices),
        tuple((each.shape[0], each[0].numel()) for each in matrices),
        tied=any(owners[id(each)] > 1 for each in own),
    )


def _sum(layer: Layer, again: Layer) -> Layer:
    """A layer that the forward pass runs once more."""
    return replace(
        layer,
        inputs=layer.inputs + again.inputs,
        outputs=layer.outputs + again.outputs,
        flops=layer.flops + again.flops,
        rows=layer.rows + again.rows,
    )


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise InvalidArgument("a module is walked with torch, which is not installed") from None


def _make(path: str) -> Any:
    module, _, name = path.partition(":")
    made = importlib.import_module(module)
    for part in name.split("."):
        made = getattr(made, part)
    if not callable(made):
        raise InvalidArgument(f"{path} is a {type(made).__name__}, and not callable")
    if hasattr(made, "named_modules") and not isinstance(made, type):
        raise InvalidArgument(f"{path} is a module already: give a callable that returns one")
    return made()


def _sample(torch: Any, text: str) -> Any:
    shape, _, dtype = text.partition(":")
    try:
        sides = [int(side) for side in shape.split(",")]
    except ValueError:
        sides = [0]
    kind = getattr(torch, dtype or _DEFAULT_DTYPE, None)
    if min(sides) < 1 or not isinstance(kind, torch.dtype):
        raise InvalidArgument(f"sample {text!r:.80} is no shape: give 3,224,224 or 1024:int64")
    return torch.empty((_BATCH, *sides), dtype=kind, device="meta")


def _layer(
    name: str, module: Any, inputs: Any, output: Any, counted: set[int], owners: dict[int, int]
) -> Layer:
    own = list(module.parameters(recurse=False))
    fresh = [each for each in own if id(each) not in counted]
    counted.update(id(each) for each in own)
    matrices = [each for each in own if each.dim() > 1]
    kind, outputs, taken = _kind(module), _elements(output) // _BATCH, _elements(inputs) // _BATCH
    positions = outputs // max(1, _last(output))
    return Layer(
        name or "(all)",
        kind,
        sum(each.numel() for each in fresh if each.dim() > 1),
        sum(each.numel() for each in fresh),
        taken,
        outputs,
        _flops(kind, module, matrices, positions, outputs),
        tuple((each.shape[0], each[0].numel()) for each in fresh if each.dim() > 1),
        taken if kind == EMBEDDING else 0,
        any(owners[id(each)] > 1 for each in own),
    )


def _kind(module: Any) -> str:
    names = {each.__name__ for each in type(module).__mro__}
    kinds = {"_ConvNd": CONV, "Linear": LINEAR, "Embedding": EMBEDDING}
    return next((kind for name, kind in kinds.items() if name in names), OTHER)


def _flops(kind: str, module: Any, matrices: list[Any], positions: int, outputs: int) -> float:
    if kind == EMBEDDING:
        return 0.0
    if kind == CONV:
        weight = module.weight
        of_output = weight[0].numel()
        if module.transposed:
            of_output = weight.numel() // module.out_channels
        return 2.0 * outputs * int(of_output)
    return 2.0 * positions * sum(int(each.numel()) for each in matrices)


def _elements(value: Any) -> int:
    """Elements of all tensors in nested tuples, lists and dicts."""
    if hasattr(value, "numel"):
        return int(value.numel())
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return 0
    return sum(_elements(each) for each in value)


def _last(value: Any) -> int:
    while isinstance(value, tuple | list) and value:
        value = value[0]
    shape = tuple(getattr(value, "shape", ()))
    return int(shape[-1]) if shape else 1
