"""Whether the exchange of Streaming DiLoCo hides behind training, at the rate that is predicted.

    python -m bench.local_sgd.streaming            # 2 minutes, on a machine that does little else

Two ranks, which are processes, train 784-480-480-10 on random images. A fragment has `delay`
inner steps to travel, so the link needs (bytes that a rank sends of it, with the headers of
packets) / (delay · seconds of a step). Links are emulated at that rate, and steps with DiLoCo are
measured in turns with those without any exchange. A step is made to last 30 ms (`--step-ms`), so
that the rate does not depend on what else the machine does; the processor time of exchanges counts
only where it is more than is left of these.

Writes bench/results/streaming-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import gradwire
import torch
from gradwire import _core
from gradwire.torch import DiLoCo
from gradwire.torch._ranks.group import communicator_of
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from bench.common import job, report
from bench.common.machine import OtherLoad
from bench.local_sgd.streaming_report import Setting, document

RANKS, EVERY, BATCH = 2, 100, 64
LATENCY = "1ms"
_HEADERS = _core.link_costs("1gbit")[0] * 1e9 / 8  # bytes of packets over their data
SETTINGS = (
    Setting(fragments=4, delay=25, codec="none"),
    Setting(fragments=4, delay=5, codec="none"),
    Setting(fragments=4, delay=5, codec="int8"),
    Setting(fragments=1, delay=0, codec="none"),  # the control: training waits
)


def main() -> int:
    """Measures steps alone, then each setting at its predicted rate, and writes what it found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        return _rank(options)
    load = OtherLoad()
    own = ["--turns", str(options.turns), "--step-ms", str(options.step_ms)]
    step = options.step_ms / 1e3
    rows = []
    for place, setting in enumerate(SETTINGS):
        bits = setting.bits(dense := 4 * _parameters()) * _HEADERS
        rate = bits / (setting.travels(EVERY) * step)
        link = {"GRADWIRE_LINK": f"{rate / 1e6:.4f}mbit,{LATENCY}"}
        measured = job.run(__spec__.name, [*own, "--setting", str(place)], RANKS, link)
        needed = 8 * dense * _HEADERS / step  # of an all_reduce in each step
        rows.append({**setting._asdict(), "rate": rate, "dense_rate": needed, **measured})
        print(f"{setting}: {measured}", file=sys.stderr)
    found = {
        **report.stamp("bench.local_sgd.streaming", load),
        "parameters": _parameters(),
        "every": EVERY,
        "rows": rows,
    }
    report.write(options.output, "streaming", found, lambda found, _: document(found))
    return 0


class _Training(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: float

    def step(self) -> None:
        """An inner step."""
        due = time.perf_counter() + self.seconds
        self.optimizer.zero_grad()
        images, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
        cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()
        time.sleep(max(0.0, due - time.perf_counter()))


def _training(seconds: float = 0.0) -> _Training:
    torch.manual_seed(0)
    layers = [nn.Linear(784, 480), nn.ReLU(), nn.Linear(480, 480), nn.ReLU(), nn.Linear(480, 10)]
    model = nn.Sequential(*layers)
    return _Training(model, torch.optim.SGD(model.parameters(), 0.01), seconds)


def _parameters() -> int:
    return sum(each.numel() for each in _training().model.parameters())


def _rank(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{options.meet}/store", RANKS)
    dist.init_process_group("gradwire", store=store, rank=int(os.environ["RANK"]), world_size=RANKS)
    assert dist.group.WORLD is not None
    training = _training(options.step_ms / 1e3)
    with communicator_of(dist.group.WORLD) as comm:
        outer = None
        if options.setting is not None:
            fragments, delay, codec = SETTINGS[options.setting]
            outer = DiLoCo(
                training.model,
                training.optimizer,
                EVERY,
                fragments=fragments,
                delay=delay,
                compression=codec,
                pace=False,
                ranks=comm,
            )
        found: dict[str, list[float]] = {"with": [], "without": []}
        for _ in range(options.turns):
            found["without"].append(_timed(comm, training, None))
            if outer is not None:
                found["with"].append(_timed(comm, training, outer))
        slowest = {
            name: [max(each) for each in zip(*comm.all_gather_object(times), strict=True)]
            for name, times in found.items()
        }
        if comm.rank == 0:
            job.write(options.meet, slowest)
    dist.destroy_process_group()
    return 0


def _timed(comm: gradwire.Communicator, training: _Training, outer: DiLoCo | None) -> float:
    """Seconds of a step, over two rounds; with exchanges they follow on a round of the same."""
    comm.barrier()
    for _ in range(EVERY if outer is not None else 5):
        training.step()
        if outer is not None:
            outer.step()
    began = time.perf_counter()
    for _ in range(2 * EVERY):
        training.step()
        if outer is not None:
            outer.step()
    seconds = (time.perf_counter() - began) / (2 * EVERY)
    if outer is not None:
        outer.finish()
    return seconds


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--step-ms", type=float, default=30.0, help="of an inner step, at least")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    parser.add_argument("--setting", type=int, help=argparse.SUPPRESS)  # set for the ranks
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
