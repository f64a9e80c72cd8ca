"""Advice: what `advise` finds, as text, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradwire._base.tables import table
from gradwire._base.units import show_bytes, show_seconds
from gradwire.lab.planner.exchanges import Cluster, describe, ratio
from gradwire.lab.planner.steps import SYNCHRONOUS, Prediction
from gradwire.lab.planner.tables.network import Network
from gradwire.lab.planner.volumes import Volume, total

_MOST_LAYERS = 24  # in the text; the JSON has all


@dataclass(frozen=True, repr=False)
class Advice:
    """The result of `advise`; its str is a report.

    `volumes` has every layer, `predictions` every algorithm, codec and way to train, and `best` and
    `second` are the fastest synchronous ones. `sentences` say what pays, `weak` and `strong` how
    training scales: tuples of ranks, seconds of a step and speed-up over one rank. `batch` samples
    on each of `ranks` take `compute` seconds; `least_batch` is the number from which ranks wait for
    less than a tenth of a step, without a codec; None if there is none.
    """

    network: Network
    ranks: int
    batch: int
    compute: float
    cluster: Cluster
    volumes: tuple[Volume, ...]
    predictions: tuple[Prediction, ...]
    best: Prediction
    second: Prediction
    sentences: tuple[str, ...]
    weak: tuple[tuple[int, float, float], ...]
    strong: tuple[tuple[int, float, float], ...]
    least_batch: int | None
    assumptions: tuple[str, ...]

    @property
    def all_data(self) -> float:
        """Bytes that a rank sends in a step if all layers are data-parallel."""
        return total(self.volumes, "data")

    @property
    def all_model(self) -> float:
        """Bytes that a rank sends in a step if all layers are model-parallel."""
        return total(self.volumes, "model")

    @property
    def hybrid(self) -> float:
        """Bytes that a rank sends in a step if each layer goes the advised way."""
        return total(self.volumes)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON: bytes, seconds, shares."""
        layers = list(self.network.layers)
        return {
            "model": self.network.name,
            "sample": self.network.sample,
            "parameters": self.network.parameters,
            "ranks": self.ranks,
            "per_host": self.cluster.per_host,
            "link_bits_per_second": self.cluster.topology.levels[0].rate,
            "batch": self.batch,
            "compute_seconds": self.compute,
            "bytes_sent": {
                "all_data": self.all_data,
                "all_model": self.all_model,
                "hybrid": self.hybrid,
            },
            "layers": [_layer(each) for each in self.volumes],
            "predictions": [_prediction(self, each) for each in self.predictions],
            "best": _prediction(self, self.best),
            "second": _prediction(self, self.second),
            "codecs": {each: ratio(layers, each) for each in _codecs(self.predictions)},
            "weak_scaling": _rows(self.weak),
            "strong_scaling": _rows(self.strong),
            "least_batch": self.least_batch,
            "sentences": list(self.sentences),
            "assumptions": list(self.assumptions),
        }

    def __str__(self) -> str:
        parts = [_head(self), _layers(self), _totals(self)]
        if self.ranks > 1:
            parts += [_synchronous(self), _modes(self), _scaling(self)]
        parts += ["\n".join(self.sentences), _batch(self), _assumed(self)]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        best = f"{self.best.algorithm} with {self.best.codec}"
        return f"<Advice {self.network.name} on {self.ranks} ranks: {best}>"


def _layer(each: Volume) -> dict[str, Any]:
    return {
        "name": each.layer.name,
        "kind": each.layer.kind,
        "weights": each.layer.weights,
        "parameters": each.layer.parameters,
        "activations": each.activations,
        "bytes_sent": each.sent,
        "advice": each.advice,
    }


def _prediction(advice: Advice, each: Prediction) -> dict[str, Any]:
    return {
        "algorithm": each.algorithm,
        "codec": each.codec,
        "mode": each.mode,
        "step_seconds": each.step,
        "exposed_seconds": each.exposed,
        "efficiency": each.efficiency,
        "found_by": advice.cluster.how(each.algorithm),
    }


def _rows(rows: Iterable[tuple[int, float, float]]) -> list[dict[str, float]]:
    return [{"ranks": p, "step_seconds": step, "speed_up": gain} for p, step, gain in rows]


