"""Local SGD of a small language model: DiLoCo, SparseLoCo and MuLoCo beside averaged gradients.

    python -m bench.local_sgd.losses           # an hour of one core; goes on where it ended
    python -m bench.local_sgd.losses --report  # writes the tables of what has been run
    python -m bench.local_sgd.losses --parts sparse --steps 6000 --output sparse-loco

All ranks are in one process, and all ways compute as many gradients of the same windows of text.
Every learning rate is searched with the first seed; the others train at the best one. Ranks' outer
gradients travel in gradwire's codecs, with its error feedback: payloads are averaged as `gather`
does, or encoded once more as `direct` does, and outer steps are those of `gradwire.torch.DiLoCo`.
Inner learning rates rise over a tenth of the steps, and fall as a cosine does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from gradwire import ErrorFeedback
from gradwire.codec import NativeCodec, get
from gradwire.torch.outer.outer import OuterOptimizer

from bench.common.report import beside, save, stem_of
from bench.local_sgd.losses_report import (
    SPARSE,
    SPARSE_WAYS,
    TWO_BITS,
    Outcome,
    Way,
    document,
    read,
)
from bench.training.models import text
from bench.training.models.stacked import Parameters, StackedModel

WIDTH, LAYERS, CONTEXT, BATCH = 48, 2, 32, 16
SEEDS = (1, 2, 3)
_WARM_UP, _UNSEEN, _LEAST = 0.1, 256, 1024  # elements that are compressed
_RATES = {"adamw": (0.004, 0.008, 0.016), "muon": (0.01, 0.02, 0.04)}
_LOCAL_RATES = {"adamw": (0.002, 0.004, 0.008), "muon": (0.005, 0.01, 0.02)}  # between averages
_SPARSE_RATES = (0.004, 0.008)
_BESIDE_MUON = 0.008  # AdamW's rate for what Muon does not train
_MUON_MOMENTUM, _MUON_DECAY = 0.95, 0.1
_MODULE = "bench.local_sgd.losses"


class Exchange:
    """Averages outer gradients in a codec, with what it loses kept and decayed."""

    def __init__(self, way: Way) -> None:
        """Takes a codec and what of residuals stays for the next round."""
        self._codec = get(way.codec)
        self._gathers = self._codec.spec.startswith("topk")
        self._decay, self.bytes = way.decay, 0
        self._feedback = [ErrorFeedback() for _ in range(way.ranks + 1)]

    def average(self, name: str, every: torch.Tensor) -> torch.Tensor:
        """The average of the ranks' values, of shape (ranks, …)."""
        plain = self._codec.spec == "none" or every[0].numel() < _LEAST
        codec = get("none") if plain else self._codec
        total = torch.zeros_like(every[0])
        for rank, each in enumerate(every):
            total += self._delivered(codec, rank, name, each)
        average = total / len(every)
        if plain or self._gathers:
            return average
        return self._delivered(codec, len(every), name, average)

    def end_round(self) -> None:
        """Decays what is kept."""
        for each in self._feedback:
            each.scale(self._decay)

    def _delivered(
        self, codec: NativeCodec, rank: int, name: str, values: torch.Tensor
    ) -> torch.Tensor:
        payload = codec.encode(
            values.contiguous().flatten(), feedback=self._feedback[rank], key=name
        )
        self.bytes += len(payload) if rank == 0 else 0
        return torch.from_numpy(codec.decode(payload, values.numel())).view(values.shape)


