"""`gradwire advise`: predicts steps of a model on a cluster, and says what pays."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from gradwire._base import units
from gradwire._errors import InvalidArgument
from gradwire.lab.commands import plots
from gradwire.lab.commands.progress import LateBar
from gradwire.lab.planner import published
from gradwire.lab.planner.advice import CODECS, advise
from gradwire.lab.planner.devices import DEVICES
from gradwire.lab.planner.tables.catalogue import TABLES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `run`."""
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"one of {', '.join(TABLES)}; or module:callable, which returns a torch module",
    )
    add("-n", "--ranks", type=int, help="number of ranks")
    add("--per-host", type=int, default=1, metavar="RANKS", help="ranks of each host; default: 1")
    add("--link", metavar="RATE[,LATENCY]", help="between hosts, one way, as 10gbit,50us")
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--compute", metavar="TIME", help="of a step of one rank alone, as 120ms")
    time.add_argument("--device", choices=DEVICES, help="default: this machine's")
    add("--optimizer", metavar="NAME", help="as adamw or onebitadam; default: taken to be SGD")
    add("--batch", type=int, default=32, help="samples a rank and step; default: 32")
    add(
        "--sample",
        action="append",
        metavar="SHAPE",
        help="of a module's input without the batch: 3,224,224; again for each further input",
    )
    add("--cores", type=int, help="of a host, where ranks compute on these")
    usual = f"default: those of {' '.join(CODECS)} that suit the optimizer"
    add("--codecs", nargs="+", metavar="CODEC", help=usual)
    add("--accumulate", type=int, default=4, metavar="K", help="backwards a step; default: 4")
    add("--local-steps", type=int, default=16, metavar="H", help="of local SGD; default: 16")
    add("--published", action="store_true", help="instead: predicted and published speed-ups")
    add("--plot", metavar="FILE.png", help="draw steps and scaling")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Prints the advice; returns the exit code. Raises InvalidArgument."""
    if options.published:
        print(json.dumps(published.rows(), indent=2) if options.json else published.text())
        return 0
    for name in ("model", "ranks", "link"):
        if getattr(options, name) is None:
            raise InvalidArgument(
                f"advise needs a {name}: gradwire advise resnet50 --ranks 64 "
                "--per-host 8 --link 10gbit,50us"
            )
    if options.plot is not None:
        plots.require()
    if os.getcwd() not in sys.path:  # where the caller's module is
        sys.path.insert(0, os.getcwd())
    found = advise(
        options.model,
        ranks=options.ranks,
        link=options.link,
        per_host=options.per_host,
        batch=options.batch,
        compute=None if options.compute is None else units.duration(options.compute),
        device=options.device,
        optimizer=options.optimizer,
        sample=options.sample,
        cores=options.cores,
        codecs=options.codecs,
        accumulate=options.accumulate,
        local_steps=options.local_steps,
        progress=LateBar(),
    )
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    if options.plot is not None:
        plots.advice(found, Path(options.plot))
    return 0