def _head(advice: Advice) -> str:
    network = advice.network
    return (
        f"{network.name}: {network.parameters:,} parameters, {3 * network.flops / 1e9:.3g} Gflop "
        f"to train on {network.sample}\n"
        f"{advice.ranks} ranks, {describe(advice.cluster)}; {advice.batch} samples a rank compute "
        f"for {show_seconds(advice.compute)}"
    )


def _layers(advice: Advice) -> str:
    shown = sorted(advice.volumes, key=lambda each: -each.sent["data"])[:_MOST_LAYERS]
    names = {id(each) for each in shown}
    rows = [["layer", "kind", "|W|", "|D|", "as data", "as model", "advice"]]
    for each in advice.volumes:
        if id(each) in names:
            model = show_bytes(each.sent["model"])
            rows.append(
                [
                    each.layer.name,
                    each.layer.kind,
                    f"{each.layer.weights:,}",
                    f"{each.activations:,}",
                    show_bytes(each.sent["data"]),
                    model,
                    each.advice,
                ]
            )
    left = len(advice.volumes) - len(shown)
    more = f"\n… and {left} smaller layers, which --json lists" if left else ""
    return "Bytes that a rank sends in a step\n" + table(rows) + more


def _totals(advice: Advice) -> str:
    return (
        f"all data-parallel {show_bytes(advice.all_data)}, all model-parallel "
        f"{show_bytes(advice.all_model)}, as advised {show_bytes(advice.hybrid)}"
    )


def _synchronous(advice: Advice) -> str:
    found = {
        (each.algorithm, each.codec): each
        for each in advice.predictions
        if each.mode == SYNCHRONOUS
    }
    codecs = _codecs(found.values())
    names = list(dict.fromkeys(name for name, _ in found))
    rows = [["algorithm", *codecs, "found by"]]
    for name in names:
        cells = [
            show_seconds(found[name, codec].step) if (name, codec) in found else "–"
            for codec in codecs
        ]
        rows.append([name, *cells, advice.cluster.how(name)])
    best, second = (_named(each) for each in (advice.best, advice.second))
    return f"Seconds of a synchronous step\n{table(rows)}\nbest: {best}\nsecond: {second}"


def _named(each: Prediction) -> str:
    return (
        f"{each.algorithm} with {each.codec}: {show_seconds(each.step)}, of which "
        f"{show_seconds(each.exposed)} waiting; efficiency {each.efficiency:.0%}"
    )


def _modes(advice: Advice) -> str:
    """The fastest algorithm of each codec, by the way to train."""
    fastest: dict[tuple[str, str], Prediction] = {}
    for each in advice.predictions:
        key = each.mode, each.codec
        if key not in fastest or each.step < fastest[key].step:
            fastest[key] = each
    codecs = _codecs(advice.predictions)
    rows = [["way to train", *codecs]]
    for mode in dict.fromkeys(each.mode for each in advice.predictions):
        cells = [fastest.get((mode, codec)) for codec in codecs]
        rows.append([mode, *("–" if each is None else _cell(each) for each in cells)])
    return "Seconds of a step, and efficiency, by the fastest algorithm\n" + table(rows)


def _cell(each: Prediction) -> str:
    return f"{show_seconds(each.step)} {each.efficiency:.0%}"


def _codecs(predictions: Iterable[Prediction]) -> list[str]:
    return list(dict.fromkeys(each.codec for each in predictions))


def _scaling(advice: Advice) -> str:
    rows = [["ranks", "step", "speed-up", "step, shared batch", "speed-up"]]
    for (ranks, step, gain), (_, shared, more) in zip(advice.weak, advice.strong, strict=True):
        rows.append(
            [
                str(ranks),
                show_seconds(step),
                f"{gain:.1f}",
                show_seconds(shared),
                f"{more:.2f}",
            ]
        )
    return (
        f"Scaling without a codec: {advice.batch} samples a rank (weak), and {advice.batch} shared "
        f"by all (strong)\n{table(rows)}"
    )


def _batch(advice: Advice) -> str:
    if advice.ranks == 1:
        return "There is nothing to wait for."
    if advice.least_batch is None:
        return "No batch keeps waiting under 10 % of a step without a codec."
    return (
        f"Waiting is under 10 % of a step, without a codec, from {advice.least_batch:,} samples "
        "a rank on."
    )


def _assumed(advice: Advice) -> str:
    return "\n".join(["Assumed:", *(f"- {line}" for line in advice.assumptions)])
