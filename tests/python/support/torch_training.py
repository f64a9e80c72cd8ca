"""Models to train with DDP, and books of what goes into the hook and what comes out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gradwire
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.01}

# Each codec, with parameters that suit small models.
_OPTIONS = {"threshold": ":density=0.05", "topk": ":density=0.05", "lowrank": ":rank=2"}
CODECS = [name + _OPTIONS.get(name, "") for name in gradwire.codecs()]
LOSSY = [name for name in CODECS if name not in ("none", "lossless")]


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )


class Tower(nn.Module):
    """Small layers, several of which are in a bucket; two for each codec, in different buckets."""

    def __init__(self, codecs: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2 * codecs))
        self.last = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)

    @staticmethod
    def rules(codecs: Sequence[Any]) -> list[tuple[str, Any]]:
        """One after the other for the lower layers, and again for the upper ones."""
        return [(f"layers.{i}.*", codec) for i, codec in enumerate([*codecs, *codecs])]


class Branches(nn.Module):
    """Uses those of its branches that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(20, 10) for _ in range(3))

    def forward(self, x: torch.Tensor, asked: list[int]) -> torch.Tensor:
        return sum(self.branches[i](x) for i in asked)


# By step and rank, the branches used: the third by one rank, then by none, then by all.
ASKED = [[[0, 1], [1, 2]], [[0, 1], [0]], [[1], [0]], [[0, 1, 2], [0, 1, 2]], [[2], [1]]]
IGNORED = [
    {f"branches.{i}.{each}" for i in unused for each in ("weight", "bias")}
    for unused in ([], [2], [2], [], [0])
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Differs between ranks and steps."""
    source = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(16, 20, generator=source), torch.randn(16, 10, generator=source)


def backward(ddp: nn.Module, step: int, scaler: torch.amp.GradScaler | None = None) -> None:
    x, y = batch(step)
    loss = mse_loss(ddp(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in model.parameters()])


def same_everywhere(tensors: Iterator[torch.Tensor]) -> bool:
    """Whether they have the same bits on all ranks."""
    own = hashlib.sha256()
    for each in tensors:
        own.update(each.detach().contiguous().view(torch.uint8).numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own.hexdigest())
    return len(set(found)) == 1


def with_each(codecs: Sequence[str], body: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The result of `body(codec, *args)`, by codec."""
    return {codec: body(codec, *args) for codec in codecs}


class Books:
    """Sums, in float64, of a model's gradients before the hook and after it.

    Conservation: ranks × what was delivered + all residuals = all that went in (float32 rounding).
    `unit` is what one of a gradient counts: 1 / loss scale, or the learning rate.
    """

    unit = 1.0

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self._in, self._out = self._zeros(), self._zeros()
        self._size = self._zeros()  # of all that was added up, for the bound on rounding
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.register_hook(self._enter(name))

    def _zeros(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(p).double() for name, p in self._parameters.items()}

    def _enter(self, name: str) -> Any:
        def enter(gradient: torch.Tensor) -> None:
            if name in self._in:
                self._in[name] += gradient.double() * self.unit
                self._size[name] += gradient.double().abs() * self.unit

        return enter

    def only(self, dtype: torch.dtype) -> None:
        """Leaves out the parameters of other types, which round in their own way."""
        for name, parameter in list(self._parameters.items()):
            if parameter.dtype is not dtype:
                for book in (self._parameters, self._in, self._out, self._size):
                    del book[name]

    def mark(self) -> Callable[[], None]:
        """A function that takes the account of all gradients back to this moment."""
        kept = [{n: each.clone() for n, each in book.items()} for book in (self._in, self._size)]

        def go_back() -> None:
            self._in, self._size = kept

        return go_back

    def deliver(self, ranks: int = 0) -> None:
        """Takes and clears the gradients after a backward that so many ranks averaged."""
        self.note(ranks)
        for parameter in self._parameters.values():
            parameter.grad = None

    def note(self, ranks: int = 0) -> None:
        """The same, but leaves them there."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                factor = (ranks or dist.get_world_size()) * self.unit
                self._out[name] += parameter.grad.double() * factor

    def inherit(self, rank: int, feedback: gradwire.ErrorFeedback) -> None:
        """Adds, on rank 0, what another rank's gradients delivered; all call it before that dies.

        What it holds back goes with it.
        """
        parts = {}
        for name, went_in in self._in.items():
            kept = torch.from_numpy(feedback.residual(name)).double().view_as(went_in)
            parts[name] = went_in - kept * self.unit
        delivered = [parts]
        dist.broadcast_object_list(delivered, src=rank)
        if dist.get_rank() == 0:
            for name, each in delivered[0].items():
                self._in[name] += each

    def missing(
        self, feedback: gradwire.ErrorFeedback | None, group: dist.ProcessGroup | None = None
    ) -> float:
        """The share of all gradients that is missing, in float32 roundings of their sizes."""
        worst = 0.0
        for name, went_in in self._in.items():
            kept = torch.zeros_like(went_in).flatten()
            if feedback is not None and feedback.residual(name).size:
                kept += torch.from_numpy(feedback.residual(name)).double() * self.unit
            both = torch.stack([went_in.flatten() - kept, self._size[name].flatten()])
            dist.all_reduce(both, group=group)
            if both.numel():
                lost = (both[0] - self._out[name].flatten()).abs()
                worst = max(worst, float(lost.max() / (both[1].max() + 1e-30)) * 2**24)
        return worst


def wrapped(module: nn.Module, **setting: Any) -> tuple[DistributedDataParallel, Books]:
    return DistributedDataParallel(module, **setting), Books(module)
