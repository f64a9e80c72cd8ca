"""Does the cost model predict what calls take, and is auto as good as the best algorithm?

    python -m bench.collectives.model_check                 # shared memory, TCP, links of 1 Gbit/s
    python -m bench.collectives.model_check --link --quick  # without the latter; fewer cases

For each p and link, ranks first tune (`Communicator.tune`), and then time all_reduce of float32 by
every algorithm and by auto, in turns; none of these times is known to the model. All of that is
repeated, with ranks and a model of its own each time, as a virtual machine may be twice as fast for
half a minute: what is judged is the median of the repetitions' predicted / measured. It writes
bench/results/model-DATE.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import report
from bench.common.machine import OtherLoad
from bench.network import links

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
AUTO = "auto"
CLOSE, NEARLY_BEST = 0.2, 0.1  # as goals have it
CLOSE_SHARE, NEARLY_BEST_SHARE = 0.8, 0.9
_REPEATS, _ROUNDS = 5, 5
_TURN = 0.03  # seconds of calls, at least one
_STORE_PORT = 4777  # in a namespace where nothing else runs
_LIMIT = 3600.0

Case = Mapping[str, Any]
Tuning = Mapping[str, Any]  # what tune measured in a repetition, and the parameters it found


def main() -> int:
    """Measures, writes, and prints what it found; or is a rank of it."""
    options = _parse()
    if options.rank_of is not None:
        _be_rank(options)
        return 0
    why = links.missing() if options.link else None
    if why is not None:
        print(f"model_check: {why}; --link without a rate needs none of it", file=sys.stderr)
        return 1
    load = OtherLoad()
    cases: list[Case] = []
    tunings: list[Tuning] = []
    for more, tuned in _measure_all(options):
        cases += more
        tunings += tuned
    found = {
        **report.stamp("bench.collectives.model_check", load),
        "cases": cases,
        "tunings": tunings,
    }
    stem = report.stem_of(options.output, "model")
    report.save(stem, found, document(found, stem.name))
    draw(cases, report.beside(stem, ".png"))
    print("\n".join(summary(cases)))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("-n", "--ranks", type=int, nargs="+", default=[2, 4, 8])
    add("--transport", nargs="*", default=["shm", "tcp"])
    add("--link", type=links.rate, nargs="*", default=[links.rate("1gbit")], metavar="RATE")
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    add("--seconds", type=float, default=10.0, help="to tune, each time")
    add("--quick", action="store_true", help="p = 2 and 4, half of the sizes, 2 repetitions")
    add("--output", type=Path, help="a path without suffix")
    add("--rank-of", type=Path, help=argparse.SUPPRESS)
    add("--repeats", type=int, default=_REPEATS, help="of tuning and timing")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.sizes, options.repeats = [2, 4], options.sizes[::2], 2
    return options


def _measure_all(options: argparse.Namespace) -> Iterator[tuple[list[Case], list[Tuning]]]:
    for ranks in options.ranks:
        for transport in options.transport:
            print(f"p = {ranks}, {transport}", file=sys.stderr, flush=True)
            yield _repeat(options, transport, _run_here, ranks)
        for rate in options.link:
            print(f"p = {ranks}, links held to {rate.name}", file=sys.stderr, flush=True)
            with contextlib.closing(links.ShapedLinks(ranks, rate)) as shaped:
                yield _repeat(options, rate.name, partial(_run_on, shaped), ranks)


Run = Callable[[list[str], dict[str, str], int], None]


def _repeat(
    options: argparse.Namespace, link: str, run: Run, ranks: int
) -> tuple[list[Case], list[Tuning]]:
    """Every case with what each repetition found of it, and what the repetitions' tune did."""
    repeats = [measure(options, link, run, ranks) for _ in range(options.repeats)]
    same = zip(*(found["cases"] for found in repeats), strict=True)
    cases = [{"link": link, **each[0][0], "runs": [run for _, run in each]} for each in same]
    return cases, [{"link": link, "ranks": ranks, **found["tuned"]} for found in repeats]


