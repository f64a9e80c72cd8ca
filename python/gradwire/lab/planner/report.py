"""Reports of advice: as text, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gradwire._base.tables import table
from gradwire._base.units import show_bytes, show_seconds
from gradwire.lab.planner.exchanges import describe, ratio
from gradwire.lab.planner.findings import Findings
from gradwire.lab.planner.steps import SYNCHRONOUS, Prediction
from gradwire.lab.planner.volumes import Volume

_MOST_LAYERS = 24  # in the text; the JSON has all


def text(advice: Findings) -> str:
    """The report that `gradwire advise` prints."""
    parts = [_head(advice), _layers(advice), _totals(advice)]
    if advice.ranks > 1:
        parts += [_synchronous(advice), _modes(advice), _scaling(advice)]
    parts += ["\n".join(advice.sentences), _batch(advice), _assumed(advice)]
    return "\n\n".join(parts)


def to_dict(advice: Findings) -> dict[str, Any]:
    """The advice as plain values."""
    layers = list(advice.network.layers)
    return {
        "model": advice.network.name,
        "sample": advice.network.sample,
        "parameters": advice.network.parameters,
        "ranks": advice.ranks,
        "per_host": advice.cluster.per_host,
        "link_bits_per_second": advice.cluster.topology.levels[0].rate,
        "batch": advice.batch,
        "compute_seconds": advice.compute,
        "bytes_sent": {
            "all_data": advice.all_data,
            "all_model": advice.all_model,
            "hybrid": advice.hybrid,
        },
        "layers": [_layer(each) for each in advice.volumes],
        "predictions": [_prediction(advice, each) for each in advice.predictions],
        "best": _prediction(advice, advice.best),
        "second": _prediction(advice, advice.second),
        "codecs": {each: ratio(layers, each) for each in _codecs(advice.predictions)},
        "weak_scaling": _rows(advice.weak),
        "strong_scaling": _rows(advice.strong),
        "least_batch": advice.least_batch,
        "sentences": list(advice.sentences),
        "assumptions": list(advice.assumptions),
    }


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


def _prediction(advice: Findings, each: Prediction) -> dict[str, Any]:
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


def _head(advice: Findings) -> str:
    network = advice.network
    return (
        f"{network.name}: {network.parameters:,} parameters, {3 * network.flops / 1e9:.3g} Gflop "
        f"to train on {network.sample}\n"
        f"{advice.ranks} ranks, {describe(advice.cluster)}; {advice.batch} samples a rank compute "
        f"for {show_seconds(advice.compute)}"
    )


def _layers(advice: Findings) -> str:
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


def _totals(advice: Findings) -> str:
    return (
        f"all data-parallel {show_bytes(advice.all_data)}, all model-parallel "
        f"{show_bytes(advice.all_model)}, as advised {show_bytes(advice.hybrid)}"
    )


def _synchronous(advice: Findings) -> str:
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


def _modes(advice: Findings) -> str:
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


def _scaling(advice: Findings) -> str:
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


def _batch(advice: Findings) -> str:
    if advice.ranks == 1:
        return "There is nothing to wait for."
    if advice.least_batch is None:
        return "No batch keeps waiting under 10 % of a step without a codec."
    return (
        f"Waiting is under 10 % of a step, without a codec, from {advice.least_batch:,} samples "
        "a rank on."
    )


def _assumed(advice: Findings) -> str:
    return "Assumed:\n" + "\n".join(_wrapped(advice.assumptions))


def _wrapped(lines: Iterable[str]) -> Iterator[str]:
    return (f"- {line}" for line in lines)
