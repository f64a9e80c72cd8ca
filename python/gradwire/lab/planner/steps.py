"""The time of a training step: backward, and buckets of gradients that are averaged meanwhile.

DistributedDataParallel puts gradients into buckets in the order in which backward has them, the
last layer's first, and averages one bucket after the other (Li et al. 2020, "PyTorch Distributed",
sec. 3.2). What is not done when backward ends is exposed: the step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.lab.planner.exchanges import Cluster, payloads
from gradwire.lab.planner.tables.network import EMBEDDING, Layer, Network

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes: torch's defaults
_BACKWARD = 2 / 3  # of the time that computing takes: two products of matrices for one forward

SYNCHRONOUS, ACCUMULATED = "synchronous", "accumulated"
LOCAL, SERVER = "local SGD", "asynchronous server"


@dataclass(frozen=True)
class PlannedBucket:
    """Layers whose gradients travel together, and when they are there: a share of backward.

    Of these, `sensitive` are the model's first and last, and embeddings.
    """

    layers: tuple[Layer, ...]
    ready: float
    sensitive: tuple[Layer, ...] = ()


def buckets(network: Network, most: int = _BUCKET) -> list[PlannedBucket]:
    """The buckets of a model, in the order in which backward fills them."""
    whole = network.flops or 1.0
    found: list[tuple[Layer, ...]] = []
    ready: list[float] = []
    waiting: list[Layer] = []
    done = filled = 0.0
    limit = _FIRST_BUCKET
    for layer in reversed(network.layers):
        done += layer.flops
        if not layer.parameters:
            continue
        waiting.append(layer)
        filled += 4.0 * layer.parameters
        if filled >= limit:
            found.append(tuple(waiting))
            ready.append(done / whole)
            waiting, filled, limit = [], 0.0, most
    if waiting:
        found.append(tuple(waiting))
    ends = _sensitive(network)
    return [
        PlannedBucket(layers, at, tuple(each for each in layers if each in ends))
        for layers, at in zip(found, [*ready[: len(found) - 1], 1.0], strict=False)
    ]


def _sensitive(network: Network) -> list[Layer]:
    """The layers that the hook keeps from biased codecs."""
    weighted = [each for each in network.layers if each.weights]
    return [
        each for each in weighted if each.kind == EMBEDDING or each in (weighted[0], weighted[-1])
    ]


@dataclass(frozen=True)
class Prediction:
    """A predicted step: seconds in all, those of computing, and what share of time computes.

    For modes that exchange every k steps, `step` is the mean over k.
    """

    algorithm: str
    codec: str
    mode: str
    step: float
    compute: float

    @property
    def exposed(self) -> float:
        """The seconds of a step in which ranks wait for gradients."""
        return self.step - self.compute

    @property
    def efficiency(self) -> float:
        """The share of the time in which ranks compute: speed-up over ranks."""
        return self.compute / self.step if self.step > 0 else 1.0


def synchronous(
    parts: Sequence[PlannedBucket], compute: float, cluster: Cluster, algorithm: str, codec: str
) -> Prediction:
    """A step that averages all gradients before the optimizer's."""
    backward = _BACKWARD * compute
    done = work = 0.0
    for part in parts:
        ready = compute - backward + part.ready * backward if cluster.overlaps else compute
        for sent in payloads(part.layers, part.sensitive, codec):
            own = cluster.work(sent)
            work += own
            done = max(done, ready) + own if not cluster.overlaps else max(done, ready + own)
            done += cluster.seconds(algorithm, sent.nbytes, sent.codec)
    step = max(compute + work, done) if cluster.ranks > 1 else compute
    return Prediction(algorithm, codec, SYNCHRONOUS, step, compute)


def accumulated(each: Prediction, steps: int) -> Prediction:
    """The mean of `steps` backward passes of which the last one exchanges: batches are larger."""
    step = ((steps - 1) * each.compute + each.step) / steps
    return Prediction(each.algorithm, each.codec, f"{ACCUMULATED} over {steps}", step, each.compute)


def local(
    parts: Sequence[PlannedBucket],
    compute: float,
    cluster: Cluster,
    algorithm: str,
    codec: str,
    steps: int,
) -> Prediction:
    """The mean of `steps` steps of each rank alone, after which parameters are averaged at once."""
    exchanged = 0.0
    for part in parts:
        for sent in payloads(part.layers, part.sensitive, codec):
            exchanged += cluster.work(sent) + cluster.seconds(algorithm, sent.nbytes, sent.codec)
    step = compute + (exchanged / steps if cluster.ranks > 1 else 0.0)
    return Prediction(algorithm, codec, f"{LOCAL}, H = {steps}", step, compute)


def server(
    parts: Sequence[PlannedBucket], compute: float, cluster: Cluster, codec: str, ratio: float
) -> Prediction:
    """A step beside an asynchronous server, a shard on each host (Dean et al. 2012, sec. 4.1).

    Every rank pushes its gradients in the codec and pulls all parameters, while it computes. A
    host's link carries, in each direction, what its ranks push and pull.
    """
    parameters = sum(layer.parameters for part in parts for layer in part.layers)
    hosts = -(-cluster.ranks // cluster.per_host)
    remote = (hosts - 1) / hosts
    nbytes = 4.0 * parameters * (1 + 1 / ratio) * cluster.per_host * remote
    model = cluster.model.parameters
    wire = nbytes * model["between.beta"]
    name = codec.partition(":")[0]
    encode = model.get(f"{name}.encode", 0.0) + model.get(f"{name}.decode", 0.0)
    work = 4.0 * parameters * (encode + 2 * model["between.copy"] * remote + 2 * model["gamma"])
    step = max(compute + work, wire + 2 * model["between.latency"]) if hosts > 1 else compute + work
    return Prediction("direct", codec, SERVER, step, compute)
