"""`gradwire run -n 4 script.py`: starts local ranks, and ends them all when one fails.

With --min (elastic) the others go on, and the rank that failed is started anew, as a process that
joins them; with --keep-going ranks have nothing to do with each other.

When a rank fails, the others have a moment to fail by themselves, and the launcher reports the
root cause (`root_cause`): each rank notes in a file of the launcher's how it ended (`at_exit`).
Each rank is a process group of its own, so that Ctrl-C reaches it exactly once, through the
launcher, and so that its helpers (data loaders) end with it. If the launcher dies, the kernel kills
the ranks, and a process of its own their helpers (`watcher`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from gradwire._base.shortage import raise_limit
from gradwire._bootstrap.job_secret import find_secret
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import InvalidArgument
from gradwire._host import emulated_link, interfaces
from gradwire._launch import slots
from gradwire._launch.local_ranks import GRACE_SECONDS, LocalRanks, prelude
from gradwire._launch.reaping import children_are_kept
from gradwire._launch.root_cause import say
from gradwire._launch.watcher import Watcher
from gradwire._trace import merge, parts


def run(argv: Sequence[str]) -> int:
    """Runs a program on n ranks; returns 0 or the exit code of the rank that failed first."""
    options = _parse(argv)
    raise_limit()
    with children_are_kept():
        return slots.run(options, partial(_run_once, options))


def _run_once(options: argparse.Namespace, slot: slots.Slot) -> slots.Outcome:
    job = f"run-{secrets.token_hex(8)}"
    given = find_secret(None)
    made = {} if given else {"GRADWIRE_SECRET": secrets.token_hex(32)}
    store = Address("unix", f"gradwire-{os.getuid()}-{job}")
    program = [sys.executable, *(["-m"] if options.module else []), *options.program]
    secret = given or made["GRADWIRE_SECRET"].encode()
    notes = os.memfd_create("gradwire-notes")
    common = {
        "WORLD_SIZE": str(options.n),
        "LOCAL_WORLD_SIZE": str(options.n),
        **_torch_store(),
        "GRADWIRE_STORE": str(store),
        **made,
        "GRADWIRE_JOB": job,
        "GRADWIRE_EXIT_FILE": f"/proc/{os.getpid()}/fd/{notes}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **({"GRADWIRE_LINK": options.link} if options.link else {}),
        **({"GRADWIRE_SERVERS": str(options.servers)} if options.servers else {}),
        **({"GRADWIRE_MAX_RANKS": str(options.max)} if options.max else {}),
        **({"GRADWIRE_MIN_RANKS": str(options.min)} if options.min else {}),
        **slot.environment,
    }
    with (
        os.fdopen(notes, "rb"),
        StoreServer(store, job, secret),
        Watcher() as watcher,
    ):
        environment = {**os.environ, **common}
        ranks = LocalRanks(program, options, slot, environment, notes, watcher)
        with _traced(options.trace, environment), _servers(options.servers, environment, watcher):
            return slots.Outcome(ranks.run(), ranks.told)


@contextlib.contextmanager
def _servers(shards: int, environment: dict[str, str], watcher: Watcher) -> Iterator[None]:
    """Shards of a parameter server, a process for each, until the end of the block.

    One that fails says why; the ranks' calls then raise errors that name it.
    """
    program = [sys.executable, "-m", "gradwire", "serve", "--shards", str(shards), "--only"]
    processes = [
        subprocess.Popen(
            [*prelude(), *program, str(shard)], env=environment, start_new_session=True
        )
        for shard in range(shards)
    ]
    for each in processes:
        watcher.add(each.pid)
    try:
        yield
    finally:
        for shard, each in enumerate(processes):
            if each.poll() is not None:
                print(
                    f"gradwire run: the server of shard {shard} (process {each.pid}) had ended "
                    f"before the ranks, with exit code {each.returncode}",
                    file=sys.stderr,
                    flush=True,
                )
            each.terminate()
        for each in processes:
            try:
                each.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
            watcher.discard(each.pid)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gradwire run", description="Runs a Python program on n ranks of this host."
    )
    parser.add_argument(
        "-n", "--ranks", dest="n", type=int, metavar="RANKS", help="number of ranks (--max)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument(
        "--tag-output", action="store_true", help='begin every line of output with "[rank] "'
    )
    parser.add_argument(
        "--link",
        type=_link_of,
        metavar="RATE[,LATENCY]",
        help="as if every rank had one NIC of that rate (100mbit, 1gbit), in each "
        "direction, and that latency one way (100us)",
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="SHARDS",
        help="start a parameter server of so many shards beside the ranks; see gradwire.serve",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="a rank that fails ends alone; for ranks that exchange nothing but with the servers",
    )
    parser.add_argument(
        "--min",
        type=int,
        metavar="RANKS",
        help="elastic: when a rank fails, the others go on, and end only when fewer than so many "
        "are left; for programs that resize(), as those of gradwire.torch.elastic do",
    )
    parser.add_argument(
        "--max",
        type=int,
        metavar="RANKS",
        help="with --min: how many ranks there are at most, and are started without -n",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="TIMES",
        help="start a rank that failed anew: with --min, where it joins the others, so many times "
        "in all; with --keep-going so many times each",
    )
    slots.add_options(parser)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="record the ranks' calls, and write them there for https://ui.perfetto.dev",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="script or module, and its arguments"
    )
    options = parser.parse_args(argv)
    if options.program[:1] == ["--"]:
        del options.program[0]
    if not options.program:
        parser.error("which program? gradwire run -n 4 script.py")
    _check_numbers(parser, options)
    if options.servers < 0:
        parser.error(f"--servers {options.servers}: 0 or more shards")
    if options.restarts < 0 or (options.restarts and not (options.keep_going or options.min)):
        parser.error("--restarts TIMES goes with --min RANKS or --keep-going")
    slots.check(parser, options)
    return options


def _check_numbers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program for numbers of ranks that contradict each other; sets -n."""
    if options.n is None:
        options.n = options.max
    if options.n is None:
        parser.error("how many ranks? -n RANKS, or --max RANKS with --min")
    if options.n < 1:
        parser.error(f"-n {options.n}: at least one rank")
    if options.min is None:
        if options.max is not None:
            parser.error("--max RANKS goes with --min RANKS")
        return
    if options.keep_going:
        parser.error("--keep-going is for ranks that never meet, and --min for those that do")
    if not 1 <= options.min <= options.n <= (options.max or options.n):
        most = f" <= --max {options.max}" if options.max else ""
        parser.error(f"not 1 <= --min {options.min} <= -n {options.n}{most}")


