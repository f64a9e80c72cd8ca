"""codec="auto": the codec that links, model, computing and optimizer suggest.

The links are measured, and the least lossy codec is taken with which a step is predicted to take
hardly longer than with the fastest one. How long a rank computes is known after some steps; then
the ranks choose once more, and before that only averaging counts. Every rank computes the same,
from times on which they agree.

lowrank is one of the codecs only for an optimizer that is known to be linear in the gradient, such
as SGD: before AdamW it costs a higher loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire import _core
from gradwire._model import CostModel
from gradwire.torch.exchange.compression import AUTO, Compression
from gradwire.torch.exchange.defaults import Model, Settings, sensitive, settings
from gradwire.torch.exchange.links import Clock, Ranks, link_of, measured
from gradwire.torch.exchange.optimizer_watch import is_adaptive
from gradwire.torch.exchange.rules import compressible, gradient_elements, gradient_shape
from gradwire.torch.exchange.step_times import Exchange, StepTimes

# Of the fastest step's time, what one with a less lossy codec may take.
_NEARLY = 1.05
_RANK = 4  # of lowrank without options
# Of a processor per byte of matrices, in lowrank: 1.69 ms for 4 MiB (codecs-2026-11-21.md).
_SECONDS_PER_BYTE = 4e-10
_CODECS = ("none", "fp16", "int8")
_LOW_RANK = "lowrank"


class _Choice(NamedTuple):
    """A codec, why it was chosen, and what of that is a guess."""

    codec: str
    why: str
    guess: str = ""


class Chosen(NamedTuple):
    """What ranks train with, and the choice between the same codecs once computing is known."""

    settings: Settings
    later: Later | None = None


class Later:
    """Chooses again, by the first steps of a training; the same on ranks that give the same."""

    def __init__(self, model: Model, given: Compression, times: _Times, codec: str) -> None:
        self._model, self._given, self._times, self.codec = model, given, times, codec

    def computing(self, step: float, waited: float) -> float:
        """The seconds for which this rank computes in a step, at whose end it waited.

        A host does not wait for a GPU: there computing is what the cost model leaves of the step.
        """
        if self._times.on_gpus:
            return self._times.steps.compute(self.codec, step)
        return max(step - waited, 0.0)

    def settings(self, compute: float) -> Settings:
        """The settings for ranks that compute so long in a step; guesses were told before."""
        found = self._times.choice(compute)
        return _settings(self._model, self._given, found._replace(guess=""))

    def of(self, codec: str) -> Settings:
        """The settings of a training that goes on with a codec."""
        why = f"codec='auto' chose {codec} when this training began"
        return _settings(self._model, self._given, _Choice(codec, why))


def choose(
    model: Model,
    ranks: Ranks,
    given: Compression,
    optimizer: torch.optim.Optimizer | None,
    clock: Clock = time.perf_counter,
) -> Chosen:
    """Takes the given codec, or chooses for a model whose gradients these ranks average.

    The choice is the same on all ranks, and the result has its reason. Every rank calls it.
    """
    if given.codec != AUTO:
        return Chosen(settings(model, given))
    found = _times(model, ranks, _Way(), clock)
    if isinstance(found, _Choice):
        return Chosen(_settings(model, given, found))
    found.consider_low_rank(model, given.min_elements, optimizer)
    first = found.choice(None)
    return Chosen(_settings(model, given, first), Later(model, given, found, first.codec))


def choose_for_shards(
    model: Model, ranks: Ranks, given: Compression, group: dist.ProcessGroup | None
) -> Settings:
    """Takes the given codec, or chooses for a model that is sharded; every rank calls it.

    `ranks` have the replicas of a shard, and `group` the shards of a replica; without replicas
    there is no group, and gradients are scattered. lowrank is left out: no shards were trained with
    it.
    """
    way = _Way("reduce_scatter") if group is None else _Way("all_reduce", group.size())
    own: _Choice | None = None
    if given.codec == AUTO:
        found = _times(model, ranks, way, time.perf_counter)
        own = found if isinstance(found, _Choice) else found.choice(None)
    choice = [own]
    if group is not None:  # other shards may have other links; ranks with a codec come here too
        dist.broadcast_object_list(choice, group=group, group_src=0)
    if own is None:
        return settings(model, given)
    return _settings(model, given, choice[0] or own)


def told(given: Compression, chosen: Settings) -> str:
    """What ranks compare, since a codec that was given is compared by their calls."""
    if given.codec != AUTO:
        return "another than auto"
    return f"auto, which chose {chosen.compression.codec}"


def _settings(model: Model, given: Compression, choice: _Choice) -> Settings:
    warm_up = given.warm_up if choice.codec == _LOW_RANK else 0
    chosen = settings(model, replace(given, codec=choice.codec, warm_up=warm_up))
    why = "; ".join(filter(None, [choice.why, chosen.why]))
    return chosen._replace(why=why, guess=choice.guess)


class _Way(NamedTuple):
    """The way of gradients: a collective, over this part of them."""

    collective: str = "all_reduce"
    shards: int = 1


class _Times:
    """Predicted times of averaging by codec, and why a codec is none of them."""

    def __init__(self, nbytes: float, ranks: Ranks, way: _Way, costs: CostModel) -> None:
        self.on_gpus, self.guess, self._left = False, "", ""
        self._nbytes, self._ranks, self._way, self._costs = nbytes, ranks, way, costs
        self._exchanges: dict[str, Exchange] = {
            codec: partial(self._share, codec) for codec in _CODECS
        }
        self.steps = StepTimes(nbytes, self._exchanges)

    def consider_low_rank(
        self, model: Model, min_elements: int, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Adds lowrank, if this optimizer can step what it delivers."""
        if unsuited := _why_not_low_rank(optimizer, self.on_gpus):
            self._left = f"; lowrank is left out: {unsuited}"
            return
        parts = _low_rank_parts(model, min_elements)
        self._exchanges[_LOW_RANK] = partial(self._share_of_low_rank, parts)
        self.steps = StepTimes(self._nbytes, self._exchanges)

    def choice(self, compute: float | None) -> _Choice:
        """The least lossy codec whose step is nearly as fast as the fastest one's."""
        seconds = self.steps.all(compute or 0.0)
        limit = _NEARLY * min(seconds.values())
        codec = next(name for name, its in seconds.items() if its <= limit)
        times = ", ".join(f"{name} {its * 1e3:.3g} ms" for name, its in seconds.items())
        rate = 8 / self._costs.parameters[f"{link_of(self._ranks)}.beta"]
        what = "averaging" if compute is None else f"steps that compute {compute * 1e3:.3g} ms"
        why = (
            f"codec='auto' chose {codec}: for the {self._nbytes / 1e6:.3g} MB of gradients over "
            f"links that were measured at {_words(rate)}, {what} would take {times}{self._left}"
        )
        return _Choice(codec, why, self.guess)

    def _share(self, codec: str, share: float) -> float:
        return self._seconds(self._nbytes * share, codec)

    def _seconds(self, nbytes: float, codec: str) -> float:
        """The seconds of a collective of so many bytes of float32."""
        hosts = [list(each) for each in self._ranks.hosts]
        by = _core.Codec(codec)
        core, (collective, _) = self._costs._core, self._way
        return core.choose(collective, self._ranks.size, nbytes, hosts, by)[2]

    def _share_of_low_rank(self, parts: _LowRankParts, share: float) -> float:
        sums = [self._seconds(each * share, "none") for each in parts.factors if each]
        sums += [self._seconds(parts.rest * share, "int8")] if parts.rest else []
        return sum(sums) + _SECONDS_PER_BYTE * parts.whole * share


