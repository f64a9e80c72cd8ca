"""The table and the picture of step_times.py, from what its json holds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.report import shown
from bench.network import links
from bench.training import methods
from bench.training.methods import Method

NO_LINK, EMULATED = "none", "emulated "
LOCAL, EMPTY_HOOK, GLOO = "local step", "empty hook", "gloo"  # the first two average nothing
PARAMETERS = 1_015_370
SHARE = 0.8  # of the bound, that is to be reached
SPEED_UP = {"100mbit": 10, "1gbit": 2}  # of onebit's steps over gloo DDP's, that is to be reached
BESIDE = 0.15  # how far an emulated link may be off the shaped one
_ELEMENT = 4  # bytes

Found = Mapping[str, Any]


class Bound:
    """What a step would take where nothing but the processor and the rate took time.

    The processor's part is the codec's own time: what encoders and decoders have taken, on this
    link. `processor` is the laxer reading: what all threads of a rank take beyond the local step,
    over shared memory, of all ranks together where they share processors; copies, sums and
    bookkeeping are in it too.
    """

    def __init__(self, found: Found, link: str) -> None:
        self._ranks: int = found["ranks"]
        self._bits = links.rate(link.removeprefix(EMULATED)).bits
        self._unshaped = found["links"][NO_LINK]["steps"]
        self._steps = found["links"][link]["steps"]
        self.local: float = self._steps[LOCAL]["ms"]

    def step(self, method: str, own: float) -> float:
        """Milliseconds: local step + `own` + bytes sent / rate."""
        return self.local + own + self._travel(self._steps[method]["sent"])

    def speed_up(self, method: str, own: float) -> float:
        """(local step + dense bytes / rate) / step."""
        dense = 2 * (self._ranks - 1) / self._ranks * PARAMETERS * _ELEMENT
        return (self.local + self._travel(dense)) / self.step(method, own)

    def codec(self, method: str) -> float | None:
        """Milliseconds; None for gloo's, which nobody counts."""
        found: float | None = self._steps[method]["codec_ms"]
        return found

    def processor(self, method: str) -> float:
        """Milliseconds."""
        beyond = self._unshaped[method]["processor_ms"] - self._unshaped[LOCAL]["processor_ms"]
        ms: float = max(0.0, beyond) * max(1.0, self._ranks / len(os.sched_getaffinity(0)))
        return ms

    def reached(self, method: str) -> float | None:
        """How many times faster than gloo DDP a step was; None without gloo."""
        gloo = self._steps.get(GLOO)
        return None if gloo is None else gloo["ms"] / self._steps[method]["ms"]

    def share(self, method: str, own: float | None) -> float | None:
        """Of the bound, that was reached."""
        reached = self.reached(method)
        return None if reached is None or own is None else reached / self.speed_up(method, own)

    def credit(self, method: str, burst: int) -> float | None:
        """Milliseconds that full buckets save a step, at most: every frame begins with a burst."""
        frames, sent = self._steps[method]["frames"], self._steps[method]["sent"]
        return None if frames is None else min(frames * burst, sent) * 8e3 / self._bits

    def _travel(self, payload: float) -> float:
        return links.wire_bytes(round(payload)) * 8e3 / self._bits


def titles(names: Iterable[str]) -> dict[str, str]:
    """For a table."""
    return {LOCAL: LOCAL} | methods.titles(name for name in names if name != LOCAL)