def _link_of(given: str) -> str:
    try:
        return emulated_link.check(given)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _torch_store() -> dict[str, str]:
    """The place where programs that also use torch.distributed meet: a port that is still free.

    It is at the loopback address; without any there is no such place, and gradwire needs none.
    """
    address = interfaces.loopback().interface
    with socket.socket(address.family) as probe:
        try:
            probe.bind((address.address, 0))
        except OSError:
            return {}
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": address.address, "MASTER_PORT": str(port)}


@contextlib.contextmanager
def _traced(file: str | None, environment: dict[str, str]) -> Iterator[None]:
    """Has the ranks of the block record, and makes one file of it when they have ended."""
    if file is None:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="gradwire-trace-"))
    environment["GRADWIRE_TRACE"] = str(folder)
    try:
        yield
    finally:
        say(f"{file}: {_merged(folder, Path(file))}")


def _merged(folder: Path, file: Path) -> str:
    """Merges the ranks' parts and removes them; keeps them, if there are any, where that fails."""
    try:
        text = merge.describe(merge.write(parts.read(folder), file))
    except (InvalidArgument, OSError) as error:
        text = f"no trace: {error}"
        if any(folder.iterdir()):
            return f"{text}; the ranks' parts are in {folder}: gradwire trace merge {folder} FILE"
    shutil.rmtree(folder, ignore_errors=True)
    return text