def _times(model: Model, ranks: Ranks, way: _Way, clock: Clock) -> _Times | _Choice:
    """Measures the links; or says why no codec can pay."""
    gradients = [p for p in model.parameters.values() if p.requires_grad and compressible(p)]
    nbytes = 4 * sum(map(gradient_elements, gradients)) / way.shards
    if ranks.size == 1 or not nbytes:
        return _none("there is nothing to compress")
    on_gpus = any(each.is_cuda for each in gradients)
    costs = ranks.cost_model.parameters
    if on_gpus and len(ranks.hosts) == 1:
        return _none("between GPUs of one host none pays")
    if len(ranks.hosts) == 1 and not costs["within.beta"]:
        return _none("over shared memory none pays")
    found = measured(ranks, clock)
    times = _Times(nbytes, ranks, way, _of_gpus(found) if on_gpus else found)
    if on_gpus:
        times.on_gpus, times.guess = True, _GUESS
    return times


_GUESS = (
    "codec='auto' guesses for GPUs: links between hosts were measured from their CPUs, and costs "
    "of codecs are those of data sheets; name a codec if GPUs exchange by another way"
)


def _of_gpus(found: CostModel) -> CostModel:
    """The built-in costs of GPUs, with links between hosts that were measured."""
    links = {n: found.parameters[n] for n in ("between.beta", "between.latency")}
    return CostModel(_core.gpu_model().parameters | links)


def _none(why: str) -> _Choice:
    return _Choice("none", f"codec='auto' chose none: {why}")


def _words(rate: float) -> str:
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


class _LowRankParts(NamedTuple):
    """Bytes of what lowrank sends with the settings that `register` gives it by default."""

    factors: Sequence[float]
    rest: float  # in int8
    whole: float  # of the matrices that it factors


def _low_rank_parts(model: Model, min_elements: int) -> _LowRankParts:
    outside = set(sensitive(model, min_elements))
    factors, whole, rest = [0.0, 0.0], 0.0, 0.0
    for name, each in model.parameters.items():
        if not each.requires_grad or not compressible(each):
            continue
        rows, *others = gradient_shape(each) or (1,)
        columns, nbytes = math.prod(others), 4.0 * gradient_elements(each)
        if name not in outside and (rows + columns) * _RANK < rows * columns:
            factors[0] += 4 * _RANK * rows
            factors[1] += 4 * _RANK * columns
            whole += nbytes
        else:
            rest += nbytes
    return _LowRankParts(factors, rest, whole)


def _why_not_low_rank(optimizer: torch.optim.Optimizer | None, on_gpus: bool) -> str:
    if on_gpus:
        return "what it costs a GPU was not measured"
    if optimizer is None:
        return "it suits SGD but no adaptive optimizer, and optimizer= was not given"
    if is_adaptive(optimizer):
        return f"with {type(optimizer).__name__} training ends at a higher loss"
    return ""
