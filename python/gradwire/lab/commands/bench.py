"""`gradwire bench`: nccl-tests' columns for any collective, algorithm, codec and transport.

The options have nccl-tests' letters too, so that commands carry over: `all_reduce_perf -b 8 -e 128M
-f 2 -g 4` is `gradwire bench -b 8 -e 128M -f 2 -g 4`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradwire import _core
from gradwire._arrays.operands import REDUCIBLE
from gradwire._base import units
from gradwire._bootstrap import launch_info
from gradwire._bootstrap.rendezvous import choose_transports
from gradwire._errors import InvalidArgument, ScheduleError
from gradwire._init import init
from gradwire._launch import launcher
from gradwire._schedules.schedule import Schedule, gathering
from gradwire.lab.commands import plots
from gradwire.lab.tuning import measure
from gradwire.lab.tuning.measure import Result

if TYPE_CHECKING:
    from gradwire._communicator import Communicator

_HEADINGS = ("size(B)", "count", "type", "redop", "time(us)", "algbw(GB/s)", "busbw(GB/s)")
_COLUMNS = (*_HEADINGS, "#wrong")
_WIDTHS = (12, 12, 9, 6, 12, 12, 12, 8)
_OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor")
_NICKNAMES = {"half": "float16", "float": "float32", "double": "float64"}  # nccl-tests'
_ALL = "all"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `run`."""
    add = parser.add_argument
    add("-g", "--ranks", type=int, default=2, help="local ranks to start, when no launcher did")
    one_of = "one of: %(choices)s; default: %(default)s"
    collectives = measure.COLLECTIVES
    add("--collective", default="all_reduce", choices=collectives, metavar="NAME", help=one_of)
    add("--algorithm", default="auto", help="default: auto")
    add("--codec", default="none", help=f"one of: {', '.join(_core.codec_names())}")
    add("-d", "--dtype", default="float32", type=_type, help="or all; default: float32")
    add("-o", "--op", default="sum", choices=(*_OPS, _ALL), metavar="OP", help=one_of)
    add("-r", "--root", type=int, default=0, help="of broadcast, reduce, gather and scatter")
    add("-b", "--min-bytes", type=_bytes, default="4", metavar="SIZE", help="default: 4")
    add("-e", "--max-bytes", type=_bytes, default="16M", metavar="SIZE", help="default: 16M")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("-f", "--factor", type=float, default=4, help="between two sizes; default: 4")
    step.add_argument("-i", "--step-bytes", type=_bytes, metavar="SIZE", help="instead, their step")
    add("-n", "--iters", type=int, default=20, help="timed calls for each size; default: 20")
    add("-w", "--warmup", type=int, default=5, help="calls before them; default: 5")
    add("-c", "--check", type=int, default=1, help="calls whose results are checked; default: 1")
    add("--transport", type=_names, help="restrict to these, with commas: shm, rdma, tcp")
    add("--plot", metavar="FILE.png", help="draw bandwidth over size")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV instead of the table")
    form.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Measures on the launcher's ranks, or on local ranks that it starts with `options.argv`.

    Returns the exit code: 1 when a result was wrong. Raises InvalidArgument for options that do not
    fit together, before anything is started.
    """
    here = launch_info.from_environment()
    alone = here.launcher == "no launcher"
    _check(options, options.ranks if alone else here.size)
    if alone and options.ranks > 1:
        return launcher.run(["-n", str(options.ranks), "-m", "gradwire", "bench", *options.argv])
    return _measure_all(options)


def sizes(least: int, most: int, factor: float, step: int | None = None) -> Iterator[int]:
    """Sizes from `least` to `most`, each `factor` times the one before, or `step` larger."""
    size = least
    while size <= most:
        yield size
        size = max(size + 1, int(size * factor)) if step is None else size + step


def kinds(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The pairs of dtype and op to measure; with "all", those that are defined."""
    types = [options.dtype]
    if options.dtype == _ALL:
        types = [name for name in REDUCIBLE if _is_here(name)]
    reduces = options.collective in measure.REDUCING
    ops = _OPS if options.op == _ALL and reduces else ["sum" if options.op == _ALL else options.op]
    every = [(name, op) for name in types for op in ops]
    if _ALL not in (options.dtype, options.op):
        return every
    return [(name, op) for name, op in every if op in _core.reductions(name)]