def measure(options: argparse.Namespace, link: str, run: Run, ranks: int) -> Mapping[str, Any]:
    """Cases with what the ranks found of each, and what tune measured; `run` runs the ranks."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "found.json"
        words = [
            "-m",
            "bench.collectives.model_check",
            "--rank-of",
            str(output),
            "--seconds",
            str(options.seconds),
        ]
        words += ["--sizes", *map(str, options.sizes)]
        environment = {**os.environ, "GRADWIRE_MODEL": "default"}
        if link in options.transport:
            environment["GRADWIRE_TRANSPORT"] = link
        run(words, environment, ranks)
        found: Mapping[str, Any] = json.loads(output.read_text())
        return found


def _run_here(words: list[str], environment: dict[str, str], ranks: int) -> None:
    command = [sys.executable, "-m", "gradwire", "run", "-n", str(ranks), *words]
    subprocess.run(command, env=environment, check=True, timeout=_LIMIT)


def _run_on(
    shaped: links.ShapedLinks, words: list[str], environment: dict[str, str], ranks: int
) -> None:
    """A rank in each namespace."""
    common = {
        "WORLD_SIZE": str(ranks),
        "GRADWIRE_STORE": f"tcp://{shaped.address(0)}:{_STORE_PORT}",
        "GRADWIRE_SOCKET_IFNAME": "eth0",
        "GRADWIRE_SECRET": secrets.token_hex(),
    }
    with contextlib.ExitStack() as stack:
        started = []
        for rank, host in enumerate(shaped.hosts):
            variables = {**environment, **common, "RANK": str(rank)}
            process = host.run(
                lambda env=variables: subprocess.Popen([sys.executable, *words], env=env)
            )
            stack.callback(process.kill)
            started.append(process)
        if any(each.wait(_LIMIT) for each in started):
            raise RuntimeError(f"a rank failed over links held to {shaped.rate.name}: see above")


def _be_rank(options: argparse.Namespace) -> None:
    import gradwire

    with gradwire.init() as comm:
        timings = comm._tune(options.seconds)
        model = comm.cost_model
        cases = list(_cases(comm, model, options.sizes))
        if comm.rank == 0:
            tuned = {"parameters": model.parameters, "timings": list(map(_as_row, timings))}
            options.rank_of.write_text(json.dumps({"cases": cases, "tuned": tuned}))


def _as_row(timing: Any) -> dict[str, Any]:
    case = timing.case
    return {
        "collective": case.collective,
        "algorithm": case.algorithm,
        "bytes": case.nbytes,
        "measured": timing.measured,
        "predicted": timing.predicted,
    }


def _cases(comm: Any, model: Any, sizes: Sequence[int]) -> Iterator[tuple[Case, Mapping[str, Any]]]:
    """Every size by every algorithm and auto; seconds of a call on the slowest rank.

    A round has a turn of each, so that all cases have their share of the machine's good and bad
    minutes.
    """
    import gradwire

    per_host = len(comm.hosts[0])
    names = [*gradwire.algorithms("all_reduce"), AUTO]
    arrays = {size: np.zeros(size // 4, np.float32) for size in sizes}
    turns = {(size, name): _Turn(comm, x, name) for size, x in arrays.items() for name in names}
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in turns}
    for _ in range(_ROUNDS):
        for key, turn in turns.items():
            seconds[key].append(turn.time())
    for (size, name), found in seconds.items():
        chosen, least = model.choose(size, comm.size, per_host=per_host)
        auto = name == AUTO
        predicted = least if auto else model.predict(name, size, comm.size, per_host=per_host)
        case = {"ranks": comm.size, "bytes": size, "algorithm": name}
        run = {"predicted": predicted, "measured": found, "chosen": chosen if auto else name}
        yield case, run


class _Turn:
    """Calls of one case, back to back: as many as take _TURN."""

    def __init__(self, comm: Any, x: np.ndarray, algorithm: str) -> None:
        self._comm, self._x, self._algorithm = comm, x, algorithm
        self._calls = 2
        self.time()
        self._calls = max(1, min(5000, int(_TURN / max(self.time(), 1e-7))))

    def time(self) -> float:
        """Seconds of a call."""
        from gradwire.lab.tuning import measure

        self._comm.barrier()
        start = measure.perf_counter()
        for _ in range(self._calls):
            self._comm.all_reduce(self._x, algorithm=self._algorithm)
        return measure.slowest(self._comm, (measure.perf_counter() - start) / self._calls)


def _of_run(run: Mapping[str, Any]) -> float:
    """Seconds: the lower quartile of all turns, as the model has it of its own.

    Other work only adds to what calls take.
    """
    return float(np.quantile(run["measured"], 0.25))


def measured(case: Case) -> float:
    """Seconds: the median of the repetitions."""
    return statistics.median(map(_of_run, case["runs"]))


def predicted(case: Case) -> float:
    """The same for the predictions of their models."""
    return statistics.median(run["predicted"] for run in case["runs"])


def error(case: Case) -> float:
    """Predicted over measured, less one: the median of the repetitions."""
    return statistics.median(run["predicted"] / _of_run(run) for run in case["runs"]) - 1


def chosen(case: Case) -> str:
    """What auto chose, most often first."""
    names = [run["chosen"] for run in case["runs"]]
    return " or ".join(sorted(set(names), key=lambda name: (-names.count(name), name)))


def fixed(cases: Sequence[Case]) -> list[Case]:
    """Those whose algorithm was named."""
    return [case for case in cases if case["algorithm"] != AUTO]


def behind(auto: Case, cases: Sequence[Case]) -> tuple[float, Case]:
    """How much more time auto took than the best named algorithm, round by round, and that one.

    Which one is the best, the even rounds say, and how far behind auto is, the odd ones: the best
    of several that are equal would be ahead by chance in the rounds by which it was chosen.
    """
    beside = [
        case
        for case in fixed(cases)
        if all(case[key] == auto[key] for key in ("link", "ranks", "bytes"))
    ]
    best = min(beside, key=lambda case: statistics.median(_rounds(case)[::2]))
    pairs = zip(_rounds(auto)[1::2], _rounds(best)[1::2], strict=True)
    return statistics.median(ours / least for ours, least in pairs) - 1, best


def _rounds(case: Case) -> list[float]:
    """Those of all repetitions."""
    return [seconds for run in case["runs"] for seconds in run["measured"]]


def summary(cases: Sequence[Case]) -> list[str]:
    """The two goals, over all cases and for each link."""
    lines = []
    for link in [None, *dict.fromkeys(case["link"] for case in cases)]:
        there = [case for case in cases if link in (None, case["link"])]
        named = fixed(there)
        autos = [case for case in there if case["algorithm"] == AUTO]
        close = sum(abs(error(case)) <= CLOSE for case in named) / len(named)
        best = sum(behind(case, there)[0] <= NEARLY_BEST for case in autos) / len(autos)
        lines.append(
            f"{link or 'all'}: predicted within {CLOSE:.0%} in {close:.0%} of {len(named)} cases "
            f"(goal {CLOSE_SHARE:.0%}), auto within {NEARLY_BEST:.0%} of the best in {best:.0%} "
            f"of {len(autos)} (goal {NEARLY_BEST_SHARE:.0%})"
        )
    return lines


def document(found: Mapping[str, Any], name: str) -> str:
    """The md file."""
    cases: list[Case] = found["cases"]
    lines = [
        "# Predicted and measured",
        "",
        f"{found['date']}; {found['machine']}. `python {found['command']}`.",
        "",
        "Medians of the repetitions; bold where their median of predicted / measured is within "
        f"{CLOSE:.0%} of 1.",
        "",
        *(f"- {line}" for line in summary(cases)),
        "",
        f"![predicted over measured]({name}.png)",
    ]
    for key in dict.fromkeys((case["link"], case["ranks"]) for case in cases):
        lines += _table(key, [case for case in cases if (case["link"], case["ranks"]) == key])
    return "\n".join(lines) + "\n"


def _table(key: tuple[str, int], cases: Sequence[Case]) -> list[str]:
    """Predicted and measured, in µs; in the last columns what auto chose, and what it costs."""
    names = list(dict.fromkeys(case["algorithm"] for case in fixed(cases)))
    rows = []
    for nbytes in dict.fromkeys(case["bytes"] for case in cases):
        row = {case["algorithm"]: case for case in cases if case["bytes"] == nbytes}
        more, best = behind(row[AUTO], cases)
        cells = [_cell(row[name]) for name in names]
        cells += [f"{chosen(row[AUTO])}: {_cell(row[AUTO])}", f"{more:+.0%}, {best['algorithm']}"]
        rows.append([f"{nbytes:,}", *cells])
    head = " | ".join(["bytes", *names, AUTO, "to the best"])
    align = "r" * (1 + len(names)) + "lr"
    title = f"## {key[0]}, p = {key[1]}: predicted / measured, µs"
    return ["", title, "", *report.table(head, rows, align)]


def _cell(case: Case) -> str:
    text = f"{predicted(case) * 1e6:,.1f} / {measured(case) * 1e6:,.1f}"
    return f"**{text}**" if abs(error(case)) <= CLOSE else text


def draw(cases: Sequence[Case], path: Path) -> None:
    """Predicted over measured, a point for each case, and the band within which they should be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
    for link, ranks in dict.fromkeys((case["link"], case["ranks"]) for case in cases):
        there = [c for c in fixed(cases) if (c["link"], c["ranks"]) == (link, ranks)]
        points = [(measured(case), predicted(case)) for case in there]
        axes.plot(*zip(*points, strict=True), "o", ms=4, alpha=0.7, label=f"{link}, p = {ranks}")
    ends = np.array([min(map(measured, cases)), max(map(measured, cases))])
    axes.fill_between(ends, (1 - CLOSE) * ends, (1 + CLOSE) * ends, color="0.85", zorder=0)
    axes.plot(ends, ends, color="0.5", lw=0.8, zorder=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    axes.set_title(f"all_reduce: {len(fixed(cases))} cases, band of {CLOSE:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
