"""Advice on a model and a cluster: bytes, step times, and whether more ranks are worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gradwire._base import arguments, units
from gradwire._errors import InvalidArgument
from gradwire._model import CostModel
from gradwire.lab.planner import devices, judgement, walk
from gradwire.lab.planner.exchanges import LOSSLESS, PER_BUCKET, Cluster, ratio, wire_codec
from gradwire.lab.planner.optimizers import Optimizer
from gradwire.lab.planner.report import Advice
from gradwire.lab.planner.steps import (
    SYNCHRONOUS,
    Prediction,
    accumulated,
    buckets,
    local,
    server,
    synchronous,
)
from gradwire.lab.planner.tables import catalogue
from gradwire.lab.planner.tables.network import Network
from gradwire.lab.planner.volumes import volumes
from gradwire.lab.simulation.exchange import check_codec
from gradwire.lab.simulation.topology import Topology, flat

CODECS = ("none", "lossless", "fp16", "int8", "int4", "onebit", "topk", "lowrank")
Progress = Callable[[float, str], None]
_PREDICTED, _JUDGED = 0.6, 0.8  # of the progress: all steps are predicted, sentences are made


def advise(
    model: str,
    *,
    ranks: int,
    link: str,
    per_host: int = 1,
    batch: int = 32,
    compute: float | None = None,
    device: str | None = None,
    optimizer: str | None = None,
    sample: str | Sequence[str] | None = None,
    cores: int | None = None,
    codecs: Sequence[str] | None = None,
    accumulate: int = 4,
    local_steps: int = 16,
    cost_model: CostModel | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Predicts how a model trains on `ranks` ranks: bytes, step times, and what is worth it.

    `model` is a name of the catalogue (resnet50, gpt2, vgg16, …), or ``module:callable`` that
    returns a torch module, which is walked on the meta device with one `sample`: its shape without
    the batch, as "3,224,224" or "1024:int64", or a list of them for a forward of several inputs.
    Hosts have `per_host` ranks, and are joined by a `link`, as "10gbit,50us". `compute` is the
    seconds of a step of one rank alone, with `batch` samples; without it they are estimated
    for a `device`: h200, h100, a100 or cpu; by default this machine's. Where ranks compute on a
    host's `cores`, those that share one take turns, and without a spare one nothing is averaged
    during backward.

    `optimizer` is a name, as "adamw" or "OneBitAdam"; by default it is taken to be SGD. Only codecs
    that docs/compression.md allows it are considered.

    Steps are predicted for every algorithm and each of `codecs`: synchronous, accumulated over
    `accumulate` steps, as local SGD with `local_steps`, and beside an asynchronous server.
    `cost_model` replaces the built-in one, but for the rate and latency of `link`. `progress` is
    called with the share that is done, and a text.

    Raises InvalidArgument for an unknown model, one that cannot be walked, impossible numbers, and
    codecs that the optimizer cannot take.
    """
    network = _network(model, sample)
    ranks = arguments.whole(ranks, "ranks", least=1)
    batch = arguments.whole(batch, "batch", least=1)
    here = devices.here() if device is None else devices.device(arguments.text(device, "device"))
    seconds, assumptions = _compute(network, batch, compute, here)
    its = Optimizer.of(optimizer, network)
    topology = _topology(link, per_host, here)
    base = cost_model or devices.cost_model(here)
    cluster = Cluster(ranks, topology, base, **_sharing(cores, topology.per_host, here))
    seconds *= cluster.turns
    modes = _Modes(
        arguments.whole(accumulate, "accumulate", least=1),
        arguments.whole(local_steps, "local_steps", least=1),
    )
    if its.after_backward:
        cluster = replace(cluster, overlaps=False)
    names = _codecs(its, codecs, here.inside is not None)
    tell = progress or (lambda *_: None)
    predictions = _predict(network, seconds, cluster, names, modes, tell)
    assumptions += its.assumptions()
    found = _advice(network, batch, seconds, cluster, predictions, assumptions, tell)
    if its.offers_one_bit and found.ranks > 1:
        found = replace(found, sentences=(*found.sentences, _one_bit(network, seconds, cluster)))
    return found


def _advice(
    network: Network,
    batch: int,
    compute: float,
    cluster: Cluster,
    predictions: Sequence[Prediction],
    assumptions: Sequence[str],
    progress: Progress,
) -> Advice:
    progress(_PREDICTED, "what pays")
    best, second = _two_best(predictions)
    judge = judgement.Judge(network, batch, compute, cluster, predictions)
    sentences = tuple(judge.sentences())
    progress(_JUDGED, "scaling")
    found = Advice(
        network=network,
        ranks=cluster.ranks,
        batch=batch,
        compute=compute,
        cluster=cluster,
        volumes=tuple(volumes(network, cluster.ranks, batch)),
        predictions=tuple(predictions),
        best=best,
        second=second,
        sentences=sentences,
        weak=tuple(judge.weak()),
        strong=tuple(judge.strong()),
        least_batch=judge.least_batch(),
        assumptions=(*assumptions, *_ASSUMPTIONS),
    )
    progress(1.0, "")
    return found