def document(found: Found, stem: str) -> str:
    """The md file, whose picture is called as it is."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    steps = found["links"][NO_LINK]["steps"]
    lines = [
        "# Steps of DDP training over links held to a rate",
        "",
        f"{now}; {found['machine']}; {found['ranks']} ranks, {found['batch']} images a rank and "
        f"step, {PARAMETERS:,} parameters; medians of {steps[LOCAL]['steps']} steps on every rank, "
        f"methods in turns. `python {found['command']}`.",
        "",
        f"![Milliseconds of a step]({stem}.png)",
        "",
        *_goals(found),
        "*Sent* is the payload of a rank in a step, and *wire* what its interface sends meanwhile: "
        "headers and acknowledgements, too. *Bound* is (local step + dense bytes / rate) / "
        "(local step + codec + sent bytes / rate), *reached* the step of gloo DDP / this step, and "
        "*share* reached / bound; *ideal* is the bound's second bracket, so that *ideal / ms* is "
        "a share in which gloo's own losses do not count. *Codec* is what encoders and decoders "
        "have taken of a rank's thread, in the same steps. *Processor* is the laxer reading of it: "
        "all processor time of a step beyond the local one over shared memory, times ranks / "
        "cores, with *its share*.",
    ]
    for link in found["links"]:
        lines += ["", f"## {_title(link)}", ""]
        if link in found["checks"]:
            lines += _checks(found, link)
        lines += _steps(found, link) if link != NO_LINK else _unshaped(found)
    legend = methods.legend(each for each in steps if each != LOCAL)
    return "\n".join([*lines, *legend, "", *_beside(found)]) + "\n"


def _goals(found: Found) -> list[str]:
    rows = [row for link in found["checks"] for row in _goals_of(found, link)]
    if not rows:
        return []
    return [*report.table("link | method | goal | measured | met", rows, "lllrl"), ""]


def _goals_of(found: Found, link: str) -> Iterator[str]:
    steps, bound = found["links"][link]["steps"], Bound(found, link)
    named = titles(steps)
    for name in steps:
        if name != LOCAL and Method.parse(name).family == "onebit" and link in SPEED_UP:
            what = f"steps ≥ {SPEED_UP[link]}× as fast as gloo DDP's"
            yield _goal(link, named[name], what, bound.reached(name), SPEED_UP[link], "{:.1f}×")
    for name in steps:
        if name != LOCAL and name not in methods.PEERS:
            share = bound.share(name, bound.codec(name))
            yield _goal(link, named[name], f"share ≥ {SHARE:.0%}", share, SHARE, "{:.0%}")


def _goal(link: str, title: str, goal: str, measured: float | None, least: float, form: str) -> str:
    met = "–" if measured is None else report.yes(measured >= least)
    return f"{link} | {title} | {goal} | {shown(measured, form)} | {met}"


def _title(link: str) -> str:
    if link == NO_LINK:
        return "The host's own links: shared memory, loopback for gloo"
    if link.startswith(EMULATED):
        return f"Emulated links, {link.removeprefix(EMULATED)} (gradwire alone)"
    return f"Links held to {link}"


def _checks(found: Found, link: str) -> list[str]:
    check = found["checks"][link]
    return [
        "The same links by plain sockets before the steps, with messages as large as the "
        f"methods'; headers count. One way takes a byte {check['latency_us']:.0f} µs. "
        f"Token buckets have {check['credit']}. *Credit* is what that saves a step at most: "
        "as if every frame, however small, found a full one. The emulated links have no buckets.",
        "",
        links.as_table([links.Measured(**each) for each in check["sockets"]]),
        "",
        f"Packets dropped in all: {found['links'][link]['dropped']}.",
        "",
    ]


def _unshaped(found: Found) -> list[str]:
    steps = found["links"][NO_LINK]["steps"]
    named = titles(steps)
    rows = (
        f"{named[name]} | {each['ms']:.2f} | {each['processor_ms']:.2f}"
        for name, each in steps.items()
    )
    return report.table("method | ms a step | processor ms a step", rows)


def _steps(found: Found, link: str) -> list[str]:
    steps, bound = found["links"][link]["steps"], Bound(found, link)
    named, burst = titles(steps), found["checks"].get(link, {}).get("burst", 0)
    shaped = link in found["checks"]  # there a rank has an interface of its own
    rows = [[LOCAL, f"{bound.local:.2f}", *[""] * 10]]
    for name in (each for each in steps if each != LOCAL):
        wire = steps[name].get("wire") if shaped else None
        codec, processor = bound.codec(name), bound.processor(name)
        most = None if codec is None else bound.speed_up(name, codec)
        ideal = None if codec is None else bound.step(name, codec) / steps[name]["ms"]
        cells = [
            named[name],
            f"{steps[name]['ms']:.2f}",
            shown(bound.reached(name), "{:.2f}×"),
            f"{steps[name]['sent'] / 1e3:.1f}",
            shown(None if wire is None else wire / 1e3, "{:.1f}"),
            shown(bound.credit(name, burst), "{:.2f}"),
            shown(codec, "{:.2f}"),
            shown(most, "{:.2f}×"),
            shown(bound.share(name, codec), "{:.0%}"),
            shown(ideal, "{:.0%}"),
            f"{processor:.2f}",
            shown(bound.share(name, processor), "{:.0%}"),
        ]
        rows.append(cells)
    head = (
        "method | ms a step | reached | kB sent | wire | credit ms | codec ms | bound | share | "
        "ideal / ms | processor ms | its share"
    )
    return report.table(head, rows)


def _beside(found: Found) -> list[str]:
    """The emulated links beside the namespaces' ones."""
    rows, right = [], []
    for link in found["checks"]:
        emulated = found["links"][EMULATED + link]
        shaped, other = _figures(found["links"][link]), _figures(emulated)
        for what in (each for each in other if not each.endswith("gloo")):
            ratio = other[what] / shaped[what]
            right.append(abs(ratio - 1) <= BESIDE)
            rows.append(
                f"{link}, {emulated['latency_us']:.0f} µs | {what} | {shaped[what]:.2f} | "
                f"{other[what]:.2f} | {ratio:.2f} | {report.yes(right[-1])}"
            )
    if not rows:
        return []
    head = f"link | what | shaped | emulated | emulated / shaped | within {BESIDE:.0%}"
    return [
        "## Emulated beside shaped links, milliseconds",
        "",
        "An emulated link has the same rate, and the latency that a byte has on the shaped one. "
        f"{sum(right)} of {len(right)} figures are within {BESIDE:.0%}.",
        "",
        *report.table(head, rows, "llrrrl"),
    ]


