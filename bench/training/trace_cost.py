"""What recording a trace costs: training steps and calls with and without it, in turns.

    python -m bench.training.trace_cost
    python -m bench.training.trace_cost --metrics  # what counting for GRADWIRE_METRICS costs calls

Ranks on this host, over shared memory, train a DDP network with gradwire's hook, and make blocking
all_reduces. Blocks of steps with recording on and off take turns, and change places each round; a
ratio is the time with recording over the time without, of blocks of one round. Of the
rounds it gives the median, with an interval that holds the true one with 95 % confidence. The goal
is at most 1.02 for steps, and 1.005 for counted all_reduces of 1 MiB. Writes
bench/results/trace-cost-DATE.json and .md, or metrics-cost-DATE.

What a trace that is off costs is the speed of this tree beside that of a commit from before there
were traces: python -m bench.collectives.compare --base COMMIT.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import gradwire.torch
import numpy as np
import torch
import torch.distributed as dist
from gradwire import _core
from gradwire._trace.session import EVENTS
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.collectives.compare import interval
from bench.common import report, spawned
from bench.common.machine import OtherLoad

CODECS = ("none", "int8")
CALLS = {"4 B": 1, "64 KB": 16_384, "4 MB": 1 << 20}  # elements
_CALLS_A_BLOCK = {"4 B": 5000, "64 KB": 1000, "4 MB": 30}
COUNTED = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18}  # elements
_BLOCK_SECONDS = 0.02  # of counted calls, about

Block = Callable[[], Any]
Watch = Callable[[gradwire.Communicator], AbstractContextManager[None]]


def main() -> int:
    """Measures on ranks of this host; rank 0 writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="default: 40; 800 with --metrics")
    parser.add_argument("--metrics", action="store_true", help="counting, in place of recording")
    parser.add_argument("--steps", type=int, default=10, help="of each block; default: 10")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.rounds = options.rounds or (800 if options.metrics else 40)
    return count(options) if options.metrics else spawned.run(options.ranks, serve, options)


def serve(rank: int, store: str, options: argparse.Namespace) -> None:
    """Measures as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks
    )
    load, rows = OtherLoad(), []
    for codec in CODECS:
        state, step = trainee(codec)
        comm = state.communicator
        block = repeated(step, options.steps)
        rows.append(row(f"step, {codec}", comm, block, options.rounds, options.steps))
        for name, elements in CALLS.items() if codec == CODECS[-1] else ():
            x, count = np.zeros(elements, np.float32), _CALLS_A_BLOCK[name]
            block = repeated(partial(comm.all_reduce, x), count)
            rows.append(row(f"all_reduce, {name}", comm, block, options.rounds, count))
        state.close()
    if rank == 0:
        _write(rows, load, options)
    dist.destroy_process_group()


def count(options: argparse.Namespace) -> int:
    """Measures counted calls over shared memory and TCP; returns an exit status."""
    load, rows = OtherLoad(), []
    for transport in ("shm", "tcp"):
        found = gradwire.spawn(
            counted, options.ranks, args=(transport, options.rounds), transports=[transport]
        )
        rows += found[0]
    _write(rows, load, options)
    return 0


def counted(comm: gradwire.Communicator, transport: str, rounds: int) -> list[dict[str, Any]]:
    """Measures counted calls as one rank."""
    rows = []
    for name, elements in COUNTED.items():
        x = np.zeros(elements, np.float32)
        calls = max(1, int(_BLOCK_SECONDS / _seconds(comm, x)))
        block = repeated(partial(comm.all_reduce, x), calls)
        rows.append(row(f"all_reduce, {name}, {transport}", comm, block, rounds, calls, counting))
    return rows


def _seconds(comm: gradwire.Communicator, x: np.ndarray[Any, Any], calls: int = 50) -> float:
    """Seconds of a call, the same on all ranks."""
    began = time.perf_counter()
    repeated(partial(comm.all_reduce, x), calls)()
    took = np.array([time.perf_counter() - began])
    return float(comm.all_reduce(took, op="max")[0]) / calls


def _write(rows: list[dict[str, Any]], load: OtherLoad, options: argparse.Namespace) -> None:
    found = {"ranks": options.ranks, "rounds": options.rounds, "machine": load.describe()}
    found |= {"date": datetime.date.today().isoformat(), "rows": rows}
    found["command"] = "python -m bench.training.trace_cost" + " --metrics" * options.metrics
    report.write(
        options.output, "metrics-cost" if options.metrics else "trace-cost", found, document
    )


def document(found: Mapping[str, Any], stem: str) -> str:
    """The md file."""
    what = "counting for GRADWIRE_METRICS" if stem.startswith("metrics") else "recording a trace"
    return report.document(f"What {what} costs", table(found))


def table(found: Mapping[str, Any]) -> list[str]:
    """How it was measured, and a row for each case."""
    rows = (
        f"{each['what']} | {each['us']:,.1f} | {each['ratio']:.3f} | {{:.3f}} to {{:.3f}}".format(
            *each["interval"]
        )
        for each in found["rows"]
    )
    return [
        f"{found['date']}, {found['ranks']} ranks of one host, {found['rounds']} rounds, "
        f"{found['machine']}; `{found['command']}`.",
        "",
        *report.table("| without, us | with / without | 95 % interval", rows),
    ]


def trainee(codec: str) -> tuple[gradwire.torch.State, Block]:
    """A model of 2.8 M parameters in several buckets, and a step of its training."""
    torch.manual_seed(1)
    widths = (784, 1024, 1024, 1024, 10)
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]), bucket_cap_mb=4)
    state = gradwire.torch.register(ddp, codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    images, labels = torch.randn(64, widths[0]), torch.randint(0, widths[-1], (64,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(ddp(images), labels).backward()
        optimizer.step()

    return state, step


def repeated(body: Block, times: int) -> Block:
    """A block of so many."""

    def block() -> None:
        for _ in range(times):
            body()

    return block


@contextmanager
def recording(comm: gradwire.Communicator) -> Iterator[None]:
    """Records the calls of a block, for a trace."""
    comm._track.start(EVENTS)
    yield
    assert comm._track.recorder is not None
    assert comm._track.recorder.read()[0]  # something was recorded
    comm._track.stop()


@contextmanager
def counting(comm: gradwire.Communicator) -> Iterator[None]:
    """Counts the calls of a block, for metrics."""
    totals = _core.Totals(comm.size)
    comm._core.observe(None, totals)
    yield
    assert totals.calls()
    comm._core.observe(None)


def row(
    what: str,
    comm: gradwire.Communicator,
    block: Block,
    rounds: int,
    times: int,
    watch: Watch = recording,
) -> dict[str, Any]:
    """Measures a block, of so many times, with and without `watch`."""
    seconds = measure(comm, block, rounds, watch)
    ratios = [on / off for off, on in seconds]
    return {
        "what": what,
        "us": statistics.median(each[0] for each in seconds) / times * 1e6,
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
    }


def measure(
    comm: gradwire.Communicator, block: Block, rounds: int, watch: Watch = recording
) -> list[tuple[float, float]]:
    """Seconds of a block without and with `watch`, by round; the first round is not kept."""
    found = []
    for turn in range(rounds + 1):
        seconds = {}
        for on in (False, True) if turn % 2 else (True, False):
            with watch(comm) if on else nullcontext():
                comm.barrier()
                began = time.perf_counter()
                block()
                seconds[on] = time.perf_counter() - began
        found.append((seconds[False], seconds[True]))
    return found[1:]


if __name__ == "__main__":
    raise SystemExit(main())
