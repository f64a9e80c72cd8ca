"""Gradients and memory of a Downpour replica's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradwire._errors import InvalidArgument
from gradwire.torch.backend import cuda_staging


def gradient_of(parameter: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """The dense gradient with decay; zeros, as torch's optimizers have it, where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.add(parameter, alpha=weight_decay) if weight_decay else dense


def clipped(gradients: list[torch.Tensor], most: float) -> list[torch.Tensor]:
    """Gradients whose norm, all together, is at most `most`."""
    norms = torch._foreach_norm(gradients)
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    scale = (most / norm.clamp(min=most)).item()
    return [each * scale for each in gradients]


def trained(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """The parameters that are trained; raises InvalidArgument for other types than float32."""
    found = [each for group in groups for each in group["params"] if each.requires_grad]
    for each in found:
        if each.dtype is not torch.float32:
            raise InvalidArgument(
                f"a parameter is {each.dtype}: parameter servers hold float32; keep the model in "
                "float32 and use autocast for computing"
            )
    if not found:
        raise InvalidArgument("no parameter requires a gradient")
    return found


def names(groups: Iterable[Mapping[str, Any]]) -> list[str] | None:
    """The names of the parameters that are trained, where torch was given them with names.

    Raises InvalidArgument for a name that two of them have.
    """
    found: list[str] = []
    for group in groups:
        if "param_names" not in group:
            return None
        pairs = zip(group["param_names"], group["params"], strict=True)
        found += [name for name, parameter in pairs if parameter.requires_grad]
    twice = next((name for name, times in Counter(found).items() if times > 1), None)
    if twice is not None:
        raise InvalidArgument(f"two parameters have the name {twice!r}")
    return found


def on_host(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Memory like the parameters' on the CPU, pinned for those on a GPU."""
    return [
        cuda_staging.host_memory(each.shape, torch.float32)
        if each.is_cuda
        else torch.empty(each.shape, dtype=torch.float32, device="cpu")
        for each in parameters
    ]