def _is_here(dtype: str) -> bool:
    try:
        measure.numpy_dtype(dtype)
    except InvalidArgument:  # bfloat16 without the package ml_dtypes
        return False
    return True


def _type(text: str) -> str:
    return _NICKNAMES.get(text, text)


def _bytes(text: str) -> int:
    try:
        return int(units.size(text))
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _check(options: argparse.Namespace, ranks: int) -> None:
    if options.ranks < 1 or options.iters < 1 or min(options.warmup, options.check) < 0:
        raise InvalidArgument("--ranks and --iters are at least 1, --warmup and --check at least 0")
    if options.step_bytes is not None and options.step_bytes < 1:
        raise InvalidArgument(f"--step-bytes {options.step_bytes} does not grow: use 1 or more")
    if not 0 <= options.root < ranks:
        raise InvalidArgument(f"--root {options.root} is no rank of {ranks}")
    if options.factor <= 1:
        raise InvalidArgument(f"--factor {options.factor:g} does not grow: use more than 1")
    if not 0 < options.min_bytes <= options.max_bytes:
        raise InvalidArgument(
            f"--min-bytes {options.min_bytes} to --max-bytes {options.max_bytes} holds no size"
        )
    if options.codec != "none" and options.collective not in measure.REDUCING:
        raise InvalidArgument(
            f"--codec is for {', '.join(measure.REDUCING)}: the others move bytes"
        )
    _core.Codec(options.codec)
    choose_transports(options.transport)
    _check_type(options)
    if options.plot is not None:
        plots.require()
    if options.algorithm != "auto" and not options.algorithm.startswith("hierarchical("):
        _check_algorithm(options, ranks)


def _check_type(options: argparse.Namespace) -> None:
    if options.plot is not None and _ALL in (options.dtype, options.op):
        raise InvalidArgument("--plot draws one type and one op, not all")
    try:
        for name in {name for name, _ in kinds(options)}:
            measure.numpy_dtype(name)
    except TypeError as error:
        raise InvalidArgument(f"--dtype {options.dtype}: {error}") from None
    for name, op in kinds(options):
        known = _core.reductions(name) if name in REDUCIBLE else _OPS
        if op not in known:
            raise InvalidArgument(
                f"op '{op}' of {name} is not defined; use one of: {', '.join(known)}"
            )


def _check_algorithm(options: argparse.Namespace, ranks: int) -> None:
    algorithm, collective = options.algorithm, options.collective
    by = gathering(algorithm)
    if by is not None and collective in measure.REDUCING:
        algorithm, collective = by or "direct", "all_gather"
    try:
        Schedule.generate(algorithm, ranks, collective=collective)
    except ScheduleError as error:
        raise InvalidArgument(str(error)) from error


def _measure_all(options: argparse.Namespace) -> int:
    with init(transports=options.transport) as comm:
        report = _Report(options, comm) if comm.rank == 0 else None
        for dtype, op in kinds(options):
            for nbytes in sizes(
                options.min_bytes, options.max_bytes, options.factor, options.step_bytes
            ):
                result = _result(options, comm, nbytes, dtype, op)
                if report is not None:
                    report.add(result)
        return 0 if report is None else report.finish()


def _result(
    options: argparse.Namespace, comm: Communicator, nbytes: int, dtype: str, op: str
) -> Result:
    names = ("collective", "algorithm", "codec", "root")
    given = {name: getattr(options, name) for name in names}
    case = measure.case_of_bytes(nbytes, comm.size, dtype=dtype, op=op, **given)
    return measure.measure(
        comm, case, iterations=options.iters, warmup=options.warmup, checks=options.check
    )


class _Report:
    """Rank 0's output: a table line by line, or CSV or JSON at the end, and the plot."""

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
            print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
            print(f"# Avg bus bandwidth    : {mean:.3f}")
        if self._options.plot is not None:
            plots.bandwidth(self._results, self._title, Path(self._options.plot))
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
    op = case.op if case.collective in measure.REDUCING else "none"
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
