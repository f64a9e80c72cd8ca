"""The table and the picture of hybrid.py, from what its json holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NO_LINK = "none"
LOCAL = "one rank alone"
ALL_DDP, ALL_FSDP = "all DDP", "all FSDP2"
HYBRID_DDP, HYBRID_FSDP = "hybrid, DDP", "hybrid, FSDP2"
HYBRID_INT8 = "hybrid, DDP int8"
WAYS = (ALL_DDP, ALL_FSDP, HYBRID_DDP, HYBRID_FSDP, HYBRID_INT8)
_MEGABYTE = 1e6

Found = Mapping[str, Any]


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    lines = [
        "# FireCaffe's hybrid beside data parallelism",
        "",
        f"{found['date']}; {found['machine']}; {found['batch']} images a rank and step; medians of "
        f"{found['steps']} steps on every rank, in turns. `python {found['command']}`.",
        "",
        f"![Bytes and milliseconds of a step]({stem}.png)",
        "",
        "*Formula* is 2 (p - 1) / p × 4 bytes × n. For all layers data-parallel n is Σ|W|, the "
        "weights. For the hybrid it is the weights of the data-parallel layers and Σ|D|, the "
        "activations of all ranks' batches where split layers begin and end. *Fewer* is all DDP's "
        "bytes by these.",
    ]
    for ranks in _ranks(found):
        lines += ["", f"## {ranks} ranks", "", *_bytes(found, ranks), "", *_times(found, ranks)]
    return "\n".join(lines) + "\n"


def _ranks(found: Found) -> list[str]:
    return list(next(iter(found["links"].values())))


def _networks(found: Found, ranks: str) -> Found:
    """What was measured of each network on the first link."""
    first: Found = next(iter(found["links"].values()))[ranks]
    return first


def _bytes(found: Found, ranks: str) -> Iterator[str]:
    sums = "Σ\\|W\\|, millions | Σ\\|D\\|, millions"
    yield f"| MB sent a rank and step | {sums} | formula | sent | fewer |"
    yield "|---|---:|---:|---:|---:|---:|"
    for network, its in _networks(found, ranks).items():
        for way in WAYS:
            cells = _volume(its, way)
            yield f"| {network}, {way} | {' | '.join(cells)} |"


def _volume(its: Found, way: str) -> list[str]:
    sent = its["steps"][way]["sent"]
    hybrid = way not in (ALL_DDP, ALL_FSDP)
    weights = its["data_weights"] if hybrid else its["weights"]
    formula = its["formula_hybrid"] if hybrid else its["formula_ddp"]
    return [
        f"{weights / 1e6:.3f}",
        f"{its['activations'] / 1e6:.3f}" if hybrid else "–",
        f"{formula / _MEGABYTE:.2f}" if way != HYBRID_INT8 else "–",
        f"{sent / _MEGABYTE:.2f}",
        f"{its['steps'][ALL_DDP]['sent'] / sent:.1f}×",
    ]


def _times(found: Found, ranks: str) -> Iterator[str]:
    links = list(found["links"])
    yield f"| ms a step | {' | '.join(map(title, links))} |"
    yield "|---|" + "---:|" * len(links)
    for network in _networks(found, ranks):
        for way in (LOCAL, *WAYS):
            cells = [_middle(found["links"][link][ranks][network]["steps"][way]) for link in links]
            yield f"| {network}, {way} | {' | '.join(cells)} |"


def summary(found: Found) -> Iterator[str]:
    """A row for each network and way, with the most ranks: bytes, and milliseconds by link."""
    ranks, links = _ranks(found)[-1], list(found["links"])
    yield f"| {ranks} ranks | MB by the formula | MB sent | {' | '.join(map(_in_ms, links))} |"
    yield "|---|---:|---:|" + "---:|" * len(links)
    for network, its in _networks(found, ranks).items():
        for way in WAYS:
            _, _, formula, sent, _ = _volume(its, way)
            steps = [found["links"][link][ranks][network]["steps"][way] for link in links]
            times = [f"{each['ms']:.0f}" for each in steps]
            yield f"| {network}, {way} | {formula} | {sent} | {' | '.join(times)} |"


def _in_ms(link: str) -> str:
    return f"ms, {title(link)}"


def _middle(step: Found) -> str:
    low, high = step["middle_half_ms"]
    return f"{step['ms']:.1f} ({low:.1f} to {high:.1f})"


def title(link: str) -> str:
    """A link, for a table."""
    return "shared memory" if link == NO_LINK else f"emulated {link.replace(',', ', ')}"


def draw(found: Found, path: Path) -> None:
    """Bytes and milliseconds of a step by network and way, with the most ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks, links = _ranks(found)[-1], list(found["links"])
    networks = _networks(found, ranks)
    figure, axes = pyplot.subplots(
        len(networks),
        1 + len(links),
        figsize=(3.6 * (1 + len(links)), 2.9 * len(networks)),
        squeeze=False,
        layout="constrained",
    )
    for row, (network, its) in zip(axes, networks.items(), strict=True):
        _draw_bytes(row[0], network, its)
        for panel, link in zip(row[1:], links, strict=True):
            _draw_times(panel, link, found["links"][link][ranks][network]["steps"])
    heading = f"One training step on {ranks} ranks, {found['batch']} images each; dotted: {LOCAL}"
    figure.suptitle(heading)
    figure.savefig(path, dpi=100)


def _draw_bytes(axes: Any, network: str, its: Found) -> None:
    sent = [its["steps"][way]["sent"] / _MEGABYTE for way in WAYS]
    _bars(axes, sent, "{:.2f}")
    marks = [its["formula_ddp"]] * 2 + [its["formula_hybrid"]] * 2
    axes.plot([each / _MEGABYTE for each in marks], range(4), "k|", markersize=16, label="formula")
    axes.legend(loc="lower right", fontsize=8)
    axes.set(title=f"{network}: MB sent by a rank")


def _draw_times(axes: Any, link: str, steps: Found) -> None:
    _bars(axes, [steps[way]["ms"] for way in WAYS], "{:.0f}")
    axes.axvline(steps[LOCAL]["ms"], color="#777777", linestyle=":")
    axes.set(title=f"ms, {title(link)}")
    axes.set_yticklabels([])


def _bars(axes: Any, values: list[float], form: str) -> None:
    colours = ["#b3123a" if way in (ALL_DDP, ALL_FSDP) else "#1463b0" for way in WAYS]
    axes.barh(range(len(WAYS)), values, color=colours)
    for place, value in enumerate(values):
        axes.text(value, place, " " + form.format(value), va="center", fontsize=8)
    axes.set_yticks(range(len(WAYS)), labels=WAYS)
    axes.invert_yaxis()
    axes.margins(x=0.2)
