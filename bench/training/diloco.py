"""What DiLoCo and local SGD cost in accuracy, and win in seconds, beside synchronous SGD.

    python -m bench.training.diloco            # 15 minutes
    python -m bench.training.diloco --quick    # one seed, a third of the images: a minute

Four ranks, which are processes, train 784-256-10 on Fashion-MNIST. The bits of a run do not depend
on links or load: ranks count a gradient as 10 ms (`--gradient-ms`), also for pace, and one of them
as five times that where it is slow. Seconds are simulated: in each round the longest rank's
gradients, and the measured time of one exchange on the network, which is shared memory or
gradwire's emulated link. So other work on the machine only makes this take longer.

Writes bench/results/diloco-DATE.json, .md and .png; `--picture` draws into another file too.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
from pathlib import Path

from bench.common import job, result_files
from bench.common.machine import OtherLoad
from bench.common.result_files import RESULTS
from bench.training import diloco_report
from bench.training.diloco_report import NO_LINK

LINKS = (NO_LINK, "100mbit,100us")
RANKS = 4


def main() -> int:
    """Trains once, measures exchanges on each network, and writes what it found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        from bench.training import diloco_ranks

        return diloco_ranks.run(options)
    load = OtherLoad()
    exchange = {link: _measure(options, link) for link in LINKS}
    found = job.run(__spec__.name, _own(options), RANKS, {})
    found |= {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": load.describe(),
        "command": " ".join(["-m bench.training.diloco", *sys.argv[1:]]),
        "exchange_seconds": exchange,
        "gradient_seconds": options.gradient_ms / 1e3,
        "slow": options.slow,
    }
    stem = options.output or RESULTS / f"diloco-{datetime.date.today().isoformat()}"
    document = diloco_report.document(found, stem.name)
    result_files.save(stem, found, document)
    picture = result_files.beside(stem, ".png")
    diloco_report.draw(found, picture)
    if options.picture is not None:
        shutil.copyfile(picture, options.picture)
    print(document)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--passes", type=float, default=3.0, help="through the training images")
    parser.add_argument("--gradient-ms", type=float, default=10.0)
    parser.add_argument("--slow", type=float, default=5.0, help="times a slow rank's gradient")
    parser.add_argument("--data", type=Path, help="directory of other IDX files")
    parser.add_argument("--quick", action="store_true", help="--seeds 1 --passes 1")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    parser.add_argument("--meet", help=argparse.SUPPRESS)  # set for the ranks
    parser.add_argument("--exchanges", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.passes = [1], 1.0
    return options


if __name__ == "__main__":
    sys.exit(main())
