"""Muon and Dion on a language model, by how their ranks exchange; the ranks are threads.

    python -m bench.training.trials.muon muon muon+int8 dion/24+int8 --seeds 1 2 3
    python -m bench.training.trials.muon muon --rates 0.004 0.008      # a search, by one seed

A way to train is one of

- "muon+CODEC": gradients of the layers' matrices travel in a codec, with error feedback, and
  torch.optim.Muon's updates are made of them, with its learning rate as `match_rms_adamw` has it;
- "dion/RANK+CODEC": the two factors of momenta do (Ahn et al. 2025, "Dion: Distributed
  Orthonormalized Updates");
- "rows/SHARE+CODEC": such a share of the momenta's rows or columns does, those of the largest norm
  (Ahn et al. 2025, "Dion2");
- "lowrank/RANK+CODEC": one factor of what momenta have beyond those that all ranks know does.

All other parameters go by AdamW, with gradients in `int8` where matrices are compressed, and as
they are below 1,024 elements. "/first=SHARE" at the end lets the first steps be "muon+int8", and
"/plain" leaves error feedback out.

Prints a line of JSON for each training: its loss on unseen text, and the bytes of dense gradients
over those that a rank sent, in the last step and in all of them.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from collections.abc import Iterator, Mapping

import gradwire
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim._muon import _zeropower_via_newtonschulz

from bench.training import images
from bench.training.models.transformers import LanguageModel
from bench.training.trials.tasks import TASKS, Batch, Task
from bench.training.trials.trial import Trial

_RANKS, _MOMENTUM, _DECAY, _REST_RATE = 4, 0.95, 0.01, 0.004
_WIDTH, _LAYERS, _CONTEXT, _BATCH, _SMALL = 256, 2, 64, 16, 1024
_TASK = "lm"

Tensors = dict[str, torch.Tensor]


class Exchange:
    """What one rank sends, with its residuals, if it `keeps` any."""

    def __init__(self, comm: gradwire.Communicator, *, keeps: bool) -> None:
        self.comm, self._keeps, self._feedback = comm, keeps, gradwire.ErrorFeedback()

    def average(self, own: Tensors, codec: str, *, feedback: bool = False) -> Tensors:
        """The ranks' means, in place; without feedback, what the codec loses is lost."""
        if own:
            options = (
                {
                    "feedback": self._feedback,
                    "keys": [(name, each.numel()) for name, each in own.items()],
                }
                if feedback and self._keeps
                else {}
            )
            self.comm.all_reduce(list(own.values()), op="avg", codec=codec, **options)
        return own


