"""Seconds in which buckets of gradients are averaged, by algorithm and codec, on one cluster."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gradwire import _core
from gradwire import codec as codecs
from gradwire._base import units
from gradwire._model import CostModel
from gradwire.lab.planner.tables.network import Layer
from gradwire.lab.simulation import exchange
from gradwire.lab.simulation.closed_forms import ratio_of
from gradwire.lab.simulation.topology import Topology, flat

LOW_RANK, LOSSLESS = "lowrank", "lossless"
_PLANNED_MESSAGES = 9000  # of a schedule whose events are simulated: a ring of 64 has 8,064
# Times that lowrank's products take as long as adding the matrix, for each rank of its factors. On
# CPUs that is 1.6 ms for the 1.0 M parameters of bench/results/step-times-2026-11-21.md, rank 4.
_FACTORING = 1.7
# The same for residuals and momentum of biased codecs, over adding their arrays: 1.4 ms there, of
# the 2.5 ms that onebit's codec takes.
_FEEDBACK = 6.0
# The same for what the hook does with a bucket of gradients besides averaging it, and the seconds
# of a processor that each bucket takes the hook in Python: about, by processor time of step_times
# with 4 ranks over shared memory, codec none, less the step with a hook that averages nothing, and
# less the all_reduce. That is 1.9 ms for 4.06 MB in 2 buckets, and 8 ms for 41 MB in 3.
_COPIES = 2.0
PER_BUCKET = 8e-4
_SENSITIVE = "int8"  # what the hook takes for layers that biased codecs leave alone
_SPARSE = ("topk", "threshold")
_PLAIN = ""  # the name of the model without a codec
_SAMPLE = 1 << 16  # values
_FEW = 1024.0  # bytes below which a call costs what one of so many does


@dataclass(frozen=True)
class Cluster:
    """Ranks, the network between them, and the cost model of its links."""

    ranks: int
    topology: Topology
    base: CostModel
    by_events: bool = True
    # Ranks that compute on cores: how many share one, the seconds of one that a bucket takes, and
    # whether there are others on which averaging goes on during backward.
    turns: float = 1.0
    per_bucket: float = 0.0
    overlaps: bool = True
    measured: bool = False  # `base` was measured on these links, which the topology says otherwise
    _known: dict[tuple[str, str, float], float] = field(init=False, default_factory=dict)
    _models: dict[str, CostModel] = field(init=False, default_factory=dict)

    @property
    def per_host(self) -> int:
        """The number of ranks of one host."""
        return min(self.topology.per_host, self.ranks)

    @property
    def model(self) -> CostModel:
        """The cost model with the topology's links, or those that were measured."""
        if self.measured:
            return self.base
        if _PLAIN not in self._models:
            model = self.topology.model(self.base)
            self._models[_PLAIN] = model if self.turns == 1 else _taking_turns(model, self.turns)
        return self._models[_PLAIN]

    def work(self, found: Payload) -> float:
        """The processor's seconds for a payload, besides what its codec takes."""
        passes = _FACTORING * found.factored
        if found.codec != "none" and _core.Codec(found.codec).biased:
            passes += _FEEDBACK * found.nbytes
        if self.per_bucket:
            passes += _COPIES * found.nbytes
        return self.turns * (passes * self.base.parameters["gamma"] + self.per_bucket)

    def of(self, ranks: int) -> Cluster:
        """The same cluster with fewer or more ranks."""
        return replace(self, ranks=ranks)

    def at_rate(self, bits: float) -> Cluster:
        """The same cluster with other links between hosts, by closed forms, which are quick."""
        host = self.topology.levels[0]
        latency = host.latency or self.base.parameters["between.latency"]
        link = f"{bits / 1e6}mbit,{latency * 1e6}us"
        inside = self.topology.inside
        text = None if inside is None else f"{inside / 1e6}mbit"
        there = flat(link, host.ranks, text)
        return replace(self, topology=there, by_events=False, measured=False)

    def algorithms(self, codec: str) -> list[str]:
        """The algorithms that can average in a codec, and sensitive layers in theirs."""
        by = _SENSITIVE if codec.partition(":")[0] == LOW_RANK else wire_codec(codec)
        return exchange.algorithms(self.ranks, self.per_host, by)

    def seconds(self, algorithm: str, nbytes: float, codec: str) -> float:
        """The seconds of one all_reduce of an array of `nbytes`.

        Times are found for powers of two, and linear between them.
        """
        if self.ranks == 1 or nbytes <= 0:
            return 0.0
        if codec == LOSSLESS:
            return self._lossless(algorithm, nbytes)
        size = max(nbytes, _FEW)
        below = 2.0 ** math.floor(math.log2(size))
        low, high = (self._at(algorithm, each, codec) for each in (below, 2 * below))
        return low + (high - low) * (size - below) / below

    def _lossless(self, algorithm: str, nbytes: float) -> float:
        """What fewer bytes take, and their packing as if links waited for it, as some of it does.

        Memory that ranks share is not packed.
        """
        link = "between" if self.per_host < self.ranks else "within"
        if not self.model.parameters[f"{link}.beta"]:
            return self.seconds(algorithm, nbytes, "none")
        sent = 2 * (self.ranks - 1) / self.ranks * nbytes
        packing = self.turns * sum(_core.Codec(LOSSLESS).seconds_per_byte) * sent
        return self.seconds(algorithm, usual_share(LOSSLESS, self.ranks) * nbytes, "none") + packing

    def _at(self, algorithm: str, nbytes: float, codec: str) -> float:
        key = algorithm, codec, nbytes
        if key not in self._known:
            share = usual_share(codec, self.ranks)
            self._known[key], _ = exchange.seconds(
                algorithm,
                nbytes * share,
                self.ranks,
                self.topology,
                self._model_of(codec, share),
                codec=codec,
                most_messages=_PLANNED_MESSAGES * self.by_events,
            )
        return self._known[key]

    def _model_of(self, codec: str, share: float) -> CostModel:
        """The model for arrays that stand for others, whose payloads have their usual size.

        An array of that share has the payload that a whole one usually has; encoding it costs as
        much as the whole one.
        """
        if share == 1:
            return self.model
        if codec not in self._models:
            name, parameters = codec.partition(":")[0], self.model.parameters
            ways = (f"{name}.encode", f"{name}.decode")
            self._models[codec] = CostModel(
                parameters | {way: parameters[way] / share for way in ways}
            )
        return self._models[codec]

    def how(self, algorithm: str) -> str:
        """Says how its times are found: exchange.EVENTS or exchange.CLOSED_FORM."""
        few = exchange.messages(algorithm, self.ranks, self.per_host) <= _PLANNED_MESSAGES
        return exchange.EVENTS if few and self.by_events else exchange.CLOSED_FORM


