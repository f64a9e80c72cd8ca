"""The backend gradwire beside gloo: calls, and training steps that shard or split a model.

    python -m bench.torch_backend.beside_gloo

The processor time of small calls on one rank alone; milliseconds of collectives by ranks and bytes,
also of the communicator's own all_reduce; and training steps over shared memory (gloo: loopback)
and over gradwire's emulated links, which do not hold gloo's traffic back. `--shaped 100mbit`: also
between network namespaces whose links `tc` holds to a rate, for gloo too (root; `--links` without
any leaves the others out). All that is compared takes turns in the same processes.

Writes bench/results/backend-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common import job, report
from bench.common.machine import OtherLoad
from bench.network import links
from bench.torch_backend import beside_gloo_report

NO_LINK = beside_gloo_report.NO_LINK
LINKS = (NO_LINK, "1gbit,100us", "100mbit,100us")
CHECKED = (200_000, 1_000_000)  # bytes of messages over shaped links
PARTS = ("cost", "collectives", "steps")


def main() -> int:
    """Measures each part, and writes what it found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        from bench.torch_backend import beside_gloo_ranks

        return beside_gloo_ranks.run(options)
    load = OtherLoad()
    found: dict[str, Any] = {"collectives": {}, "steps": {}}
    for _ in _measurements(options, found):
        found |= report.stamp("bench.torch_backend.beside_gloo", load)
        own = beside_gloo_report  # each time: a later part may fail
        report.write(options.output, "backend", found, own.document, own.draw)
    return 0


def _measurements(options: argparse.Namespace, found: dict[str, Any]) -> Iterator[None]:
    """Adds to what was found; yields after each part."""
    if "cost" in options.parts:
        found["cost"] = _measure("cost", options, 1)
        yield
    for ranks in options.ranks if "collectives" in options.parts else ():
        found["collectives"][str(ranks)] = _measure("collectives", options, ranks)
        yield
    for link in options.links if "steps" in options.parts else ():
        for ranks in options.ranks:
            its = found["steps"].setdefault(link, {})
            its[str(ranks)] = _measure("steps", options, ranks, link)
            yield
    for rate in options.shaped if "steps" in options.parts else ():
        for ranks in options.ranks:
            its = found["steps"].setdefault(beside_gloo_report.SHAPED + rate.name, {})
            its[str(ranks)] = _on_shaped(options, ranks, rate)
            yield


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("-n", "--ranks", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--links", nargs="*", default=LINKS, metavar="RATE,LATENCY")
    parser.add_argument("--shaped", type=links.rate, nargs="+", default=(), metavar="RATE")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each call")
    parser.add_argument("--most", type=int, default=1 << 26, help="bytes of a collective, at most")
    parser.add_argument("--steps", type=int, default=9, help="of each way on each link")
    parser.add_argument("--block", type=int, default=3, help="steps of a way in a round")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    parser.add_argument("--meet", help=argparse.SUPPRESS)  # set for the ranks, as the next two
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(
    part: str, options: argparse.Namespace, ranks: int, link: str = NO_LINK
) -> dict[str, Any]:
    print(f"{part}, {ranks} ranks, link {link} …", file=sys.stderr, flush=True)
    setting = {"GLOO_SOCKET_IFNAME": "lo"}
    if link != NO_LINK:
        setting["GRADWIRE_LINK"] = link
    return _run(part, options, ranks, setting, gloo=link == NO_LINK)


def _on_shaped(options: argparse.Namespace, ranks: int, rate: links.Rate) -> dict[str, Any]:
    """Checks the links by plain sockets, and then measures steps over them."""
    print(f"steps, {ranks} ranks, held to {rate.name} …", file=sys.stderr, flush=True)
    with contextlib.closing(links.ShapedLinks(ranks, rate)) as shaped:
        links.check(shaped, CHECKED)
        setting = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_SOCKET_IFNAME": "eth0"}
        starters = [each.run for each in shaped.hosts]
        return _run("steps", options, ranks, setting, starters, gloo=True)


def _run(
    part: str,
    options: argparse.Namespace,
    ranks: int,
    setting: dict[str, str],
    starters: Sequence[job.Starter] | None = None,
    *,
    gloo: bool,
) -> dict[str, Any]:
    own = ["--part", part, "--rounds", str(options.rounds), "--most", str(options.most)]
    own += ["--steps", str(options.steps), "--block", str(options.block)]
    own += ["--gloo"] if gloo else []
    return job.run("bench.torch_backend.beside_gloo", own, ranks, setting, starters)


if __name__ == "__main__":
    sys.exit(main())