class Muon:
    """Updates by the orthonormal part of averaged gradients' momenta, which rank 0 makes."""

    def __init__(self, exchange: Exchange, codec: str) -> None:
        self._exchange, self.codec = exchange, codec
        self._momenta: Tensors = {}

    def updates(self, gradients: Tensors) -> Tensors:
        """The directions of a step; on other ranks than 0, gradients."""
        found = self._exchange.average(gradients, self.codec, feedback=True)
        return (
            found
            if self._exchange.comm.rank
            else {name: self._of(name, found[name]) for name in found}
        )

    def _of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        momentum = self._momenta.setdefault(name, torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        return orthonormal(gradient.lerp(momentum, _MOMENTUM))


class LowRank:
    """Updates by the orthonormal part of a momentum that all ranks know, which a factor moves.

    The factor is of the difference between a rank's own momentum and the common one, so that what
    it does not deliver comes later (Richtarik et al. 2021, "EF21"). Its basis is of what the step
    before delivered, of rows and of columns in turn (Zhang et al. 2023, ACP-SGD).
    """

    def __init__(self, exchange: Exchange, rank: int, codec: str) -> None:
        self._exchange, self._rank, self._codec = exchange, rank, codec
        self._momenta: Tensors = {}
        self._known: Tensors = {}
        self._bases: Tensors = {}
        self._steps = 0

    def updates(self, gradients: Tensors) -> Tensors:
        """The directions of a step."""
        if not self._bases:
            self._momenta = {name: torch.zeros_like(each) for name, each in gradients.items()}
            self._known = {name: torch.zeros_like(each) for name, each in gradients.items()}
            self._bases = {name: drawn(each, self._rank) for name, each in gradients.items()}
        of_rows = self._steps % 2 == 0
        self._steps += 1
        factors = {}
        for name, gradient in gradients.items():
            self._momenta[name].lerp_(gradient, 1 - _MOMENTUM)
            beyond = gradient.lerp(self._momenta[name], _MOMENTUM) - self._known[name]
            factors[name] = (beyond if of_rows else beyond.T) @ self._bases[name]
        for name, each in self._exchange.average(factors, self._codec).items():
            product = each @ self._bases[name].T
            self._known[name].add_(product if of_rows else product.T)
            self._bases[name] = torch.linalg.qr(each)[0]
        return {} if self._exchange.comm.rank else each_orthonormal(self._known)


class Dion:
    """Updates by orthonormal factors of momenta, of which each rank has its own."""

    def __init__(self, exchange: Exchange, rank: int, codec: str) -> None:
        self._exchange, self._rank, self._codec = exchange, rank, codec
        self._momenta: Tensors = {}
        self._right: Tensors = {}

    def updates(self, gradients: Tensors) -> Tensors:
        """The directions of a step; what they do not hold stays in the momenta."""
        add_to(self._momenta, gradients)
        if not self._right:
            self._right = {name: drawn(each, self._rank) for name, each in gradients.items()}
        products = {name: each @ self._right[name] for name, each in self._momenta.items()}
        left = self._exchange.average(products, self._codec)
        left = {name: torch.linalg.qr(each)[0] for name, each in left.items()}
        own = {name: each.T @ left[name] for name, each in self._momenta.items()}
        right = self._exchange.average(own, self._codec)
        for name, each in self._momenta.items():
            each.addmm_(left[name], right[name].T, alpha=_MOMENTUM - 1)
            self._right[name] = right[name] / right[name].norm(dim=0).clamp(min=1e-8)
        return {name: left[name] @ self._right[name].T for name in left}


class Rows:
    """Updates of the rows or columns of matrices whose momenta are largest."""

    def __init__(self, exchange: Exchange, share: float, codec: str) -> None:
        self._exchange, self._share, self._codec = exchange, share, codec
        self._momenta: Tensors = {}

    def updates(self, gradients: Tensors) -> Tensors:
        """The directions of a step; other rows and columns keep their momenta."""
        add_to(self._momenta, gradients)
        axes = {name: int(each.shape[0] > each.shape[1]) for name, each in gradients.items()}
        norms = {name: each.abs().sum(1 - axes[name]) for name, each in self._momenta.items()}
        chosen = {
            name: each.topk(round(self._share * len(each))).indices
            for name, each in self._exchange.average(norms, "bf16").items()
        }
        own = {
            name: each.index_select(axes[name], chosen[name])
            for name, each in self._momenta.items()
        }
        found = self._exchange.average(own, self._codec)
        for name, each in self._momenta.items():
            each.index_add_(axes[name], chosen[name], found[name], alpha=_MOMENTUM - 1)
        return {
            name: torch.zeros_like(each).index_copy_(
                axes[name], chosen[name], orthonormal(found[name])
            )
            for name, each in gradients.items()
        }


def drawn(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns for a matrix's rows, alike on all ranks."""
    numbers = torch.Generator().manual_seed(like.numel())
    return torch.linalg.qr(torch.randn(like.shape[1], rank, generator=numbers))[0]


def each_orthonormal(matrices: Tensors) -> Tensors:
    return {name: orthonormal(each) for name, each in matrices.items()}


def add_to(sums: Tensors, addends: Mapping[str, torch.Tensor]) -> None:
    for name, each in addends.items():
        sums[name] = sums[name] + each if name in sums else each.clone()


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """As torch.optim.Muon makes it."""
    return _zeropower_via_newtonschulz(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7).float()


def train(comm: gradwire.Communicator, trial: Trial, models: list[nn.Module]) -> dict[str, float]:
    """One rank; the models share their parameters, which rank 0 moves."""
    task, model = TASKS[_TASK](None), models[comm.rank]
    way, plain, _ = trial.exchange.partition("/plain")
    way, _, first = way.partition("/first=")
    exchange = Exchange(comm, keeps=not plain)
    rule, small = _rule(way, exchange)
    codec, begin = getattr(rule, "codec", ""), round(float(first or 0) * trial.steps)
    named = dict(model.named_parameters())
    matrices = {n: each for n, each in named.items() if each.ndim == 2 and "layers." in n}
    rest = {name: each for name, each in named.items() if name not in matrices}
    adam = torch.optim.AdamW(rest.values(), lr=_REST_RATE, weight_decay=_DECAY)
    last = sent = 0
    for step, (inputs, labels) in enumerate(_batches(trial, task, comm.rank)):
        model.zero_grad()
        cross_entropy(model(inputs), labels.flatten()).backward()
        if isinstance(rule, Muon):
            rule.codec = "int8" if step < begin else codec
        factor = trial.rate_factor(step)
        with torch.no_grad():
            updates = rule.updates({name: each.grad for name, each in matrices.items()})
            large = {n: each.grad for n, each in rest.items() if each.numel() >= _SMALL}
            exchange.average(large, small, feedback=True)
            exchange.average({n: rest[n].grad for n in rest if n not in large}, "none")
            last, sent = comm.traffic.bytes_sent - sent, comm.traffic.bytes_sent
            comm.barrier()  # no rank computes with the parameters any more
            if comm.rank == 0:
                _move(matrices, updates, trial.rate * factor)
                adam.param_groups[0]["lr"] = _REST_RATE * factor
                adam.step()
            comm.barrier()
    dense = 2 * (_RANKS - 1) / _RANKS * 4 * sum(each.numel() for each in named.values())
    loss = _loss(model, task) if comm.rank == 0 else 0.0
    return {"loss": loss, "ratio": dense / last, "whole": dense * trial.steps / sent}


Rule = Muon | Dion | Rows | LowRank


def _rule(way: str, exchange: Exchange) -> tuple[Rule, str]:
    """How matrices are updated, and the codec of what are none."""
    name, _, codec = way.partition("+")
    kind, _, size = name.partition("/")
    codec = codec or "none"
    small = codec if codec in ("none", "bf16") else "int8"
    if kind == "lowrank":
        return LowRank(exchange, int(size), codec), small
    if kind == "dion":
        return Dion(exchange, int(size), codec), small
    return (Rows(exchange, float(size), codec) if kind == "rows" else Muon(exchange, codec)), small


def _move(matrices: Tensors, updates: Tensors, rate: float) -> None:
    for name, update in updates.items():
        each = matrices[name]
        each.mul_(1 - rate * _DECAY)
        each.sub_(update, alpha=0.2 * max(each.shape) ** 0.5 * rate)


def _batches(trial: Trial, task: Task, rank: int) -> Iterator[Batch]:
    each = trial.batch // _RANKS
    order = images.batches(task.count, each, rank, _RANKS, trial.seed, trial.steps)
    return map(task.examples, order)


@torch.inference_mode()
def _loss(model: nn.Module, task: Task) -> float:
    total, (inputs, labels) = 0.0, task.unseen
    for some, wanted in zip(inputs.split(64), labels.split(64), strict=True):
        total += float(cross_entropy(model(some), wanted.flatten(), reduction="sum"))
    return total / labels.numel()


def _models(seed: int) -> list[nn.Module]:
    """One of each rank, with the same memory for their parameters."""
    torch.manual_seed(seed)
    first = LanguageModel(_WIDTH, _LAYERS, _CONTEXT)
    models = [first, *(copy.deepcopy(first) for _ in range(_RANKS - 1))]
    for model in models[1:]:
        for own, its in zip(model.parameters(), first.parameters(), strict=True):
            own.data = its.data
    return models


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.008])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed, way, rate in itertools.product(options.seeds, options.ways, options.rates):
        trial = Trial(_TASK, "muon", way, rate, _BATCH, options.steps, seed)
        found = gradwire.spawn(train, _RANKS, args=(trial, _models(seed)), threads=True)[0]
        line = {"way": way, "rate": rate, "seed": seed, "steps": options.steps, **found}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