class Training:
    """Ranks that train on their own, and average after every round; with one rank they never do."""

    def __init__(self, way: Way, seed: int) -> None:
        """Begins with a seed's parameters and order of windows."""
        self.way, self._seed = way, seed
        self.model = StackedModel(way.ranks, WIDTH, LAYERS, CONTEXT, seed)
        self._inner = list(_inner_optimizers(way, self.model.parameters))
        self._exchange = Exchange(way)
        self._outer = OuterOptimizer(way.outer_rate, way.momentum, way.momentum > 0)
        self._common = {name: each[0].detach().clone() for name, each in self._values()}
        self._velocities = {name: torch.zeros_like(each) for name, each in self._common.items()}

    def run(self) -> Outcome:
        """Trains; the loss is that on unseen text, of the common parameters."""
        rounds = 0
        for step, (inputs, labels) in enumerate(_batches(self.way, self._seed), 1):
            self._step(inputs, labels, step - 1)
            if self.way.every and (step % self.way.every == 0 or step == self.way.steps):
                rounds += 1
                self._average()
        sent = self._exchange.bytes / rounds if rounds else 0.0
        return Outcome(self.way, self._seed, self._loss(), self.model.count, sent, rounds)

    def _values(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.parameters.items()

    def _step(self, inputs: torch.Tensor, labels: torch.Tensor, step: int) -> None:
        factor = _rate_factor(step, self.way.steps)
        for _, each in self._values():
            each.grad = None
        self.model.losses(inputs, labels).sum().backward()
        for optimizer, rate in self._inner:
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()

    @torch.no_grad()
    def _average(self) -> None:
        for name, each in self._values():
            common = self._common[name]
            gradient = self._exchange.average(name, common - each)
            velocity = self._velocities[name] if self.way.momentum else None
            self._outer.step(common, gradient, velocity)
            each.copy_(common.expand_as(each))
        self._exchange.end_round()

    @torch.inference_mode()
    def _loss(self) -> float:
        data = text.standard_library().unseen
        apart = (len(data) - CONTEXT - 1) // _UNSEEN
        found = text.windows(data, torch.arange(_UNSEEN) * apart, CONTEXT)
        found = found.view(-1, BATCH, CONTEXT + 1)
        one = StackedModel(1, WIDTH, LAYERS, CONTEXT, self._seed)
        one.parameters = {name: each[:1] for name, each in self._values()}
        losses = [one.losses(each[None, :, :-1], each[None, :, 1:].contiguous()) for each in found]
        return float(torch.cat(losses).mean())


class StackedMuon(torch.optim.Optimizer):
    """torch.optim.Muon of each rank's matrices, for all ranks at once and in float32."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Takes parameters of shape (ranks, rows, columns)."""
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves the parameters."""
        for group in self.param_groups:
            for each in group["params"]:
                average = self.state[each].setdefault("average", torch.zeros_like(each))
                average.lerp_(each.grad, 1 - _MUON_MOMENTUM)
                _, rows, columns = each.shape
                rate = group["lr"] * math.sqrt(max(1, rows / columns))
                each.mul_(1 - group["lr"] * _MUON_DECAY)
                each.add_(orthogonal(each.grad.lerp(average, _MUON_MOMENTUM)), alpha=-rate)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Nearly orthogonal matrices, by Newton and Schulz's iteration as in torch.optim.Muon."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT
    found = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        found = torch.baddbmm(found, gram, found, beta=3.4445)
    return found


def _inner_optimizers(
    way: Way, parameters: Parameters
) -> Iterator[tuple[torch.optim.Optimizer, float]]:
    """The ranks' optimizers, and their rates."""
    by_muon = {
        name: each
        for name, each in parameters.items()
        if way.inner == "muon" and name[0].isdigit() and not name.endswith("norms")
    }
    others = [each for name, each in parameters.items() if name not in by_muon]
    yield torch.optim.AdamW(others), _BESIDE_MUON if by_muon else way.rate
    if by_muon:
        yield StackedMuon(by_muon.values()), way.rate


def _rate_factor(step: int, steps: int) -> float:
    rising = round(_WARM_UP * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


def _batches(way: Way, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The ranks' windows by step, which are the same together for any number of ranks."""
    data, random = text.standard_library().seen, torch.Generator().manual_seed(seed)
    for _ in range(way.steps):
        starts = torch.randint(0, len(data) - CONTEXT - 1, (BATCH,), generator=random)
        found = text.windows(data, starts, CONTEXT).view(way.ranks, -1, CONTEXT + 1)
        yield found[..., :-1], found[..., 1:].contiguous()


class Runs:
    """What has been run, in a file of one outcome a line."""

    def __init__(self, path: Path, seeds: Sequence[int]) -> None:
        """Reads the file, if there is one."""
        self._path, self._seeds, self.outcomes = path, seeds, read(path)

    def best(self, ways: Iterable[Way]) -> Way:
        """The way of the least loss with the first seed."""
        return min((self._outcome(way, SEEDS[0]) for way in ways), key=lambda each: each.loss).way

    def train(self, way: Way) -> None:
        """Trains with every seed."""
        for seed in self._seeds:
            self._outcome(way, seed)

    def _outcome(self, way: Way, seed: int) -> Outcome:
        for each in self.outcomes:
            if (each.way, each.seed) == (way, seed):
                return each
        found = Training(way, seed).run()
        self.outcomes.append(found)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**found._asdict(), "way": way._asdict()}) + "\n")
        return found


