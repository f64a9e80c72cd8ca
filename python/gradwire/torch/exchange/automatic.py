"""codec="auto": the codec that links, model, computing and optimizer suggest.

The links are measured, and the least lossy codec is taken with which a step is predicted to take
hardly longer than with the fastest one. How long a rank computes is known after some steps; then
the ranks choose once more, and before that only averaging counts. Every rank computes the same,
from times on which they agree.

int4 and lowrank are among the codecs only for an optimizer that is known to be linear in the
gradient, such as SGD: before AdamW lowrank costs a higher loss. That int4 suits SGD is a judgement:
whole trainings were measured with AdamW alone, and of those only short ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
_CODECS = ("none", "lossless", "fp16", "int8")
# Of lossless: the bytes of float32 gradients, a little more than in docs/compression.md; and the
# seconds of a processor per byte.
_PACKED, _PACKING = 0.87, sum(_core.Codec("lossless").seconds_per_byte)
_FOR_LINEAR, _LOW_RANK = "int4", "lowrank"


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

    @property
    def codecs(self) -> Sequence[str]:
        """Those between which it chooses."""
        return self._times.steps.codecs

    def computing(self, codec: str, step: float, waited: float) -> float:
        """The seconds for which this rank computes in a step, at whose end it waited.

        A host does not wait for a GPU: there computing is what the cost model leaves of the step
        with its codec.
        """
        if self._times.on_gpus:
            return self._times.steps.compute(codec, step)
        return max(step - waited, 0.0)

    def settings(self, compute: float, most: Callable[[float], float] = float) -> Settings:
        """The settings for ranks that compute so long in a step; guesses were told before.

        `most` tells the largest number that any rank gives.
        """
        found = self._times.choice(compute, most)
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
    return _chosen(
        model, given, _times(model, ranks, _Way(), (given.min_elements, optimizer), clock)
    )


def choose_for_shards(
    model: Model, ranks: Ranks, given: Compression, group: dist.ProcessGroup | None
) -> Chosen:
    """Takes the given codec, or chooses for a model that is sharded; every rank calls it.

    `ranks` have the replicas of a shard, and `group` the shards of a replica; without replicas
    there is no group, and gradients are scattered. lowrank is left out: no shards were trained with
    it.
    """
    way = _Way("reduce_scatter") if group is None else _Way("all_reduce", group.size())
    own: _Times | _Choice | None = None
    if given.codec == AUTO:
        own = _times(model, ranks, way._replace(hides=False), None, time.perf_counter)
    common = [own]
    if group is not None:  # other shards may have other links; ranks with a codec come here too
        dist.broadcast_object_list(common, group=group, group_src=0)
    if own is None:
        return Chosen(settings(model, given))
    return _chosen(model, given, common[0] or own)


def _chosen(model: Model, given: Compression, found: _Times | _Choice) -> Chosen:
    if isinstance(found, _Choice):
        return Chosen(_settings(model, given, found))
    first = found.choice(None)
    return Chosen(_settings(model, given, first), Later(model, given, found, first.codec))


def told(given: Compression, chosen: Settings, later: Later | None) -> str:
    """What ranks compare, since a codec that was given is compared by their calls."""
    if given.codec != AUTO:
        return "another than auto"
    among = "" if later is None else f" of {', '.join(later.codecs)}"
    return f"auto, which chose {chosen.compression.codec}{among}"


def _settings(model: Model, given: Compression, choice: _Choice) -> Settings:
    warm_up = given.warm_up if choice.codec == _LOW_RANK else 0
    chosen = settings(model, replace(given, codec=choice.codec, warm_up=warm_up))
    why = "; ".join(filter(None, [choice.why, chosen.why]))
    return chosen._replace(why=why, guess=choice.guess)


class _Way(NamedTuple):
    """The way of gradients: a collective, over this part of them, beside backward or after it."""

    collective: str = "all_reduce"
    shards: int = 1
    hides: bool = True


class _Times(NamedTuple):
    """Predicted times by codec, and what they rest on; plain data, which ranks can exchange."""

    steps: StepTimes
    rate: float  # of the links, in bit/s
    on_gpus: bool
    left: str = ""  # why a codec is left out

    def choice(self, compute: float | None, most: Callable[[float], float] = float) -> _Choice:
        """The least lossy codec whose step is nearly as fast as the fastest one's.

        With `most`, which tells the largest number of any rank, ranks that round otherwise agree.
        """
        seconds = self.steps.all(compute or 0.0)
        limit = _NEARLY * min(seconds.values())
        own = next(number for number, its in enumerate(seconds.values()) if its <= limit)
        codec = self.steps.codecs[int(most(own))]
        times = ", ".join(f"{name} {its * 1e3:.3g} ms" for name, its in seconds.items())
        what = "averaging" if compute is None else f"steps that compute {compute * 1e3:.3g} ms"
        why = (
            f"codec='auto' chose {codec}: for the {self.steps.nbytes / 1e6:.3g} MB of gradients "
            f"over links that were measured at {_words(self.rate)}, {what} would take "
            f"{times}{self.left}"
        )
        return _Choice(codec, why, _GUESS if self.on_gpus else "")


def _times(
    model: Model,
    ranks: Ranks,
    way: _Way,
    low_rank: tuple[int, torch.optim.Optimizer | None] | None,
    clock: Clock,
) -> _Times | _Choice:
    """Measures the links; or says why no codec can pay.

    With `low_rank`, its min_elements and the optimizer, int4 and lowrank are candidates.
    """
    gradients = [p for p in model.parameters.values() if p.requires_grad and compressible(p)]
    nbytes = 4 * sum(map(gradient_elements, gradients)) / way.shards
    if ranks.size == 1 or not nbytes:
        return _none("there is nothing to compress")
    on_gpus = any(each.is_cuda for each in gradients)
    if on_gpus and len(ranks.hosts) == 1:
        return _none("between GPUs of one host none pays")
    if len(ranks.hosts) == 1 and not ranks.cost_model.parameters["within.beta"]:
        return _none("over shared memory none pays")
    found = measured(ranks, clock)
    costs = _Costs(ranks, _of_gpus(found) if on_gpus else found, way.collective)
    exchanges: dict[str, Exchange] = {
        codec: partial(costs.share, codec, nbytes)
        for codec in _CODECS
        if not (on_gpus and codec == "lossless")  # which packs nothing there
    }
    left = ""
    if low_rank is not None:
        min_elements, optimizer = low_rank
        if optimizer is not None and not is_adaptive(optimizer):
            exchanges[_FOR_LINEAR] = partial(costs.share, _FOR_LINEAR, nbytes)
        if unsuited := _why_not_low_rank(optimizer, on_gpus):
            left = f"; lowrank is left out: {unsuited}"
        else:
            parts = _low_rank_parts(model, min_elements)
            exchanges[_LOW_RANK] = partial(costs.share_of_low_rank, parts)
    hides = way.hides or on_gpus
    return _Times(StepTimes(nbytes, exchanges, hides=hides), costs.rate, on_gpus, left)


# How often a rank sends each byte, nearly.
_ROUNDS = {"all_reduce": 2, "reduce_scatter": 1}


class _Costs(NamedTuple):
    """What a collective of these ranks costs."""

    ranks: Ranks
    model: CostModel
    collective: str

    @property
    def rate(self) -> float:
        """The rate of the links, in bit/s."""
        return 8 / self.model.parameters[f"{link_of(self.ranks)}.beta"]

    def share(self, codec: str, nbytes: float, share: float) -> float:
        """The seconds of a call over a share of so many bytes of float32."""
        if codec == "lossless":
            moved = _ROUNDS[self.collective] * (self.ranks.size - 1) / self.ranks.size
            packing = _PACKING * moved * nbytes * share
            return self.share("none", _PACKED * nbytes, share) + packing
        hosts = [list(each) for each in self.ranks.hosts]
        by, size = _core.Codec(codec), self.ranks.size
        return self.model._core.choose(self.collective, size, nbytes * share, hosts, by)[2]

    def share_of_low_rank(self, parts: _LowRankParts, share: float) -> float:
        """The seconds of what lowrank makes of a share of all gradients."""
        sums = [self.share("none", each, share) for each in parts.factors if each]
        sums += [self.share("int8", parts.rest, share)] if parts.rest else []
        return sum(sums) + _SECONDS_PER_BYTE * parts.whole * share


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