def _figures(measured: Found) -> dict[str, float]:
    named = titles(measured["steps"])
    steps = {
        f"step, {named[name]}": each["ms"]
        for name, each in measured["steps"].items()
        if name != LOCAL
    }
    calls = {
        f"all_reduce of {int(nbytes):,} B, {name}": ms
        for name, times in measured["calls"].items()
        for nbytes, ms in times.items()
    }
    return {**steps, **calls}


def draw(found: Found, path: Path) -> None:
    """Milliseconds of a step, by method and link."""
    slow = [link for link in found["links"] if link in found["checks"]] or [
        link for link in found["links"] if link != NO_LINK
    ]
    columns = len(slow)
    with report.picture(path, 6.2 * columns, 5, columns=columns) as (figure, (panels,)):
        for panel, link in zip(panels, slow, strict=True):
            _panel(panel, found, link)
        figure.suptitle("One step of DDP training, 1.02 M parameters")


def _panel(axes: Any, found: Found, link: str) -> None:
    steps, bound = found["links"][link]["steps"], Bound(found, link)
    names: Sequence[str] = [name for name in steps if name != LOCAL]
    named = titles(names)
    colours = [report.OTHERS if name.startswith(GLOO) else report.OURS for name in names]
    ms = [steps[name]["ms"] for name in names]
    report.bars(axes, [named[name] for name in names], ms, ".1f", colours)
    ideal = [bound.step(name, bound.codec(name) or 0) for name in names]
    axes.plot(ideal, range(len(names)), "k|", markersize=14, label="ideal")
    axes.axvline(bound.local, color=report.NEUTRAL, linestyle=":", label=LOCAL)
    axes.set(xscale="log", xlabel="milliseconds", title=_title(link))
    axes.legend(loc="lower right", fontsize=8)