def by_rounds(runs: Runs, steps: int) -> None:
    """DiLoCo and SparseLoCo by length of a round; rates are those of rounds of 30 steps."""
    dense, sparse = _dense(runs, 4, steps), _sparse(runs, steps)
    for every in (30, 50, 100, 250, 15):
        runs.train(sparse._replace(every=every))
        runs.train(dense._replace(every=every))


def by_sparse(runs: Runs, steps: int) -> None:
    """SparseLoCo in several ways, beside DiLoCo and plain averages, rounds of 30 steps."""
    dense, sparse = _dense(runs, 4, steps), _sparse(runs, steps)
    for way in (dense, sparse, sparse._replace(codec="none", decay=1.0)):
        runs.train(way)
    for codec, outer_rate, decay in SPARSE_WAYS:
        way = sparse._replace(codec=codec, outer_rate=outer_rate, decay=decay)
        runs.train(runs.best(way._replace(rate=each) for each in _SPARSE_RATES))


def by_ranks(runs: Runs, steps: int) -> None:
    """AdamW with averaged gradients, and DiLoCo by number of ranks."""
    runs.train(runs.best(_rates(Way("adamw", 0.0, 1, steps))))
    for ranks in (2, 4, 8, 16):
        runs.train(_dense(runs, ranks, steps))


def by_inner(runs: Runs, steps: int) -> None:
    """Muon inside, with outer gradients of few bits, beside AdamW inside."""
    dense = _dense(runs, 8, steps)
    muon = runs.best(_rates(dense._replace(inner="muon")))
    for codec in ("none", TWO_BITS, "int4"):
        runs.train(muon._replace(codec=codec))
        runs.train(dense._replace(codec=codec))
    runs.train(runs.best(_rates(Way("muon", 0.0, 1, steps))))


def _sparse(runs: Runs, steps: int) -> Way:
    """The best SparseLoCo with its authors' outer rate and decay."""
    way = Way("adamw", 0.0, 4, steps, 30, 1.0, 0.0, SPARSE, 0.95)
    return runs.best(way._replace(rate=each) for each in _RATES["adamw"])


def _dense(runs: Runs, ranks: int, steps: int) -> Way:
    """The best DiLoCo: its inner rate at the usual outer momentum, then that momentum."""
    best = runs.best(_rates(Way("adamw", 0.0, ranks, steps, 30)))
    return runs.best(best._replace(momentum=each) for each in (0.9, 0.6))


def _rates(way: Way) -> list[Way]:
    rates = _LOCAL_RATES if way.every else _RATES
    return [way._replace(rate=each) for each in rates[way.inner]]


PARTS = {"inner": by_inner, "ranks": by_ranks, "rounds": by_rounds, "sparse": by_sparse}


def main() -> int:
    """Runs what has not been run, the first seed of all first, and writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stem = stem_of(options.output, "local-sgd")
    path = beside(stem, "-runs.jsonl")
    for seeds in () if options.report else (options.seeds[:1], options.seeds):
        for each in options.parts:
            PARTS[each](Runs(path, seeds), options.steps)
    words = ["python", "-m", _MODULE, "--steps", str(options.steps)]
    if options.parts != list(PARTS):
        words += ["--parts", *options.parts]
    save(stem, None, document(read(path), " ".join(words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
