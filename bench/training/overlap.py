"""Whether averaging hides behind backward: DDP steps of a network of 10 M parameters, two ranks.

    python -m bench.training.overlap          # shared memory, and links held to 1 Gbit/s: root
    python -m bench.training.overlap --here   # shared memory alone

An MLP of eleven layers, codec none, 64 images a rank; beside it the local step, DDP with an empty
hook (what no hook can be quicker than), torch's gloo DDP, and all_reduce alone: of all gradients at
once, and of 64 MiB by ring, direct and halving-doubling. It measures as step_times.py does, and
writes bench/results/overlap-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import report
from bench.common.machine import OtherLoad
from bench.network import links
from bench.training import images, step_times
from bench.training.step_report import EMPTY_HOOK, GLOO, LOCAL, NO_LINK

ALGORITHMS = ("auto", "ring", "direct", "halving_doubling")
LARGE = 64 << 20  # bytes, of which an all_reduce is to reach the rate
SHAPED, ALONE, OF_GLOO, OF_RATE = 1.15, 1.15, 0.75, 0.95  # the goals
_NONE = "none"

Found = Mapping[str, Any]


def main() -> int:
    """Measures, writes, and prints what it found."""
    options = _parse()
    why = None if options.here else links.missing()
    if why is not None:
        print(f"overlap: {why}; --here needs none of it", file=sys.stderr)
        return 1
    load = OtherLoad()
    found: dict[str, Any] = {"checks": {}, "links": {NO_LINK: step_times.on_this_host(options)}}
    for rate in [] if options.here else options.link:
        step_times.on_shaped(rate, options, found)
    found |= {
        **report.stamp("bench.training.overlap", load),
        "ranks": options.ranks,
        "batch": options.batch,
        "bytes": options.calls[0],
    }
    report.write(options.output, "overlap", found, lambda found, _: document(found))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--here", action="store_true", help="shared memory alone: no root")
    add("--link", type=links.rate, nargs="+", default=[links.rate("1gbit")], metavar="RATE")
    add("-n", "--ranks", type=int, default=2)
    add("--steps", type=int, default=60, help="of each method on each link")
    add("--block", type=int, default=5, help="steps of a method in a round")
    add("--batch", type=int, default=64, help="images per rank and step")
    add("--large", type=int, default=LARGE, help="bytes, to be sent at the rate of the link")
    add("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    options.methods, options.network, options.data = (EMPTY_HOOK, GLOO, _NONE), "mlp", None
    options.algorithms, options.calls = ALGORITHMS, (gradient_bytes(), options.large)
    return options


def gradient_bytes() -> int:
    """Of a step."""
    return 4 * sum(each.numel() for each in images.mlp(28).parameters())


def document(found: Found) -> str:
    """The md file."""
    goals = (row for link in found["links"] for row in _goals(found, link))
    return report.document(
        "Overlap of averaging and backward",
        f"{found['date']}; {found['machine']}; {found['ranks']} ranks, {found['batch']} images a "
        f"rank and step, {found['bytes'] // 4:,} parameters, codec none; medians, methods in "
        f"turns. `python {found['command']}`.",
        report.table(" | goal | measured | reached", goals, "llrl"),
        *(
            report.section(_title(link), report.table(" | ms", _times(measured)))
            for link, measured in found["links"].items()
        ),
    )


def _times(measured: Found) -> Iterator[str]:
    for name, each in _named(measured):
        yield f"{name}: a step | {each['ms']:.1f}"
    for name, times in measured["calls"].items():
        for nbytes, ms in times.items():
            yield f"all_reduce of {int(nbytes):,} B, {name} | {ms:.1f}"


def _named(measured: Found) -> Iterator[tuple[str, Found]]:
    titles = {LOCAL: LOCAL, EMPTY_HOOK: f"DDP, {EMPTY_HOOK}", GLOO: "gloo DDP", _NONE: "gradwire"}
    return ((titles[name], each) for name, each in measured["steps"].items())


def _title(link: str) -> str:
    if link == NO_LINK:
        return "The host's own links: shared memory, loopback for gloo"
    return f"Links held to {link}"


def _goals(found: Found, link: str) -> Iterator[str]:
    measured = found["links"][link]
    step, local, gloo = (measured["steps"][name]["ms"] for name in (_NONE, LOCAL, GLOO))
    if link == NO_LINK:
        alone = measured["calls"]["gradwire auto"][str(found["bytes"])]
        what = f"step ≤ local step + {ALONE} × all_reduce alone"
        yield _goal("shm", what, (step - local) / alone, ALONE)
        floor = (measured["steps"][EMPTY_HOOK]["ms"] - local) / alone
        yield f"shm | the same of DDP with an {EMPTY_HOOK} | {floor:.2f}× | –"
        yield _goal("shm", f"step ≤ {OF_GLOO} × gloo DDP's", step / gloo, OF_GLOO)
        return
    least = max(local, travel_ms(measured["steps"][_NONE]["sent"], link))
    what = f"step ≤ {SHAPED} × max(local step, bytes / rate)"
    yield _goal(link, what, step / least, SHAPED)
    for name in ALGORITHMS[1:]:
        for nbytes, ms in list(measured["calls"][f"gradwire {name}"].items())[1:]:
            sent = 2 * (found["ranks"] - 1) / found["ranks"] * int(nbytes)
            what = f"{int(nbytes):,} B by {name} at ≥ {OF_RATE:.0%} of the rate"
            share = travel_ms(sent, link) / ms
            yield f"{link} | {what} | {share:.1%} | {report.yes(share >= OF_RATE)}"


def travel_ms(payload: float, link: str) -> float:
    """Of so many bytes at the rate, headers included."""
    return links.wire_bytes(round(payload)) * 8e3 / links.rate(link).bits


def _goal(link: str, what: str, value: float, most: float) -> str:
    return f"{link} | {what} | {value:.2f}× | {report.yes(value <= most)}"


if __name__ == "__main__":
    sys.exit(main())
