"""The command `gradwire`, also `python -m gradwire`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire._base import units
from gradwire._bootstrap import launch_info
from gradwire._errors import Error, InvalidArgument, ScheduleError
from gradwire._launch import launcher
from gradwire._schedules.schedule import Schedule, groups_of
from gradwire._tools import doctor, status
from gradwire.lab.commands import advise, bench, simulate, trace, tune
from gradwire.serve import Server
from gradwire.serve._directory import MOST_SHARDS

_FAILURE = 1
_USAGE = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 for a failure, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:  # the rest belongs to the program that it starts
        try:
            return launcher.run(arguments[1:])
        except Error as error:
            return _failed(error)
    options = _parser().parse_args(arguments)
    options.argv = arguments[1:]
    try:
        return int(options.command(options))
    except InvalidArgument as error:
        return _say(error, _USAGE)
    except (Error, OSError) as error:
        return _failed(error)
    except KeyboardInterrupt:
        return _INTERRUPTED


def command_names() -> list[str]:
    """Returns the names of the commands, in the order of `gradwire --help`."""
    (names,) = (each.choices for each in _parser()._actions if isinstance(each.choices, dict))
    return [*names]


def _say(error: Exception, code: int) -> int:
    print(f"gradwire: {error}", file=sys.stderr)
    return code


def _failed(error: Error | OSError) -> int:
    if isinstance(error, BrokenPipeError):  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    return _say(error, _FAILURE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradwire", description="Collective communication for data-parallel training."
    )
    parser.add_argument("--version", action="version", version=f"gradwire {doctor.version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("run", help="start a program on n local ranks", add_help=False)
    _add_doctor(commands.add_parser("doctor", help="what is available here, or why not"))
    _add_serve(commands.add_parser("serve", help="hold shards of a parameter server"))
    bench.add_options(commands.add_parser("bench", help="measure collectives, as nccl-tests does"))
    tune.add_options(commands.add_parser("tune", help='measure what algorithm="auto" decides by'))
    advise.add_options(commands.add_parser("advise", help="predict a model's steps on a cluster"))
    simulate.add_options(commands.add_parser("simulate", help="simulate collectives of any size"))
    trace.add_options(commands.add_parser("trace", help="merge and sum up what ranks recorded"))
    _add_schedule(commands.add_parser("schedule", help="show, verify or draw a schedule"))
    return parser


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        nargs="?",
        const="",
        metavar="NAME",
        help="what the ranks of the running jobs on this host do, and who waits for whom; "
        "only jobs whose name begins so. Without a name, and started by a launcher on several "
        "ranks: all their hosts, and the rates and round trips between these",
    )
    parser.add_argument(
        "--link",
        metavar="[RATE,]TIME|HOST[:PORT]",
        help="a long link, as 1gbit,80ms: whether TCP here fills it, and which sysctl would help; "
        "the round trip to a HOST is measured",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_doctor_command)


def _doctor_command(options: argparse.Namespace) -> int:
    if options.job == "" and launch_info.started_by_launcher():
        from gradwire._tools import job_hosts

        return job_hosts.run(as_json=options.json)
    if options.job is not None:
        print(status.report(options.job, as_json=options.json))
        return 0
    found = doctor.checks(options.link)
    print(doctor.as_json(found) if options.json else doctor.as_table(found))
    return 0


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=1, help="number of shards in all; default: 1")
    parser.add_argument(
        "--only",
        type=_shards_of,
        metavar="FIRST[-LAST]",
        help="the shards that this process holds; default: all",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="where servers and clients meet, tcp://HOST:PORT on shard 0's host, whose process "
        "listens there; default: GRADWIRE_STORE",
    )
    parser.add_argument(
        "--name", default="parameters", help="tells several services of a job apart"
    )
    parser.add_argument("--snapshot", metavar="DIR", help="write and read the shards' states there")
    parser.add_argument(
        "--interval", default="60s", metavar="TIME", help="between snapshots; default: 60s"
    )
    parser.add_argument(
        "--until-idle", action="store_true", help="end when all clients have come and gone"
    )
    parser.set_defaults(command=_serve_command)


def _shards_of(given: str) -> range:
    first, _, last = given.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not 0 < len(found) <= MOST_SHARDS:
        raise argparse.ArgumentTypeError(f"{given!r} is neither a shard, as 3, nor several, as 0-3")
    return found


def _serve_command(options: argparse.Namespace) -> int:
    server = Server(
        options.shards,
        only=options.only,
        store=options.store,
        name=options.name,
        snapshot=options.snapshot,
        interval=units.duration(options.interval),
    )
    sys.stderr.write(f"gradwire serve: {server!r} has begun\n")
    server.run(until_idle=options.until_idle)
    if server.snapshot_error:
        sys.stderr.write(f"gradwire serve: {server.snapshot_error}\n")
    return 1 if server.snapshot_error else 0


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="print its text form")
    verify = verbs.add_parser("verify", help="print what holds; exit code 1 when it cannot run")
    draw = verbs.add_parser("draw", help="draw a space-time diagram as SVG")
    draw.add_argument(
        "-o", "--output", metavar="FILE", help="write it there; default: a pipe gets it"
    )
    for verb, command in ((show, _show), (verify, _verify), (draw, _draw)):
        _add_source(verb)
        verb.set_defaults(command=command)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "schedule",
        help="an algorithm (ring, 'hierarchical(ring,direct)', …), a file in the text form, "
        "or - for standard input",
    )
    parser.add_argument("-n", "--ranks", type=int, help="number of ranks, for an algorithm")
    parser.add_argument("--collective", default="all_reduce", help="default: all_reduce")
    parser.add_argument("--root", type=int, default=0, help="of reduce, broadcast, gather, scatter")
    parser.add_argument(
        "--per-host", type=int, metavar="RANKS", help="ranks of each host, for hierarchical"
    )


def _show(options: argparse.Namespace) -> int:
    print(_load(options).dump(), end="")
    return 0


def _verify(options: argparse.Namespace) -> int:
    schedule = _load(options)
    report = schedule.verify()
    print(schedule)
    print(report)
    return 0 if report.ok else _FAILURE


def _draw(options: argparse.Namespace) -> int:
    drawing = _load(options).draw()
    if options.output is None and sys.stdout.isatty():
        raise InvalidArgument("a drawing is SVG, for a browser: name its file, -o schedule.svg")
    if options.output is None:
        print(drawing, end="")
    else:
        Path(options.output).write_text(drawing, encoding="utf-8")
    return 0


def _load(options: argparse.Namespace) -> Schedule:
    name = options.schedule
    if name == "-":
        return Schedule.parse(sys.stdin.read())
    if os.path.exists(name):
        return Schedule.parse(Path(name).read_text(encoding="utf-8"))
    return _generate(name, options)


def _generate(name: str, options: argparse.Namespace) -> Schedule:
    if options.ranks is None:
        raise InvalidArgument(
            f"{name!r} is no file; if it is an algorithm, say for how many ranks: -n 8"
        )
    groups = None
    if options.per_host is not None:
        if options.per_host < 1:
            raise InvalidArgument(f"--per-host {options.per_host}: at least one rank")
        groups = groups_of(options.ranks, options.per_host)
    try:
        return Schedule.generate(
            name, options.ranks, collective=options.collective, root=options.root, groups=groups
        )
    except ScheduleError as error:
        raise InvalidArgument(str(error)) from error
