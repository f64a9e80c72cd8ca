"""gradwire's all_reduce beside that of torch's gloo, in processes of their own, taking turns.

    python bench/compare_gloo.py            # p = 2 and 4, 4 B to 64 MiB

Writes a table and a picture to bench/results/. Each round starts fresh ranks for gloo alone and
then for gradwire alone, so that neither has the other in its processes, and whatever else the
machine does meets both. Times are of one call on the slowest rank: the median of all rounds'
repetitions, calls of a repetition back to back.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from gradwire import _launch
from machine import OtherLoad, describe

RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("gloo", "tcp", "shm", "auto")
TITLES = {
    "gloo": "torch's gloo",
    "tcp": "gradwire, tcp",
    "shm": "gradwire, shm",
    "auto": "gradwire, best link",
}
_TEAMS = (("gloo",), ("tcp", "shm", "auto"))  # contenders that share their processes
_ROUNDS = 3
_REPETITION_SECONDS = 0.02  # of one contender, at least, where calls are fast
_MOST_CALLS = 300

Times = dict[str, dict[int, list[float]]]  # contender, bytes: seconds of each repetition


def main() -> int:
    """Starts the ranks of each p, and writes what they found."""
    options = _parse()
    if "RANK" in os.environ:  # one of the ranks that the lines below start
        return _rank(options)
    load = OtherLoad()
    found: dict[int, Times] = {}
    for ranks in options.ranks:
        found[ranks] = {name: {} for name in CONTENDERS}
        for team in _TEAMS * _ROUNDS:
            code, times = _start(ranks, team, options)
            if code != 0:
                return code
            _merge(found[ranks], times)
    machine = f"{describe()}, of whose time other work took about {load.share():.0%}"
    stem = RESULTS / f"gloo-{datetime.date.today().isoformat()}"
    RESULTS.mkdir(exist_ok=True)
    table = _document(found, options, machine, stem.name)
    stem.with_suffix(".md").write_text(table, encoding="utf-8")
    _draw(found, stem.with_suffix(".png"))
    print(table)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    parser.add_argument("--repetitions", type=int, default=5, help="of each round")
    parser.add_argument("--team", nargs="+", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    return parser.parse_args()


def _merge(all_times: Times, more: Times) -> None:
    for name, by_size in more.items():
        for size, seconds in by_size.items():
            all_times[name].setdefault(size, []).extend(seconds)


def _start(ranks: int, team: Sequence[str], options: argparse.Namespace) -> tuple[int, Times]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        own = [__file__, "--output", str(output), "--repetitions", str(options.repetitions)]
        own += ["--team", *team]
        code = _launch.run(["-n", str(ranks), *own, "--max-bytes", str(options.max_bytes)])
        return code, (_read(output) if code == 0 else {})


def _read(path: Path) -> Times:
    loaded = json.loads(path.read_text())
    return {name: {int(k): v for k, v in times.items()} for name, times in loaded.items()}


class _Gloo:
    """torch's own, with what measuring needs."""

    def __init__(self) -> None:
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier, self.close = dist.barrier, dist.destroy_process_group

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """In place."""
        import torch.distributed as dist

        dist.all_reduce(x, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op])
        return x


