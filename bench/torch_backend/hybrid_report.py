"""The table and the picture of hybrid.py, from what its json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.report import OTHERS, OURS, Found
from bench.torch_backend.beside_gloo_report import middle_half, title

LOCAL = "one rank alone"
ALL_DDP, ALL_FSDP = "all DDP", "all FSDP2"
HYBRID_DDP, HYBRID_FSDP = "hybrid, DDP", "hybrid, FSDP2"
HYBRID_INT8 = "hybrid, DDP int8"
WAYS = (ALL_DDP, ALL_FSDP, HYBRID_DDP, HYBRID_FSDP, HYBRID_INT8)
_MEGABYTE = 1e6


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    tables = (
        report.section(f"{ranks} ranks", _bytes(found, ranks), _times(found, ranks))
        for ranks in _ranks(found)
    )
    return report.document(
        "FireCaffe's hybrid beside data parallelism",
        f"{found['date']}; {found['machine']}; {found['batch']} images a rank and step; medians of "
        f"{found['steps']} steps on every rank, in turns. `python {found['command']}`.",
        f"![Bytes and milliseconds of a step]({stem}.png)",
        "*Formula* is 2 (p - 1) / p × 4 bytes × n. For all layers data-parallel n is Σ|W|, the "
        "weights. For the hybrid it is the weights of the data-parallel layers and Σ|D|, the "
        "activations of all ranks' batches where split layers begin and end. *Fewer* is all DDP's "
        "bytes by these.",
        *tables,
    )


def _ranks(found: Found) -> list[str]:
    return list(next(iter(found["links"].values())))


def _networks(found: Found, ranks: str) -> Found:
    """What was measured of each network on the first link."""
    first: Found = next(iter(found["links"].values()))[ranks]
    return first


def _bytes(found: Found, ranks: str) -> list[str]:
    rows = (
        (f"{network}, {way}", *_volume(its, way))
        for network, its in _networks(found, ranks).items()
        for way in WAYS
    )
    sums = "Σ\\|W\\|, millions | Σ\\|D\\|, millions"
    return report.table(f"MB sent a rank and step | {sums} | formula | sent | fewer", rows)


def _volume(its: Found, way: str) -> list[str | None]:
    sent = its["steps"][way]["sent"]
    hybrid = way not in (ALL_DDP, ALL_FSDP)
    weights = its["data_weights"] if hybrid else its["weights"]
    formula = its["formula_hybrid"] if hybrid else its["formula_ddp"]
    return [
        f"{weights / 1e6:.3f}",
        f"{its['activations'] / 1e6:.3f}" if hybrid else None,
        f"{formula / _MEGABYTE:.2f}" if way != HYBRID_INT8 else None,
        f"{sent / _MEGABYTE:.2f}",
        f"{its['steps'][ALL_DDP]['sent'] / sent:.1f}×",
    ]


def _times(found: Found, ranks: str) -> list[str]:
    rows = (
        (f"{network}, {way}", *map(middle_half, _steps(found, ranks, network, way)))
        for network in _networks(found, ranks)
        for way in (LOCAL, *WAYS)
    )
    return report.table(" | ".join(["ms a step", *map(title, found["links"])]), rows)


def _steps(found: Found, ranks: str, network: str, way: str) -> list[Found]:
    """One for each link."""
    return [by_ranks[ranks][network]["steps"][way] for by_ranks in found["links"].values()]


def summary(found: Found) -> list[str]:
    """A row for each network and way, with the most ranks: bytes, and milliseconds by link."""
    ranks = _ranks(found)[-1]
    rows = (
        (
            f"{network}, {way}",
            *_volume(its, way)[2:4],
            *(f"{each['ms']:.0f}" for each in _steps(found, ranks, network, way)),
        )
        for network, its in _networks(found, ranks).items()
        for way in WAYS
    )
    ms = " | ".join(f"ms, {title(link)}" for link in found["links"])
    return report.table(f"{ranks} ranks | MB by the formula | MB sent | {ms}", rows)


def draw(found: Found, path: Path) -> None:
    """Bytes and milliseconds of a step by network and way, with the most ranks."""
    ranks, links = _ranks(found)[-1], found["links"]
    networks = _networks(found, ranks)
    shape = 1 + len(links), len(networks)
    with report.picture(path, report.PAGE, 1.9 * shape[0], *shape, sharey=True) as (figure, rows):
        for column, (network, its) in enumerate(networks.items()):
            _draw_bytes(rows[0][column], network, its)
            for row, link in zip(rows[1:], links, strict=True):
                _draw_times(row[column], link, links[link][ranks][network]["steps"])
        for same in (list(rows[0]), list(rows[1:].flat)):
            most = max(panel.get_xlim()[1] for panel in same)
            for panel in same:
                panel.set_xlim(0, 1.1 * most)
        what = f"One training step on {ranks} ranks, {found['batch']} images each"
        figure.suptitle(f"{what}\nblack: by the formula; dotted: {LOCAL}", fontsize=11)


def _draw_bytes(axes: Any, network: str, its: Found) -> None:
    _bars(axes, [its["steps"][way]["sent"] / _MEGABYTE for way in WAYS], ".1f")
    marks = [its["formula_ddp"]] * 2 + [its["formula_hybrid"]] * 2
    axes.plot([each / _MEGABYTE for each in marks], range(4), "k|", markersize=13)
    axes.set(title=f"{network}: MB sent by a rank")


def _draw_times(axes: Any, link: str, steps: Found) -> None:
    _bars(axes, [steps[way]["ms"] for way in WAYS], ".0f")
    axes.axvline(steps[LOCAL]["ms"], color="black", linestyle=":")
    axes.set(title=f"ms, {title(link.partition(',')[0])}")


def _bars(axes: Any, values: list[float], form: str) -> None:
    colours = [OTHERS if way in (ALL_DDP, ALL_FSDP) else OURS for way in WAYS]
    report.bars(axes, WAYS, values, form, colours)
