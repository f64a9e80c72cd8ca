"""What FireCaffe's hybrid sends and takes, beside data parallelism alone, by network and link.

    python -m bench.torch_backend.hybrid

Networks like AlexNet and VGG under `gradwire.torch.parallelize`: all layers under DDP or FSDP2, or
the large linear layers split and the others under DDP, FSDP2, or DDP with int8. On shared memory
and on gradwire's emulated links; all ways of a link take turns in the same processes.

Writes bench/results/hybrid-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench.common import job, report
from bench.common.machine import OtherLoad
from bench.torch_backend import hybrid_report
from bench.torch_backend.beside_gloo_report import NO_LINK

LINKS = (NO_LINK, "1gbit,100us", "100mbit,100us")
NETWORKS = ("AlexNet", "VGG")


def main() -> int:
    """Measures on each link and number of ranks, and writes what it found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        from bench.torch_backend import hybrid_ranks

        return hybrid_ranks.run(options)
    load = OtherLoad()
    found: dict[str, Any] = {"links": {}}
    for link in options.links:
        for ranks in options.ranks:
            print(f"{ranks} ranks, link {link} …", file=sys.stderr, flush=True)
            its = found["links"].setdefault(link, {})
            its[str(ranks)] = _measure(options, link, ranks)
    found |= {
        **report.stamp("bench.torch_backend.hybrid", load),
        "batch": options.batch,
        "steps": options.steps,
    }
    own = hybrid_report
    report.write(options.output, "hybrid", found, own.document, own.draw)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="RATE,LATENCY")
    parser.add_argument("-n", "--ranks", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--networks", nargs="+", default=NETWORKS, choices=NETWORKS)
    parser.add_argument("--steps", type=int, default=12, help="of each way on each link")
    parser.add_argument("--block", type=int, default=3, help="steps of a way in a round")
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    parser.add_argument("--meet", help=argparse.SUPPRESS)  # set for the ranks
    return parser.parse_args()


def _measure(options: argparse.Namespace, link: str, ranks: int) -> dict[str, Any]:
    own = ["--networks", *options.networks, "--steps", str(options.steps)]
    own += ["--block", str(options.block), "--batch", str(options.batch)]
    setting = {} if link == NO_LINK else {"GRADWIRE_LINK": link}
    return job.run("bench.torch_backend.hybrid", own, ranks, setting)


if __name__ == "__main__":
    sys.exit(main())
