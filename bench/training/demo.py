"""Trains a CNN on local ranks, over a slow link and over shared memory: gloo's DDP beside gradwire.

First every method trains for the same few seconds, while links of 100 Mbit/s hold gloo and gradwire
back alike: between network namespaces, or else with every TCP connection paced by the kernel. Then
all train the same number of steps on this host as it is. Every row starts from the same parameters
and sees the same images in the same order. `make demo` runs it. Exits with 1 if replicas differ.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

# ruff: noqa: E402  the clock starts before the imports
import argparse
import contextlib
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.network import links, pacing
from bench.training import demo_report
from bench.training.demo_report import Row
from tests.python.support import namespaces

if TYPE_CHECKING:
    from bench.training.images import Images

METHODS = ("gloo", "none", "fp16", "lowrank+int8=0.05")
RANKS, BATCH = 4, 16  # images per rank and step
_HELD = 1.15  # times the rate: what is faster is not held to it
_INSIDE = "DEMO_IN_USER_NAMESPACE"
NO_FASHION_MNIST = (
    "Fashion-MNIST is missing, so images are generated; to have it, install Debian's package "
    'dataset-fashion-mnist, or name a folder of its files: make demo ARGS="--data FOLDER"'
)


class Link(NamedTuple):
    """Where the ranks of a training are, and what holds them back."""

    what: str
    setting: dict[str, str]  # of the environment
    namespaces: Sequence[str | None]  # of each rank, by path; None: this process's
    measured: float = math.inf  # bits of payload a second
    algorithm: str = "auto"  # of gradwire
    pace: float | None = None  # bits a second of each connection


def main() -> int:
    options = parse_options()
    if importlib.util.find_spec("torch") is None:
        sys.exit("the demo needs torch: pip install '.[demo]', or run `make demo`")
    if options.link is not None:
        enter_user_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return demonstrate(options)
    except RuntimeError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", "--ranks", type=int, default=RANKS)
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help="as bench/training/methods.py"
    )
    parser.add_argument("--link", type=rate_or_none, default="100mbit", help="RATE, or none")
    parser.add_argument("--seconds", type=float, default=3, help="of each training on the link")
    parser.add_argument("--steps", type=int, default=200, help="of each training on this host")
    parser.add_argument("--data", type=Path, help="directory of MNIST's or Fashion-MNIST's files")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="accuracy over seconds on the link"
    )
    options = parser.parse_args()
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {options.data} is not a directory")
    return options


def rate_or_none(name: str) -> links.Rate | None:
    """Of argparse, which reports the ValueError."""
    return None if name == "none" else links.rate(name)


def demonstrate(options: argparse.Namespace) -> int:
    """Trains, prints the tables, and returns the exit code."""
    say("reading torch, and images")
    from bench.training import demo_ranks, images

    demo_ranks.prepare()
    data = images.load(options.data)
    if data.name == images.GENERATED:
        say(NO_FASHION_MNIST)
    say(f"{data.name}, {len(data.train_labels):,} images; a CNN of 1.02 M parameters")
    parts = [over_slow_link] if options.link is not None else []
    parts += [over_shared_memory] if options.steps > 0 else []
    found = [part(options, data) for part in parts]
    if not all(row.identical for rows in found for row in rows):
        print("demo: replicas differ: see DIFFERENT above", file=sys.stderr)
        return 1
    print("\n".join(next_lines()))
    return 0


def over_slow_link(options: argparse.Namespace, data: Images) -> list[Row]:
    """No rows where no link can be held to a rate."""
    from bench.training import methods

    with slow_link(options.ranks, options.link) as link:
        say(f"links of {options.link.name}: {link.what}")
        say(f"measured by plain sockets: {link.measured / 1e6:.0f} Mbit/s")
        if link.measured > _HELD * options.link.bits:
            say("so the links are not held to their rate here, and nothing is trained over them")
            return []
        rows = train(options, data, link, seconds=options.seconds)
    name, epoch = (
        f"links of {options.link.bits / 1e6:g} Mbit/s",
        len(data.train_labels) // (BATCH * options.ranks),
    )
    legend = methods.legend(options.methods)
    print("\n".join(["", *demo_report.link_table(rows, name, options.seconds, epoch), *legend, ""]))
    if options.picture is not None:
        title = f"{data.name}, {options.ranks} ranks, {name}"
        demo_report.draw(rows, title, options.picture)
        say(f"wrote {options.picture}")
    return rows


def over_shared_memory(options: argparse.Namespace, data: Images) -> list[Row]:
    here = Link("shared memory", {"GLOO_SOCKET_IFNAME": "lo"}, [None] * options.ranks)
    say(f"the same over {here.what}: {options.steps} steps each")
    rows = train(options, data, here)
    print("\n".join(["", *demo_report.host_table(rows, options.steps), ""]))
    return rows


def train(
    options: argparse.Namespace, data: Images, link: Link, seconds: float | None = None
) -> list[Row]:
    """For so many seconds by each method; without them, the options' steps."""
    from bench.training import demo_ranks

    plan = demo_ranks.Plan(
        methods=options.methods,
        data=data,
        ranks=options.ranks,
        batch=BATCH,
        seconds=seconds,
        steps=options.steps,
        checks=options.picture is not None,
        setting=link.setting,
        namespaces=link.namespaces,
        algorithm=link.algorithm,
        pace=link.pace,
    )
    return demo_ranks.run(plan, say)


