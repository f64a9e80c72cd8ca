"""The table and the picture of step_times.py, from what its json holds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import links

NO_LINK, EMULATED = "none", "emulated "
LOCAL, GLOO = "local step", "gloo"
PARAMETERS = 1_015_370
_ELEMENT = 4  # bytes

Found = Mapping[str, Any]


class Bound:
    """What a step would take where nothing but the processor and the rate took time.

    Processor time is what a step takes beyond the local one over shared memory, of all ranks
    together where they share processors: copies, sums and threads as well as the codec.
    """

    def __init__(self, found: Found, link: str) -> None:
        self._ranks: int = found["ranks"]
        self._bits = links.rate(link.removeprefix(EMULATED)).bits
        self._unshaped = found["links"][NO_LINK]["steps"]
        self._steps = found["links"][link]["steps"]
        self.local = self._steps[LOCAL]["ms"]

    def step(self, method: str) -> float:
        """Milliseconds: local step + codec's processor time + bytes sent / rate."""
        return self.local + self.processor(method) + self._travel(self._steps[method]["sent"])

    def speed_up(self, method: str) -> float:
        """(local step + dense bytes / rate) / step(method)."""
        dense = 2 * (self._ranks - 1) / self._ranks * PARAMETERS * _ELEMENT
        return (self.local + self._travel(dense)) / self.step(method)

    def processor(self, method: str) -> float:
        """Milliseconds."""
        beyond = self._unshaped[method]["processor_ms"] - self._unshaped[LOCAL]["processor_ms"]
        return max(0.0, beyond) * max(1.0, self._ranks / len(os.sched_getaffinity(0)))

    def _travel(self, payload: float) -> float:
        return links.wire_bytes(round(payload)) * 8e3 / self._bits


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    steps = found["links"][NO_LINK]["steps"][LOCAL]["steps"]
    lines = [
        "# Steps of DDP training over links held to a rate",
        "",
        f"{now}; {found['machine']}; {found['ranks']} ranks, {found['batch']} images a rank and "
        f"step, {PARAMETERS:,} parameters; medians of {steps} steps on every rank, methods in "
        f"turns. `python {found['command']}`.",
        "",
        f"![Milliseconds of a step]({stem}.png)",
        "",
        "*Sent* is the payload of a rank in a step. *Ideal* is the local step + the codec's "
        "processor time + sent bytes / rate; processor time is measured over shared memory: what a "
        "step takes beyond the local one, times ranks / cores. *Bound* is (local step + dense "
        "bytes / rate) / ideal, *reached* the step of gloo DDP / this step.",
    ]
    for link in found["links"]:
        lines += ["", f"## {_title(link)}", ""]
        if link in found["checks"]:
            lines += _checks(found, link)
        lines += _steps(found, link) if link != NO_LINK else _unshaped(found)
    return "\n".join([*lines, "", *_beside(found)]) + "\n"


def _title(link: str) -> str:
    if link == NO_LINK:
        return "The host's own links: shared memory, loopback for gloo"
    if link.startswith(EMULATED):
        return f"Emulated links, {link.removeprefix(EMULATED)} (gradwire alone)"
    return f"Links held to {link}"


def _checks(found: Found, link: str) -> list[str]:
    measured = [links.Measured(**each) for each in found["checks"][link]]
    dropped = found["links"][link]["dropped"]
    return [
        "The same links by plain sockets, headers included, before the steps:",
        "",
        links.as_table(measured),
        "",
        f"Packets dropped in all: {dropped}.",
        "",
    ]


def _unshaped(found: Found) -> list[str]:
    rows = ["| method | ms a step | processor ms a step |", "|---|---:|---:|"]
    for name, each in found["links"][NO_LINK]["steps"].items():
        rows.append(f"| {name} | {each['ms']:.2f} | {each['processor_ms']:.2f} |")
    return rows


def _steps(found: Found, link: str) -> list[str]:
    steps, bound = found["links"][link]["steps"], Bound(found, link)
    gloo = steps.get(GLOO, {}).get("ms")
    rows = [
        "| method | ms a step | kB sent | ideal ms | ideal / measured | bound | reached | share |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        f"| {LOCAL} | {bound.local:.2f} | | | | | | |",
    ]
    for name in (each for each in steps if each != LOCAL):
        ms, ideal, most = steps[name]["ms"], bound.step(name), bound.speed_up(name)
        reached = f"{gloo / ms:.2f}× | {gloo / ms / most:.0%}" if gloo else "– | –"
        rows.append(
            f"| {name} | {ms:.2f} | {steps[name]['sent'] / 1e3:.1f} | {ideal:.2f} | "
            f"{ideal / ms:.0%} | {most:.2f}× | {reached} |"
        )
    return rows


def _beside(found: Found) -> list[str]:
    """The emulated links beside the namespaces' ones."""
    pairs = [
        (link, EMULATED + link) for link in found["checks"] if EMULATED + link in found["links"]
    ]
    if not pairs:
        return []
    rows = [
        "## Emulated beside shaped links, milliseconds",
        "",
        f"An emulated link has the same rate, and a latency of {found['emulated_latency']}.",
        "",
        "| link | what | shaped | emulated | emulated / shaped |",
        "|---|---|---:|---:|---:|",
    ]
    for link, emulated in pairs:
        shaped, other = _figures(found["links"][link]), _figures(found["links"][emulated])
        rows += [
            f"| {link} | {what} | {shaped[what]:.2f} | {ms:.2f} | {ms / shaped[what]:.2f} |"
            for what, ms in other.items()
            if not what.endswith("gloo")
        ]
    return rows


def _figures(measured: Found) -> dict[str, float]:
    steps = {f"step, {name}": each["ms"] for name, each in measured["steps"].items()}
    calls = {
        f"all_reduce of {int(nbytes):,} B, {name}": ms
        for name, times in measured["calls"].items()
        for nbytes, ms in times.items()
    }
    return {**steps, **calls}


def draw(found: Found, path: Path) -> None:
    """Milliseconds of a step, by method and link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [link for link in found["links"] if link in found["checks"]] or [
        link for link in found["links"] if link != NO_LINK
    ]
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(6.2 * len(shown), 5), squeeze=False, layout="constrained"
    )
    for panel, link in zip(axes[0], shown, strict=True):
        _panel(panel, found, link)
    figure.suptitle("One step of DDP training, 1.02 M parameters")
    figure.savefig(path, dpi=110)


def _panel(axes: Any, found: Found, link: str) -> None:
    steps, bound = found["links"][link]["steps"], Bound(found, link)
    names: Sequence[str] = [name for name in steps if name != LOCAL]
    places = range(len(names))
    colours = ["#b3123a" if name.startswith(GLOO) else "#1463b0" for name in names]
    axes.barh(places, [steps[name]["ms"] for name in names], color=colours)
    axes.plot([bound.step(name) for name in names], places, "k|", markersize=14, label="ideal")
    axes.axvline(bound.local, color="#777777", linestyle=":", label=LOCAL)
    for place, name in zip(places, names, strict=True):
        axes.text(steps[name]["ms"], place, f" {steps[name]['ms']:.1f}", va="center", fontsize=8)
    axes.set_yticks(places, labels=names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="milliseconds", title=_title(link))
    axes.margins(x=0.15)
    axes.legend(loc="lower right", fontsize=8)
