"""How long a training step takes over links held to a rate: gradwire's codecs beside torch's gloo.

    python -m bench.training.step_times

DDP trains the network of `images.py` with 1.02 M parameters, 16 images per rank and step, on 4
ranks in network namespaces (`links.py`), which takes root; `--emulated-only` measures on gradwire's
emulated links alone, which does not. All methods of a link share their processes: each round gives
every method one block of steps, in turns, and the first round warms up.

Writes bench/results/step-times-DATE.json, .md and .png. In the json, step_ms[link][method] is the
median of one step in milliseconds, over all steps and ranks, where a link is "100mbit", "emulated
100mbit" or "none": shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import job, report
from bench.common.machine import OtherLoad
from bench.network import links
from bench.training import step_report
from bench.training.methods import PEERS, TRAINED

METHODS = (*PEERS, *TRAINED)
ALGORITHMS = ("ring", "direct")
CALLS = (200_000, 1_000_000, 8_000_000)
_LATENCY = 40e-6  # seconds one way, of an emulated link where no real one is there to be measured


def main() -> int:
    """Measures on each link, and writes what it found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        from bench.training import step_ranks

        return step_ranks.run(options)
    why = None if options.emulated_only else links.missing()
    if why is not None:
        print(f"step_times: {why}; --emulated-only needs none of it", file=sys.stderr)
        return 1
    load = OtherLoad()
    found: dict[str, Any] = {"checks": {}, "links": {step_report.NO_LINK: on_this_host(options)}}
    for rate in options.link:
        print(f"links of {rate.name} …", file=sys.stderr, flush=True)
        _measure(rate, options, found)
        found["machine"] = load.describe()
        document = _write(options, found)  # after each link: the next may not be held to its rate
    print(document)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", type=links.rate, nargs="+", metavar="RATE")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="as methods.py reads them")
    parser.add_argument("--steps", type=int, default=60, help="of each method on each link")
    parser.add_argument("--block", type=int, default=5, help="steps of a method in a round")
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step")
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--calls", type=int, nargs="+", default=CALLS, help="bytes of all_reduce")
    parser.add_argument("--data", type=Path, help="directory of other IDX files")
    parser.add_argument("--emulated-only", action="store_true", help="no root")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    parser.add_argument("--meet", help=argparse.SUPPRESS)  # set for the ranks, as the next two
    parser.add_argument("--network", default="cnn", help=argparse.SUPPRESS)
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, help=argparse.SUPPRESS)
    parser.add_argument("--tune", type=float, default=0.0, help=argparse.SUPPRESS)  # seconds
    options = parser.parse_args()
    options.link = options.link or [links.rate("100mbit"), links.rate("1gbit")]
    return options


def _measure(rate: links.Rate, options: argparse.Namespace, found: dict[str, Any]) -> None:
    latency = _LATENCY
    if not options.emulated_only:
        on_shaped(rate, options, found)
        latency = found["checks"][rate.name]["latency_us"] / 1e6
    emulated = {"GRADWIRE_LINK": f"{rate.name},{latency * 1e6:.0f}us"}
    own = [each for each in options.methods if not each.startswith("gloo")]
    measured = {"latency_us": latency * 1e6, **on_this_host(options, emulated, own)}
    found["links"][step_report.EMULATED + rate.name] = measured


def on_shaped(rate: links.Rate, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Checks links between namespaces, and adds what steps take over them."""
    with contextlib.closing(links.ShapedLinks(options.ranks, rate)) as shaped:
        found["checks"][rate.name] = _check(shaped, found)
        found["links"][rate.name] = _on_hosts(options, shaped)
        found["links"][rate.name]["dropped"] = shaped.dropped()


def _check(shaped: links.ShapedLinks, found: dict[str, Any]) -> dict[str, Any]:
    """Of links, with messages as large as the methods'."""
    steps, ranks = found["links"][step_report.NO_LINK]["steps"], len(shaped.hosts)
    measured = links.check(shaped, messages(steps, ranks))
    return {
        "burst": shaped.rate.burst,
        "credit": shaped.rate.credit(),
        "latency_us": links.ping_pong(shaped) * 1e6,
        "sockets": [each._asdict() for each in measured],
    }


def messages(steps: Mapping[str, Mapping[str, float]], ranks: int) -> list[int]:
    """Bytes that a rank sends at once, to two digits, by what each method sends in a step.

    Every schedule of all_reduce gives a rank 2(p - 1) messages of a bucket, or more at a time.
    """
    sizes = (each["sent"] / (2 * (ranks - 1)) for each in steps.values())
    return sorted({int(float(f"{size:.2g}")) for size in sizes if size >= 1})


def _on_hosts(options: argparse.Namespace, shaped: links.ShapedLinks) -> dict[str, Any]:
    place = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_SOCKET_IFNAME": "eth0"}
    return _run(options, options.methods, place, [host.run for host in shaped.hosts])


def on_this_host(
    options: argparse.Namespace,
    setting: Mapping[str, str] | None = None,
    methods: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What steps take over the host's own links, or as the setting says."""
    place = {"GLOO_SOCKET_IFNAME": "lo", **(setting or {})}
    return _run(options, methods or options.methods, place)


def _run(
    options: argparse.Namespace,
    methods: Sequence[str],
    place: Mapping[str, str],
    starters: Sequence[job.Starter] | None = None,
) -> dict[str, Any]:
    """What the ranks found, which each starter starts somewhere."""
    own = ["--methods", *methods, "--steps", str(options.steps)]
    own += ["--block", str(options.block), "--batch", str(options.batch)]
    own += ["--ranks", str(options.ranks), "--calls", *map(str, options.calls)]
    own += ["--network", options.network, "--algorithms", *options.algorithms]
    own += [] if options.data is None else ["--data", str(options.data)]
    return job.run("bench.training.step_times", own, options.ranks, place, starters)


def _write(options: argparse.Namespace, found: dict[str, Any]) -> str:
    stem = report.stem_of(options.output, "step-times")
    found["step_ms"] = {
        link: {name: each["ms"] for name, each in measured["steps"].items()}
        for link, measured in found["links"].items()
    }
    found |= {
        "ranks": options.ranks,
        "batch": options.batch,
        "command": " ".join(["-m bench.training.step_times", *sys.argv[1:]]),
    }
    document = step_report.document(found, stem.name)
    report.save(stem, found, document)
    step_report.draw(found, report.beside(stem, ".png"))
    return document


if __name__ == "__main__":
    sys.exit(main())
