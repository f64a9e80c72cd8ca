"""What slow and stopped replicas cost Sandblaster in real time, and who computed what.

    python -m bench.asynchronous.stragglers            # 8 minutes, nearly all of them asleep
    python -m bench.asynchronous.stragglers --quick    # shorter portions and fewer: half a minute

Four replicas, which are processes, and two shards. To compute a portion is to sleep: so portions
last as long as they should on a machine with other work, too, and the seconds of a batch beside the
bound of the sum of the replicas' speeds show what portions, copies and messages cost. One replica
is slow, or stopped by SIGSTOP in the middle of the first batch. Copies of late portions are on, or
off, or there is one part for each replica, as where a batch is cut equally.

Writes bench/results/stragglers-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gradwire import serve

from bench.asynchronous import stragglers_report
from bench.asynchronous.stragglers_report import REPLICAS, WAYS
from bench.common import report
from bench.common.machine import OtherLoad

ELEMENTS = 200


class Case(NamedTuple):
    """A batch cut into portions for replicas, of which the last one may be slow or stop."""

    name: str
    way: str  # of WAYS
    slow: float  # times the seconds of the others
    stops: bool
    batches: int


CASES = (
    *(
        Case("one of four 20× slower", way, 20, False, n)
        for way, n in zip(WAYS, (5, 5, 1), strict=True)
    ),
    *(
        Case("one of four 5× slower", way, 5, False, n)
        for way, n in zip(WAYS, (5, 5, 2), strict=True)
    ),
    Case("one of four stops", WAYS[0], 1, True, 5),
)


class Job:
    """The same Sandblaster in all processes: a quadratic function that takes many iterations."""

    def __init__(self, portions: int, store: str, *, backups: bool) -> None:
        self.portions, self.store, self.backups = portions, store, backups

    def make(
        self, number: int | None = None, seconds: float = 0, folder: Path | None = None
    ) -> Any:
        """A replica, whose portions last so many seconds once there is a file "go"; or none's."""
        curvatures = np.geomspace(1, 1e4, ELEMENTS) / self.portions

        def compute(parameters: Any, portion: int) -> tuple[float, list[Any]]:
            began = time.monotonic()
            if folder is not None and (folder / "go").exists():
                time.sleep(seconds)
                span = [number, portion, began, time.monotonic()]
                with (folder / f"{number}.jsonl").open("a") as file:
                    file.write(json.dumps(span) + "\n")
            away = parameters[0] - 1
            return float(curvatures @ away**2 / 2), [curvatures * away]

        return serve.DistributedLBFGS(
            [np.zeros(ELEMENTS)],
            compute,
            portions=self.portions,
            search=None,  # an evaluation for each iteration
            backups=self.backups,
            store=self.store,
            replica=f"replica {number}",
        )


def replica(job: Job, number: int, seconds: float, folder: Path) -> None:
    """Serves, as a process."""
    job.make(number, seconds, folder).serve()


def measure(case: Case, portions: int, seconds: float) -> dict[str, Any]:
    """Batches of one case: their seconds, the bound, and who computed what when."""
    parts = REPLICAS if case.way == WAYS[2] else portions
    each = seconds * portions / parts  # a part of the one-part way is as much work
    speeds = [1.0] * (REPLICAS - 1) + [1 / case.slow]
    whole = parts * each / sum(speeds)
    with tempfile.TemporaryDirectory() as scratch, serve.Server(2) as server:
        folder = Path(scratch)
        job = Job(parts, server.store, backups=case.way == WAYS[0])
        durations = [each / speed for speed in speeds]
        with _replicas(job, durations, folder) as processes, job.make() as lead:
            while len(lead.step().portions) < REPLICAS:  # all have come
                pass
            (folder / "go").touch()
            if case.stops:
                _stop_later(processes[-1], whole / 2)
            marks = [time.monotonic()]
            for _ in range(case.batches):
                lead.step()
                marks.append(time.monotonic())
        spans = _spans(folder, marks)
    rest = parts * each / (sum(speeds) - 1)
    bound = case.batches * whole
    if case.stops:
        bound = whole / 2 + rest / 2 + (case.batches - 1) * rest
    return {
        **case._asdict(),
        "portions": parts,
        "seconds": [b - a for a, b in itertools.pairwise(marks)],
        "bound": bound,
        "spans": spans,
    }


@contextlib.contextmanager
def _replicas(job: Job, seconds: list[float], folder: Path) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=replica, args=(job, number, each, folder))
        for number, each in enumerate(seconds)
    ]
    for each in processes:
        each.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()  # also one that is stopped, or asleep in a portion that nobody needs
            process.join()


def _stop_later(process: Any, seconds: float) -> None:
    threading.Timer(seconds, os.kill, (process.pid, signal.SIGSTOP)).start()


def _spans(folder: Path, marks: list[float]) -> list[list[Any]]:
    """Replica, batch, begin, end, and whether it counts: by portion who ends first does."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    counted: set[tuple[int, int]] = set()
    spans = []
    for number, portion, began, ended in sorted(map(json.loads, lines), key=lambda each: each[3]):
        batch = sum(began >= mark for mark in marks[1:])
        counts = (batch, portion) not in counted and ended <= marks[min(batch + 1, len(marks) - 1)]
        if counts:
            counted.add((batch, portion))
        times = (round(each - marks[0], 3) for each in (began, ended))
        spans.append([number, batch, *times, counts])
    return sorted(spans)


def main() -> int:
    """Measures all cases, and writes what it found."""
    options = _parse()
    load = OtherLoad()
    found: dict[str, Any] = {
        "portions": options.portions,
        "portion_seconds": options.seconds,
        "cases": [],
    }
    for case in CASES:
        found["cases"].append(measure(case, options.portions, options.seconds))
        print(stragglers_report.line(found["cases"][-1]), flush=True)
    found |= report.stamp("bench.asynchronous.stragglers", load)
    own = stragglers_report
    report.write(options.output, "stragglers", found, own.document, own.draw)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--portions", type=int, default=64, help="of a batch")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a portion, on most replicas")
    parser.add_argument("--quick", action="store_true", help="--portions 32 --seconds 0.05")
    parser.add_argument("--output", type=Path, help="a path without suffix")
    options = parser.parse_args()
    if options.quick:
        options.portions, options.seconds = 32, 0.05
    return options


if __name__ == "__main__":
    sys.exit(main())