def _rank(options: argparse.Namespace) -> int:
    import gradwire
    import torch

    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Any]] = {
        "gloo": _Gloo,
        "tcp": lambda: gradwire.init(transports=["tcp"]),
        "shm": lambda: gradwire.init(transports=["shm"]),
        "auto": gradwire.init,
    }
    comms = {name: makers[name]() for name in options.team}
    times: Times = {name: {} for name in comms}
    size = 4
    while size <= options.max_bytes:
        _measure(comms, torch.zeros(size // 4), options.repetitions, times)
        size *= 4
    if comms[options.team[0]].rank == 0:
        Path(options.output).write_text(json.dumps(times))
    for comm in comms.values():
        comm.close()
    return 0


def _measure(comms: dict[str, Any], x: Any, repetitions: int, times: Times) -> None:
    """A team at one size. `x` holds zeros, which sums of sums leave finite."""
    for comm in comms.values():
        _check(comm, x)
    number = {name: _fit(comm, x) for name, comm in comms.items()}
    names = list(comms)
    for name in names:
        times[name][x.nbytes] = []
    for repetition in range(repetitions):
        turn = repetition % len(names)
        for name in (*names[turn:], *names[:turn]):
            times[name][x.nbytes].append(_seconds(comms[name], x, number[name]))


def _check(comm: Any, x: Any) -> None:
    x.fill_(1)
    comm.all_reduce(x)
    assert bool((x == comm.size).all()), "a contender's sum is wrong"
    x.zero_()


def _fit(comm: Any, x: Any) -> int:
    once = _seconds(comm, x, 3)
    return max(1, min(_MOST_CALLS, math.ceil(_REPETITION_SECONDS / once)))


def _seconds(comm: Any, x: Any, number: int) -> float:
    """Of one call, on the slowest rank."""
    import torch

    comm.all_reduce(x)
    comm.barrier()
    start = perf_counter()
    for _ in range(number):
        comm.all_reduce(x)
    own = torch.tensor([(perf_counter() - start) / number], dtype=torch.float64)
    return float(comm.all_reduce(own, op="max"))


def _document(found: dict[int, Times], options: argparse.Namespace, machine: str, stem: str) -> str:
    import torch

    command = " ".join(["python", "bench/compare_gloo.py", *sys.argv[1:]])
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [
        "# all_reduce of float32: gradwire beside torch's gloo",
        "",
        f"{now}; {machine}; torch {torch.__version__}; `{command}`.",
        "",
        "Microseconds of one call on the slowest rank, all ranks on one host: median of "
        f"{options.repetitions * _ROUNDS} repetitions in {_ROUNDS} rounds, in which gloo and "
        "gradwire take turns, each in processes of its own. "
        "In brackets: how many times faster than gloo.",
        "",
        f"![Time and bus bandwidth]({stem}.png)",
    ]
    for ranks, times in found.items():
        lines += ["", f"## {ranks} ranks", "", *_table(times)]
    return "\n".join(lines) + "\n"


def _table(times: Times) -> list[str]:
    rows = [f"| bytes | {' | '.join(TITLES[name] for name in CONTENDERS)} |"]
    rows.append("|---:" * (len(CONTENDERS) + 1) + "|")
    for size in times["gloo"]:
        median = {name: statistics.median(times[name][size]) for name in CONTENDERS}
        cells = [f"{median['gloo'] * 1e6:.1f}"]
        cells += [
            f"{median[name] * 1e6:.1f} ({median['gloo'] / median[name]:.1f}×)"
            for name in CONTENDERS[1:]
        ]
        rows.append(f"| {size} | {' | '.join(cells)} |")
    return rows


def _draw(found: dict[int, Times], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(found), figsize=(5.6 * len(found), 7.6), squeeze=False, layout="constrained"
    )
    for column, (ranks, times) in enumerate(found.items()):
        _panel(axes[0][column], times, lambda size, each: each * 1e6)
        axes[0][column].set(title=f"{ranks} ranks on one host", ylabel="µs a call", yscale="log")
        factor = 2 * (ranks - 1) / ranks / 1e9
        _panel(axes[1][column], times, lambda size, each, factor=factor: size * factor / each)
        axes[1][column].set(ylabel="bus bandwidth, GB/s", ylim=(0, None))
    axes[0][0].legend()
    figure.suptitle("all_reduce of float32: median, and the middle half of the repetitions")
    figure.savefig(path, dpi=110)


def _panel(axes: Any, times: Times, value: Callable[[int, float], float]) -> None:
    styles: Sequence[tuple[str, str]] = (
        ("#b3123a", "o"),
        ("#1463b0", "s"),
        ("#1d7a3a", "^"),
        ("#c8860a", "x"),
    )
    for name, (colour, marker) in zip(CONTENDERS, styles, strict=True):
        sizes = list(times[name])
        quarters = [statistics.quantiles(times[name][size], n=4) for size in sizes]
        low, middle, high = (
            [value(size, each[k]) for size, each in zip(sizes, quarters, strict=True)]
            for k in range(3)
        )
        axes.plot(sizes, middle, color=colour, marker=marker, markersize=4, label=TITLES[name])
        axes.fill_between(sizes, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xscale("log", base=4)
    axes.set_xticks(sizes[::2], labels=map(_size, sizes[::2]))
    axes.set_xlabel("bytes")
    axes.grid(alpha=0.3)


def _size(nbytes: int) -> str:
    for scale, unit in ((1 << 20, "Mi"), (1 << 10, "Ki")):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}"
    return str(nbytes)


if __name__ == "__main__":
    sys.exit(main())