def enter_user_namespace() -> None:
    """Starts this program anew where it may make network namespaces, if such a place is needed."""
    enter = ["unshare", "--user", "--map-root-user"]
    if namespaces.missing() is None or _INSIDE in os.environ or shutil.which(enter[0]) is None:
        return
    if subprocess.run([*enter, "--net", "true"], stderr=subprocess.DEVNULL).returncode == 0:
        os.environ[_INSIDE] = "1"
        program = [sys.executable, "-m", "bench.training.demo", *sys.argv[1:]]
        os.execvp(enter[0], [*enter, *program])


@contextlib.contextmanager
def slow_link(ranks: int, rate: links.Rate) -> Iterator[Link]:
    """Links that hold gloo and gradwire back alike, as the measured rate shows or not."""
    why = links.missing()
    if why is not None:
        yield paced(ranks, rate, why)
        return
    with contextlib.closing(links.ShapedLinks(ranks, rate)) as shaped:
        yield between_namespaces(shaped)


def between_namespaces(shaped: links.ShapedLinks) -> Link:
    user = "a user namespace's" if _INSIDE in os.environ else "root's"
    near, far = shaped.connect(0, 1 % len(shaped.hosts))
    with near, far:
        measured = links.payload_rate(near, far)
    place = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_SOCKET_IFNAME": "eth0"}
    paths = [host.path for host in shaped.hosts]
    what = f"{len(paths)} network namespaces ({user}), tc tbf at both ends"
    return Link(what, place, paths, measured)


def paced(ranks: int, rate: links.Rate, why: str) -> Link:
    """A ring's sender has one receiver: so a connection's rate is the rank's."""
    near, far = pacing.paced_pair(rate.bits)
    with near, far:
        measured = links.payload_rate(near, far)
    place = {"GLOO_SOCKET_IFNAME": "lo", "GRADWIRE_TRANSPORT": "tcp"}
    what = f"every TCP connection paced by the kernel, since {why}"
    return Link(what, place, [None] * ranks, measured, "ring", rate.bits)


def next_lines() -> list[str]:
    """What a user types next; this program's environment is a virtual one under `make demo`."""
    lines = [
        "  gradwire doctor                      # what this machine offers",
        "  gradwire run -n 2 examples/ddp.py    # a training to begin yours from",
    ]
    if sys.prefix == sys.base_prefix:
        return ["Next:", *lines]
    environment = os.path.relpath(sys.prefix)
    named = f"gradwire is installed as {environment}/bin/gradwire. Next:"
    return [named, f"  source {environment}/bin/activate", *lines]


def say(what: str) -> None:
    """A line of progress."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