def _taking_turns(model: CostModel, turns: float) -> CostModel:
    """The model of ranks whose work lasts as many times longer as they share a core."""
    work = ("alpha", "copy", "call", "move", "gamma", "encode", "decode")
    parameters = model.parameters
    return CostModel(
        {
            name: value * (turns if name.rpartition(".")[2] in work else 1.0)
            for name, value in parameters.items()
        }
    )


@functools.cache
def usual_share(codec: str, ranks: int) -> float:
    """The bytes that a codec usually sends, over those that the model takes payloads to have.

    Values are taken to be normally distributed. Sparse payloads of few ranks are gathered: a rank
    sends p - 1 of them, where a ring sends 2 (p - 1) / p. Of lossless the model takes the bytes of
    the array.
    """
    if codec in ("none", LOW_RANK):
        return 1.0
    gathered = max(1.0, ranks / 2) if codec.partition(":")[0] in _SPARSE else 1.0
    x = np.random.default_rng(1).standard_normal(_SAMPLE).astype(np.float32)
    assumed = x.nbytes if codec == LOSSLESS else _core.Codec(codec).usual_bytes(_SAMPLE)
    return min(1.0, gathered * len(codecs.get(codec).encode(x)) / assumed)


def wire_codec(codec: str) -> str:
    """The codec in which arrays are summed: lowrank's factors as they are, as those of lossless."""
    return "none" if codec.partition(":")[0] in (LOW_RANK, LOSSLESS) else codec


@dataclass(frozen=True)
class Payload:
    """An array that is averaged in a step, and the bytes of matrices times rank to be factored."""

    nbytes: float
    codec: str
    factored: float = 0.0


def payload(layers: list[Layer], codec: str) -> Payload:
    """The array that a bucket of layers becomes: lowrank averages two factors of each matrix."""
    elements = sum(each.parameters for each in layers)
    name, _, options = codec.partition(":")
    if name != LOW_RANK:
        return Payload(4.0 * elements, codec)
    _core.Codec(codec)  # raises InvalidArgument for wrong options
    rank = int(options.partition("=")[2] or 4)
    saved = work = 0
    for layer in layers:
        for rows, columns in layer.matrices:
            if layer.weights and (rows + columns) * rank < rows * columns:
                saved += rows * columns - (rows + columns) * rank
                work += rows * columns * rank
    return Payload(4.0 * (elements - saved), "none", 4.0 * work)


def payloads(layers: Sequence[Layer], sensitive: Sequence[Layer], codec: str) -> list[Payload]:
    """The arrays that a bucket becomes; biased codecs leave its `sensitive` layers to int8."""
    if not _core.Codec(codec).biased:
        return [payload(list(layers), codec)]
    inner = [each for each in layers if each not in sensitive]
    parts = ((inner, codec), ([each for each in layers if each in sensitive], _SENSITIVE))
    return [payload(some, by) for some, by in parts if any(each.parameters for each in some)]


def ratio(layers: list[Layer], codec: str) -> float:
    """The factor by which a codec makes the payload of all layers smaller on one rank."""
    whole = 4.0 * sum(each.parameters for each in layers)
    found = payload(layers, codec)
    own = found.nbytes
    if found.codec == LOSSLESS:
        own *= usual_share(found.codec, 1)
    elif found.codec != "none":
        own *= ratio_of(found.codec, found.nbytes) * usual_share(found.codec, 1)
    return whole / own if own else 1.0


def describe(cluster: Cluster) -> str:
    """The cluster in words."""
    host = cluster.topology.levels[0]
    hosts = -(-cluster.ranks // cluster.per_host)
    return f"{hosts} hosts of {cluster.per_host}, joined by {units.show_rate(host.rate)}"
