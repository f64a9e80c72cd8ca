"""What DiLoCo and local SGD cost in accuracy, and win in seconds, beside synchronous SGD.

    python -m bench.asynchronous.diloco            # 15 minutes
    python -m bench.asynchronous.diloco --quick    # one seed, a third of the images: a minute

Four ranks, which are processes, train 784-256-10 on Fashion-MNIST. The bits of a run do not depend
on links or load: ranks count a gradient as 10 ms (`--gradient-ms`), also for pace, and one of them
as five times that where it is slow. Seconds are simulated: in each round the longest rank's
gradients, and the measured time of one exchange on the network, which is shared memory or
gradwire's emulated link. So other work on the machine only makes this take longer.

Writes bench/results/diloco-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import os
import sys

from bench.asynchronous import diloco_report, seeds
from bench.asynchronous.diloco_report import NO_LINK
from bench.common import job, report
from bench.common.machine import OtherLoad

LINKS = (NO_LINK, "100mbit,100us")
RANKS = 4


def main() -> int:
    """Trains once, measures exchanges on each network, and writes what it found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        from bench.asynchronous import diloco_ranks

        return diloco_ranks.run(options)
    load = OtherLoad()
    exchange = {link: _measure(options, link) for link in LINKS}
    found = job.run(__spec__.name, _own(options), RANKS, {})
    found |= {
        **report.stamp("bench.asynchronous.diloco", load),
        "exchange_seconds": exchange,
        "gradient_seconds": options.gradient_ms / 1e3,
        "slow": options.slow,
    }
    own = diloco_report
    report.write(options.output, "diloco", found, own.document, own.draw)
    return 0


def _measure(options: argparse.Namespace, link: str) -> dict[str, float]:
    setting = {} if link == NO_LINK else {"GRADWIRE_LINK": link}
    return job.run(__spec__.name, [*_own(options), "--exchanges"], RANKS, setting)


def _own(options: argparse.Namespace) -> list[str]:
    """The options for the ranks."""
    own = ["--seeds", *map(str, options.seeds), "--passes", str(options.passes)]
    own += ["--gradient-ms", str(options.gradient_ms), "--slow", str(options.slow)]
    return own if options.data is None else [*own, "--data", str(options.data)]


def _parse() -> argparse.Namespace:
    parser = seeds.parser(__doc__)
    parser.add_argument("--slow", type=float, default=5.0, help="times a slow rank's gradient")
    parser.add_argument("--meet", help=argparse.SUPPRESS)  # set for the ranks
    parser.add_argument("--exchanges", action="store_true", help=argparse.SUPPRESS)
    return seeds.parse(parser)


if __name__ == "__main__":
    sys.exit(main())
