"""codec="auto": the codec that links, model and optimizer suggest.

Over links of 10 Gbit/s and more no codec paid (docs/compression.md). Over slower ones the least
lossy codec is taken whose exchange the cost model predicts to take not much longer than the fastest
one's. Every rank computes the same, from rank 0's cost model.

lowrank is one of them only for an optimizer that is known to be linear in the gradient, such as
SGD: before AdamW it costs a higher loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire import _core
from gradwire._communicator import Communicator
from gradwire.torch.exchange.compression import AUTO, Compression
from gradwire.torch.exchange.defaults import Model, Settings, sensitive, settings
from gradwire.torch.exchange.optimizer_watch import is_adaptive
from gradwire.torch.exchange.rules import compressible, gradient_elements, gradient_shape

_FAST = 9e9  # bit/s, of which Ethernet of 10 Gbit/s has 9.5 for data
# Of the fastest exchange's time, what a less lossy codec may take.
_NEARLY = 1.25
_RANK = 4  # of lowrank without options
# Of a processor per byte of matrices, in lowrank: 1.69 ms for 4 MiB (codecs-2026-11-21.md).
_SECONDS_PER_BYTE = 4e-10


class _Choice(NamedTuple):
    """A codec, and why it was chosen."""

    codec: str
    why: str


def choose(
    model: Model,
    communicator: Communicator,
    given: Compression,
    optimizer: torch.optim.Optimizer | None,
) -> Settings:
    """Takes the given codec, or chooses for a model whose gradients these ranks average.

    The choice is the same on all ranks, and the result has its reason.
    """
    if given.codec != AUTO:
        return settings(model, given)
    codec, why = _choose(model, communicator, "all_reduce", 1, (given.min_elements, optimizer))
    return _settings(model, given, codec, why)


def choose_for_shards(
    model: Model, communicator: Communicator, given: Compression, group: dist.ProcessGroup | None
) -> Settings:
    """Takes the given codec, or chooses for a model that is sharded; every rank calls it.

    `communicator` joins the replicas of a shard, and `group` the shards of a replica; without
    replicas there is no group, and gradients are scattered. lowrank is left out: no shards were
    trained with it.
    """
    collective, shards = ("reduce_scatter", 1) if group is None else ("all_reduce", group.size())
    own = _choose(model, communicator, collective, shards) if given.codec == AUTO else None
    choice = [own]
    if group is not None:  # other shards may have other links; ranks with a codec come here too
        dist.broadcast_object_list(choice, group=group, group_src=0)
    if own is None:
        return settings(model, given)
    return _settings(model, given, *(choice[0] or own))


def told(given: Compression, chosen: Settings) -> str:
    """What ranks compare, since a codec that was given is compared by their calls."""
    if given.codec != AUTO:
        return "another than auto"
    return f"auto, which chose {chosen.compression.codec}"


def _settings(model: Model, given: Compression, codec: str, why: str) -> Settings:
    warm_up = given.warm_up if codec == "lowrank" else 0
    chosen = settings(model, replace(given, codec=codec, warm_up=warm_up))
    return chosen._replace(why="; ".join(filter(None, [why, chosen.why])))


def _choose(
    model: Model,
    communicator: Communicator,
    collective: str,
    shards: int,
    low_rank: tuple[int, torch.optim.Optimizer | None] | None = None,
) -> _Choice:
    """Chooses a codec of the collective; lowrank too where its settings are given.

    These are min_elements and the optimizer.
    """
    gradients = [p for p in model.parameters.values() if p.requires_grad and compressible(p)]
    nbytes = 4 * sum(map(gradient_elements, gradients)) / shards
    if communicator.size == 1 or not nbytes:
        return _none("there is nothing to compress")
    on_gpus = any(each.is_cuda for each in gradients)
    rate = _rate(communicator, on_gpus)
    if math.isinf(rate):
        return _none(f"{'between GPUs of one host' if on_gpus else 'over shared memory'} none pays")
    if rate >= _FAST:
        return _none(
            f"links of {_words(rate)} by the cost model are too fast for a codec to pay; if they "
            "are slower, `gradwire tune` measures them"
        )
    codecs = ("none", "fp16", "int8")
    seconds = {each: _seconds(communicator, nbytes, each, collective) for each in codecs}
    left = ""
    if low_rank is not None:
        min_elements, optimizer = low_rank
        its = _seconds_of_low_rank(communicator, model, min_elements)
        if unsuited := _why_not_low_rank(optimizer, on_gpus):
            left = f"; lowrank, {its * 1e3:.3g} ms, is left out: {unsuited}"
        else:
            seconds["lowrank"] = its
    limit = _NEARLY * min(seconds.values())
    codec = next(name for name, its in seconds.items() if its <= limit)
    times = ", ".join(f"{name} {its * 1e3:.3g} ms" for name, its in seconds.items())
    return _Choice(
        codec,
        f"codec='auto' chose {codec}: over links of {_words(rate)} the {nbytes / 1e6:.3g} MB of "
        f"gradients take {times}, by the cost model{left}",
    )


def _none(why: str) -> _Choice:
    return _Choice("none", f"codec='auto' chose none: {why}")


def _rate(communicator: Communicator, on_gpus: bool) -> float:
    """The rate of the slowest links, in bit/s; of shared memory it is infinite.

    So is that of GPUs of one host, which the cost model does not describe.
    """
    costs = communicator.cost_model.parameters
    hosts = communicator.hosts
    within = not on_gpus and any(len(each) > 1 for each in hosts)
    betas = [costs["within.beta"] if within else 0.0]
    betas += [costs["between.beta"]] if len(hosts) > 1 else []
    return float(f"{8 / max(betas):.6g}") if max(betas) > 0 else math.inf  # 1e9, not 1e9 - 1e-7


def _words(rate: float) -> str:
    return f"{rate / 1e9:.3g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:.3g} Mbit/s"


def _seconds(
    communicator: Communicator, nbytes: float, codec: str, collective: str = "all_reduce"
) -> float:
    """The seconds of a collective of so many bytes of float32."""
    hosts = [list(each) for each in communicator.hosts]
    core = communicator.cost_model._core
    return core.choose(collective, communicator.size, nbytes, hosts, _core.Codec(codec))[2]


def _seconds_of_low_rank(communicator: Communicator, model: Model, min_elements: int) -> float:
    """The seconds of an exchange with the settings that `register` gives lowrank by default."""
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
    sums = [_seconds(communicator, each, "none") for each in factors if each]
    sums += [_seconds(communicator, rest, "int8")] if rest else []
    return sum(sums) + _SECONDS_PER_BYTE * whole


def _why_not_low_rank(optimizer: torch.optim.Optimizer | None, on_gpus: bool) -> str:
    if on_gpus:
        return "what it costs a GPU was not measured"
    if optimizer is None:
        return "it suits SGD but no adaptive optimizer, and optimizer= was not given"
    if is_adaptive(optimizer):
        return f"with {type(optimizer).__name__} training ends at a higher loss"
    return ""
