"""`gradwire tune`: measures the cost model of these hosts, and saves it for later jobs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire import _core, _model
from gradwire._base.tables import table
from gradwire._bootstrap import launch_info
from gradwire._bootstrap.agreed_model import host_set
from gradwire._communicator import Communicator
from gradwire._errors import InvalidArgument
from gradwire._init import init
from gradwire._launch import launcher
from gradwire._model import CostModel, HostSet
from gradwire.lab.commands.progress import progress_bar
from gradwire.lab.tuning import gpus, saving
from gradwire.lab.tuning.fit import Progress, Timing, tune

SECONDS = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `run`."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=2, help="local ranks to start, when no launcher did")
    add("--transport", type=_names, help="restrict to these, with commas: shm, rdma, tcp")
    add("--seconds", type=float, default=SECONDS, help=f"to measure; default: {SECONDS:g}")
    add("--gpus", action="store_true", help="of the ranks' GPUs, beside that of their CPUs")
    add("-o", "--output", metavar="FILE", help="save there; default: where init() looks")
    add("--json", action="store_true", help="print the parameters and timings as JSON")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Tunes on the launcher's ranks, or on local ones that it starts with the same `options.argv`.

    Saves the model, and prints its predictions beside the measurements. Returns the exit code.
    Raises InvalidArgument for options that do not fit together, before anything is started.
    """
    here = launch_info.from_environment()
    alone = here.launcher == "no launcher"
    if options.ranks < 2 and alone:
        raise InvalidArgument(f"--ranks {options.ranks}: there is nothing to choose for one rank")
    if not 0.1 <= options.seconds <= 600:
        raise InvalidArgument(f"--seconds {options.seconds:g}: use 0.1 to 600")
    if alone:
        return launcher.run(["-n", str(options.ranks), "-m", "gradwire", "tune", *options.argv])
    return _run_ranks(options)


def _run_ranks(options: argparse.Namespace) -> int:
    with init(transports=options.transport) as comm:
        hosts = host_set(comm._mesh)
        output = None if options.output is None else Path(options.output)
        if comm.rank == 0:
            saving.make_place(hosts, output)  # raises before the time of a measurement is spent
        bar = progress_bar if comm.rank == 0 and sys.stderr.isatty() else None
        core, timings, links = _measure(comm, options, hosts, bar)
        if comm.rank == 0:
            if bar is not None:
                bar(1.0, "")
            model = _model.wrap(core)
            if links is None:
                path = saving.save(model, hosts, output)
            else:
                path = saving.save_for_gpus(model, links, hosts, output)
            what = f"GPUs of {hosts}, their messages by {links}" if links else str(hosts)
            print(_as_json(what, model, timings) if options.json else _report(what, timings))
            print(f"saved in {path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def _measure(
    comm: Communicator, options: argparse.Namespace, hosts: HostSet, bar: Progress | None
) -> tuple[_core.CostModel, list[Timing], str | None]:
    """The model, its timings and, of GPUs, their way of messages."""
    if not options.gpus:
        return *tune(comm, hosts, seconds=options.seconds, progress=bar), None
    device = gpus.own_device(comm)
    core, timings = gpus.tune(comm, device, seconds=options.seconds, progress=bar)
    return core, timings, comm._gpu_links


def _report(what: str, timings: Sequence[Timing]) -> str:
    rows = [("collective", "algorithm", "bytes", "us", "model")]
    rows += [
        (
            each.case.collective,
            each.case.algorithm,
            str(each.case.nbytes),
            f"{each.measured * 1e6:.1f}",
            f"{each.predicted * 1e6:.1f}",
        )
        for each in timings
    ]
    close = sum(each.close for each in timings)
    last = f"{close} of {len(timings)} cases are within 20 %"
    return f"cost model of {what}\n\n{table(rows, left=2)}\n\n{last}"


def _as_json(what: str, model: CostModel, timings: Sequence[Timing]) -> str:
    rows = [
        {
            "collective": each.case.collective,
            "algorithm": each.case.algorithm,
            "bytes": each.case.nbytes,
            "measured": each.measured,
            "predicted": each.predicted,
        }
        for each in timings
    ]
    found = {"hosts": what, "parameters": model.parameters, "timings": rows}
    return json.dumps(found, indent=2)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
