"""A small language model of several ranks in one process: each parameter has all ranks' values."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from bench.training.models.text import VOCABULARY

_HEADS = 4

Parameters = dict[str, torch.Tensor]  # by name, of shape (ranks, …)


class StackedModel:
    """A transformer that predicts the next byte; all ranks begin with the same parameters."""

    def __init__(self, ranks: int, width: int, layers: int, context: int, seed: int) -> None:
        """Draws the parameters, the same ones for any number of ranks."""
        self.ranks, self.width, self.layers = ranks, width, layers
        random = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
            scale = scale or 1 / math.sqrt(columns)
            return torch.randn(rows, columns, generator=random) * scale

        drawn = {
            "bytes": matrix(VOCABULARY, width, 0.02),
            "places": matrix(context, width, 0.02),
            "next": matrix(VOCABULARY, width),
            "norm": torch.ones(width),
        }
        for i in range(layers):
            drawn[f"{i}.attention"] = matrix(3 * width, width)
            drawn[f"{i}.joined"] = matrix(width, width)
            drawn[f"{i}.up"] = matrix(4 * width, width)
            drawn[f"{i}.down"] = matrix(width, 4 * width)
            drawn[f"{i}.norms"] = torch.ones(2, width)
        self.parameters: Parameters = {
            name: each.expand(ranks, *each.shape).clone().requires_grad_()
            for name, each in drawn.items()
        }

    @property
    def count(self) -> int:
        """Parameters of one rank."""
        return sum(each[0].numel() for each in self.parameters.values())

    def losses(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of each rank, for windows of shape (ranks, windows, context)."""
        scores = self._scores(inputs).flatten(0, 1)
        each = functional.cross_entropy(scores, labels.flatten(), reduction="none")
        return each.view(self.ranks, -1).mean(1)

    def _scores(self, inputs: torch.Tensor) -> torch.Tensor:
        its, shape = self.parameters, inputs.shape
        offsets = VOCABULARY * torch.arange(self.ranks)[:, None, None]
        x = functional.embedding(inputs + offsets, its["bytes"].flatten(0, 1))
        x = (x + its["places"][:, None]).flatten(1, 2)
        for i in range(self.layers):
            norms = its[f"{i}.norms"]
            x = x + self._attend(_normed(x, norms[:, 0]), i, shape)
            hidden = functional.gelu(_linear(_normed(x, norms[:, 1]), its[f"{i}.up"]))
            x = x + _linear(hidden, its[f"{i}.down"])
        return _linear(_normed(x, its["norm"]), its["next"])

    def _attend(self, x: torch.Tensor, layer: int, shape: torch.Size) -> torch.Tensor:
        every = _linear(x, self.parameters[f"{layer}.attention"])
        windows, context = shape[0] * shape[1], shape[2]
        every = every.view(windows, context, 3, _HEADS, self.width // _HEADS)
        q, k, v = every.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined = found.transpose(1, 2).reshape(self.ranks, -1, self.width)
        return _linear(joined, self.parameters[f"{layer}.joined"])


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def _normed(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * scale[:, None]