_ASSUMPTIONS = (
    "backward takes two thirds of computing, layers by their operations; buckets are torch's",
    "codecs may cost accuracy: docs/compression.md has what was measured",
)


@dataclass(frozen=True)
class _Modes:
    accumulate: int
    local_steps: int


def _codecs(optimizer: Optimizer, given: Sequence[str] | None, on_gpus: bool) -> list[str]:
    """The codecs, each once, after "none"."""
    if given is not None:
        texts = arguments.items(given, "codecs", 'a list of codecs: ["fp16", "int8"]')
        given = [check_codec(arguments.text(each, "codecs")) for each in texts]
    usual = [each for each in CODECS if not (on_gpus and each == LOSSLESS)]  # packs nothing there
    return list(dict.fromkeys(["none", *optimizer.choose(given, usual)]))


def _one_bit(network: Network, compute: float, cluster: Cluster) -> str:
    """What OneBitAdam would bring, which averages after backward."""
    here, parts = replace(cluster, overlaps=False), buckets(network)
    step = min(
        synchronous(parts, compute, here, algorithm, "onebit").step
        for algorithm in here.algorithms("onebit")
    )
    return (
        "gradwire.torch.OneBitAdam, which compresses after AdamW's arithmetic, would take "
        f"{units.show_seconds(step)} a step after its warm-up (docs/optimizers.md)."
    )


def _sharing(cores: int | None, per_host: int, device: devices.Device) -> dict[str, Any]:
    """Cluster's arguments for ranks that compute on cores."""
    if cores is None:
        return {} if device.inside is not None else {"per_bucket": PER_BUCKET}
    count = arguments.whole(cores, "cores", least=1)
    turns = max(1.0, per_host / count)
    return {"turns": turns, "per_bucket": PER_BUCKET, "overlaps": count > per_host}


def _network(model: str, sample: str | Sequence[str] | None) -> Network:
    name = arguments.text(model, "model")
    if ":" in name:
        return walk.walk(name, sample)
    return catalogue.network(name)


def _compute(
    network: Network, batch: int, given: float | None, device: devices.Device
) -> tuple[float, list[str]]:
    if given is not None:
        if not math.isfinite(compute := arguments.seconds(given, "compute")):
            raise InvalidArgument(f"compute={given} is not finite")
        return compute, []
    seconds = device.seconds(3 * network.flops * batch)
    if not seconds > 0:
        raise InvalidArgument(f"{network.name} has no operations that can be counted: give compute")
    return seconds, [device.assumption()]


def _topology(link: str, per_host: int, device: devices.Device) -> Topology:
    each = arguments.whole(per_host, "per_host", least=1)
    inside = None if device.inside is None else f"{device.inside / 1e9}gbit"
    return flat(arguments.text(link, "link"), each, inside)


def _predict(
    network: Network,
    compute: float,
    cluster: Cluster,
    codecs: Sequence[str],
    modes: _Modes,
    progress: Progress,
) -> list[Prediction]:
    parts = buckets(network)
    layers = list(network.layers)
    found: list[Prediction] = []
    pairs = [(codec, name) for codec in codecs for name in cluster.algorithms(codec)]
    for index, (codec, algorithm) in enumerate(pairs):
        progress(_PREDICTED * index / len(pairs), f"{algorithm}, {codec}")
        step = synchronous(parts, compute, cluster, algorithm, codec)
        averaged = partial(local, parts, compute, cluster, algorithm, codec)
        found += [step, accumulated(step, modes.accumulate), averaged(modes.local_steps)]
    for codec in codecs:
        if codec == wire_codec(codec):
            found.append(server(parts, compute, cluster, codec, ratio(layers, codec)))
    return found


def _two_best(found: Sequence[Prediction]) -> tuple[Prediction, Prediction]:
    """The best synchronous step and the next, by another codec or algorithm."""
    left = [each for each in found if each.mode == SYNCHRONOUS]
    best = _best(left)
    return best, _best([each for each in left if each is not best] or left)


def _best(found: Sequence[Prediction]) -> Prediction:
    """The fastest step, or one that is hardly slower and changes training less."""
    least = min(each.step for each in found)
    near = [each for each in found if each.step <= judgement.WORTH * least]
    return min(near, key=lambda each: (judgement.loss(each.codec), each.codec != "none", each.step))
