"""`gradwire bench`: nccl-tests' columns for any collective, algorithm, codec and transport."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from gradwire import _core, _launch, _measure, _world
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._measure import Case, Result
from gradwire._rendezvous import choose_transports
from gradwire._schedules import Schedule

if TYPE_CHECKING:
    from gradwire import Communicator

_SCALES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HEADINGS = ("size(B)", "count", "type", "redop", "time(us)", "algbw(GB/s)", "busbw(GB/s)")
_COLUMNS = (*_HEADINGS, "#wrong")
_WIDTHS = (12, 12, 9, 6, 12, 12, 12, 8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `run`."""
    add = parser.add_argument
    add("-n", "--ranks", type=int, default=2, help="local ranks to start, when no launcher did")
    add("--collective", default="all_reduce", choices=_measure.COLLECTIVES)
    add("--algorithm", default="auto", help="default: auto")
    add("--codec", default="none", help=f"one of: {', '.join(_core.codec_names())}")
    add("--dtype", default="float32", help="default: float32")
    add("--op", default="sum", choices=("sum", "avg", "min", "max", "prod"))
    add("-b", "--min-bytes", type=_bytes, default="4", metavar="SIZE", help="default: 4")
    add("-e", "--max-bytes", type=_bytes, default="16M", metavar="SIZE", help="default: 16M")
    add("-f", "--factor", type=float, default=4, help="between two sizes; default: 4")
    add("--iters", type=int, default=20, help="timed calls for each size; default: 20")
    add("--warmup", type=int, default=5, help="calls before them; default: 5")
    add("--transport", type=_names, help="restrict to these, with commas: shm, tcp")
    add("--plot", metavar="FILE.png", help="draw bandwidth over size")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV instead of the table")
    form.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Measures, on the launcher's ranks or on local ones that it starts with the same `argv`.

    Returns the exit code: 1 when a result was wrong. Raises InvalidArgument for options that do not
    fit together, before anything is started.
    """
    world = _world.from_environment()
    alone = world.launcher == "no launcher"
    _check(options, options.ranks if alone else world.size)
    if alone and options.ranks > 1:
        return _launch.run(["-n", str(options.ranks), "-m", "gradwire", "bench", *argv])
    return _measure_all(options)


def sizes(least: int, most: int, factor: float) -> Iterator[int]:
    """`least`, and each next `factor` times as much, up to `most`."""
    size = least
    while size <= most:
        yield size
        size = max(size + 1, int(size * factor))


def _bytes(text: str) -> int:
    digits, scale = text.upper().removesuffix("B"), ""
    if digits[-1:] in _SCALES:
        digits, scale = digits[:-1], digits[-1:]
    try:
        return int(digits) * _SCALES[scale]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use 4, 64K, 16M") from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _check(options: argparse.Namespace, ranks: int) -> None:
    if options.ranks < 1 or options.iters < 1 or options.warmup < 0:
        raise InvalidArgument("--ranks and --iters are at least 1, --warmup at least 0")
    if options.factor <= 1:
        raise InvalidArgument(f"--factor {options.factor:g} does not grow: use more than 1")
    if not 0 < options.min_bytes <= options.max_bytes:
        raise InvalidArgument(
            f"--min-bytes {options.min_bytes} to --max-bytes {options.max_bytes} holds no size"
        )
    if options.codec != "none" and options.collective not in _measure.REDUCING:
        raise InvalidArgument(
            f"--codec is for {', '.join(_measure.REDUCING)}: the others move bytes"
        )
    _core.Codec(options.codec)
    choose_transports(options.transport)
    _check_type(options)
    if options.plot is not None:
        _pyplot()
    if options.algorithm != "auto" and not options.algorithm.startswith("hierarchical("):
        _check_algorithm(options, ranks)


def _check_type(options: argparse.Namespace) -> None:
    try:
        kind = _measure.numpy_dtype(options.dtype).kind
    except TypeError as error:
        raise InvalidArgument(f"--dtype {options.dtype}: {error}") from None
    if options.op == "avg" and kind in "iu":
        raise InvalidArgument(f"--op avg of {options.dtype} is not exact: use a floating type")


def _check_algorithm(options: argparse.Namespace, ranks: int) -> None:
    try:
        Schedule.generate(options.algorithm, ranks, collective=options.collective)
    except ScheduleError as error:
        raise InvalidArgument(str(error)) from error


def _measure_all(options: argparse.Namespace) -> int:
    import gradwire

    with gradwire.init(transports=options.transport) as comm:
        report = _Report(options, comm) if comm.rank == 0 else None
        for nbytes in sizes(options.min_bytes, options.max_bytes, options.factor):
            result = _measure.measure(
                comm, _case(options, nbytes, comm), iterations=options.iters, warmup=options.warmup
            )
            if report is not None:
                report.add(result)
        return 0 if report is None else report.finish()


def _case(options: argparse.Namespace, nbytes: int, comm: Communicator) -> Case:
    names = ("collective", "dtype", "op", "algorithm", "codec")
    return _measure.case_of_bytes(
        nbytes, comm.size, **{name: getattr(options, name) for name in names}
    )


class _Report:
    """What rank 0 prints and draws: a table line by line, CSV or JSON at the end."""

    def __init__(self, options: argparse.Namespace, comm: Communicator) -> None:
        self._options = options
        self._links = ", ".join(sorted(set(comm.transports.values()))) or "no links"
        self._results: list[Result] = []
        self._title = (
            f"{options.collective} by {options.algorithm}, codec {options.codec}, "
            f"{comm.size} ranks, {self._links}"
        )
        if self._as_table:
            print(f"# gradwire {self._title}; {options.iters} iterations, slowest rank")
            print(_line(_COLUMNS))

    @property
    def _as_table(self) -> bool:
        return not (self._options.csv or self._options.json)

    def add(self, result: Result) -> None:
        self._results.append(result)
        if self._as_table:
            print(_line([_text(value) for value in _row(result)]), flush=True)

    def finish(self) -> int:
        wrong = sum(result.wrong or 0 for result in self._results)
        if self._options.csv:
            _write_csv(self._results, sys.stdout)
        elif self._options.json:
            json.dump(self._as_json(), sys.stdout, indent=2)
            print()
        else:
            mean = sum(result.busbw for result in self._results) / len(self._results)
            print(f"# wrong elements: {wrong}; average busbw: {mean:.3f} GB/s")
        if self._options.plot is not None:
            _plot(self._results, self._title, self._options.plot)
        return 1 if wrong else 0

    def _as_json(self) -> dict[str, Any]:
        names = ("collective", "algorithm", "codec", "dtype", "op", "iters", "warmup")
        head = {name: getattr(self._options, name) for name in names}
        ranks = self._results[0].ranks
        rows = [dict(zip(_COLUMNS, _row(each), strict=True)) for each in self._results]
        return {**head, "ranks": ranks, "transports": self._links, "results": rows}


def _row(result: Result) -> tuple[int | float | str | None, ...]:
    case = result.case
    rates = (result.seconds * 1e6, result.algbw, result.busbw)
    op = case.op if case.collective in _measure.REDUCING else "none"
    return (case.nbytes, case.count, case.dtype, op, *rates, result.wrong)


def _text(value: int | float | str | None) -> str:
    if value is None:
        return "N/A"
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def _line(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _write_csv(results: Sequence[Result], file: IO[str]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows(map(_row, results))


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise InvalidArgument("--plot needs matplotlib: pip install gradwire[plot]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _plot(results: Sequence[Result], title: str, path: str) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    size = [result.case.nbytes for result in results]
    axes.plot(size, [result.busbw for result in results], marker="o", label="busbw")
    axes.plot(size, [result.algbw for result in results], marker="s", label="algbw")
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel="bytes", ylabel="GB/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
