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
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO, NamedTuple

from gradwire._base.shortage import raise_limit
from gradwire._bootstrap.job_secret import find_secret
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import InvalidArgument
from gradwire._host import emulated_link, interfaces
from gradwire._launch import slots
from gradwire._launch.reaping import children_are_kept
from gradwire._launch.root_cause import (
    Failure,
    describe,
    read_joins,
    read_notes,
    root_cause,
)
from gradwire._launch.traced import traced
from gradwire._launch.watcher import Watcher

SETTLE_SECONDS = 2.0  # that the others have to fail by themselves after one has failed
GRACE_SECONDS = 5.0  # between asking ranks to end (SIGTERM) and killing them

# Runs before the rank's own program, in its process: die with the launcher. PR_SET_PDEATHSIG is 1.
_PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


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
        launch = _Launch(program, options.n, environment, options.tag_output, notes, watcher)
        launch.keep_going, launch.restarts = options.keep_going, options.restarts
        launch.least, launch.meet = options.min or 0, not options.servers
        launch.slot = slot
        if options.slot is not None or options.margin is not None:
            launch.grace = slot.margin
        with traced(options.trace, environment), _servers(options.servers, environment, watcher):
            return slots.Outcome(launch.run(), launch.told)


@contextlib.contextmanager
def _servers(shards: int, environment: dict[str, str], watcher: Watcher) -> Iterator[None]:
    """Shards of a parameter server, a process for each, until the end of the block.

    One that fails says why; the ranks' calls then raise errors that name it.
    """
    program = [sys.executable, "-m", "gradwire", "serve", "--shards", str(shards), "--only"]
    processes = [
        subprocess.Popen(
            [*_prelude(), *program, str(shard)], env=environment, start_new_session=True
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


def _prelude() -> list[str]:
    """The begin of the command of a process that dies with this one."""
    return [sys.executable, "-I", "-S", "-c", _PRELUDE, str(os.getpid())]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gradwire run", description="Runs a Python program on n ranks of this host."
    )
    parser.add_argument("-n", type=int, metavar="RANKS", help="number of ranks (--max)")
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


class _Ended(NamedTuple):
    rank: int
    at: float  # monotonic seconds


class _Signalled(NamedTuple):
    number: int


class _Launch:
    """The ranks of one run; only the thread in run() signals and reaps them."""

    def __init__(
        self,
        program: list[str],
        size: int,
        environment: dict[str, str],
        tag: bool,
        notes: int,
        watcher: Watcher,
    ) -> None:
        self._program, self._size, self._tag = program, size, tag
        self._environment, self._notes, self._watcher = environment, notes, watcher
        self._events: queue.SimpleQueue[_Ended | _Signalled] = queue.SimpleQueue()
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}  # not reaped yet
        self._printers: list[threading.Thread] = []
        self._failures: list[Failure] = []  # until the ranks were asked to end
        self._ending = False  # the ranks were asked to end
        self._act_at: float | None = None  # when to ask the ranks to end, or to kill them
        self._code = 0
        self.keep_going = False  # when a rank fails
        self.restarts = 0  # of each rank that fails, with keep_going; else in all
        self.least = 0  # ranks that are needed to go on when one fails; 0: all
        self.meet = True  # ranks connect to each other, and not only to servers
        self.slot = slots.Slot(math.inf, 0)  # at whose end the ranks must end
        self.grace = GRACE_SECONDS  # between asking ranks to end and killing them
        self.told = False  # by a signal, to stop
        self._saved = False  # some rank wants to be run again, and
        self._unclean = False  # some rank did not end as it was asked to
        self._begun: Counter[int] = Counter()  # how often each rank was started
        self._restarted = 0
        self._succeeded = False  # some rank has

    def run(self) -> int:
        with self._forwarding():
            try:
                for rank in range(self._size):
                    self._start(rank)
                while self._ranks:
                    self._handle(self._next())
                if not self._ending:
                    self._report()
                if self._goes_on and self._succeeded and not self._ending:
                    self._code = 0
                if self._saved and not self._failures and not self._unclean:
                    self._code = slots.REQUEUE
            finally:
                self._signal(signal.SIGKILL)
                for process in self._ranks.values():
                    self._watcher.discard(process.pid)
                    process.wait()
        for printer in self._printers:
            printer.join(GRACE_SECONDS)
        return self._code

    @property
    def _goes_on(self) -> bool:
        """Whether a rank that fails does not end the others."""
        return self.keep_going or self.least > 0

    def _start(self, rank: int) -> None:
        self._begun[rank] += 1
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if self.least and self._begun[rank] > 1:
            environment["GRADWIRE_JOIN"] = "1"
        if self._tag:
            environment["PYTHONUNBUFFERED"] = "1"
        pipe = subprocess.PIPE if self._tag else None
        process = subprocess.Popen(
            [*_prelude(), *self._program],
            env=environment,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        self._watcher.add(process.pid)
        self._ranks[rank] = process
        threading.Thread(target=self._watch, args=(rank, process.pid), daemon=True).start()
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                self._print(rank, source, sink.buffer)

    def _watch(self, rank: int, pid: int) -> None:
        """Reports the end of a process without reaping it, which would free its id too early."""
        with contextlib.suppress(
            ChildProcessError
        ):  # run() ended by an exception, and reaped the process
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._events.put(_Ended(rank, time.monotonic()))

    def _print(self, rank: int, source: IO[bytes], sink: IO[bytes]) -> None:
        def copy() -> None:
            with source:
                for line in source:
                    sink.write(b"[%d] %s" % (rank, line if line.endswith(b"\n") else line + b"\n"))
                    sink.flush()

        self._printers.append(threading.Thread(target=copy, daemon=True))
        self._printers[-1].start()

    def _next(self) -> _Ended | _Signalled | None:
        """Waits for the next event; None when the ranks' time to end by themselves is over."""
        while True:
            left = math.inf if self._act_at is None else self._act_at - time.monotonic()
            if not self._ending:
                left = min(left, self.slot.left)
            try:
                return self._events.get(timeout=None if math.isinf(left) else max(0.0, left))
            except queue.Empty:
                if left <= 0:
                    return None

    def _handle(self, event: _Ended | _Signalled | None) -> None:
        if isinstance(event, _Ended):
            self._reap(event)
        elif event is not None and event.number == signal.SIGUSR1:
            self._signal_leaders(event.number)  # asks the ranks to stop, and nothing more
        elif self._ending:
            self._act_at = None
            self._signal(signal.SIGKILL)
        elif event is None:
            if not self._failures:
                self._tell_of_overrun()
            self._stop(signal.SIGTERM)
        else:
            self._code = 128 + event.number
            self._stop(event.number)

    def _reap(self, ended: _Ended) -> None:
        process = self._ranks[ended.rank]
        status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        failed = status is not None and status.si_status != 0
        if failed or self._ending:
            _signal_group(process.pid, signal.SIGKILL)  # helpers that the rank left running
        self._watcher.discard(process.pid)
        code = process.wait()
        del self._ranks[ended.rank]
        if process.pid in read_joins(self._read_notes(), "late"):
            return  # the others are at their end, and it is not started again
        self._succeeded = self._succeeded or code == 0
        if code == slots.REQUEUE and not self.keep_going:  # the others may still be saving
            self._saved = True
            if math.isinf(self.slot.ends):  # no end of a slot ends those that wait for this one
                self._act_at = self._act_at or time.monotonic() + self.slot.margin
            return
        self._unclean = self._unclean or code != 0
        if code == 0 or self._ending:
            return
        failure = Failure(ended.rank, process.pid, code, ended.at)
        if self._goes_on and self._act_at is None and self._can_go_on(failure):
            self._go_on(failure)
            return
        self._failures.append(failure)
        self._act_at = self._act_at or time.monotonic() + SETTLE_SECONDS

    def _can_start_anew(self, failure: Failure) -> bool:
        if self.keep_going:
            return self._begun[failure.rank] <= self.restarts
        # Whoever joined after the others had come to the end would wait in vain.
        in_vain = self.meet and (self._succeeded or not self._has_members())
        return self._restarted < self.restarts and not in_vain

    def _can_go_on(self, failure: Failure) -> bool:
        """Whether enough ranks are left, or can be started anew."""
        enough = len(self._ranks) >= self.least and (self._has_members() or not self.meet)
        return self.keep_going or enough or self._succeeded or self._can_start_anew(failure)

    def _has_members(self) -> bool:
        """Whether a rank lives that others can join: one from the start, or that has joined."""
        joined = read_joins(self._read_notes(), "joined")
        ranks = self._ranks.items()
        return any(self._begun[rank] == 1 or each.pid in joined for rank, each in ranks)

    def _read_notes(self) -> bytes:
        return os.pread(self._notes, os.fstat(self._notes).st_size, 0)

    def _go_on(self, failure: Failure) -> None:
        """Starts a rank that failed anew, or goes on without it."""
        again = self._can_start_anew(failure)
        number = self._begun[failure.rank] if self.keep_going else self._restarted + 1
        then = f"starting it anew ({number} of {self.restarts})"
        without = f"going on with the other {len(self._ranks)}"
        text = describe([failure], self._size)
        print(f"gradwire run: {text}; {then if again else without}", file=sys.stderr, flush=True)
        if again:
            self._restarted += 1
            self._start(failure.rank)
        else:
            self._failures.append(failure)

    def _stop(self, number: int) -> None:
        self._report()
        self._ending = True
        self._act_at = time.monotonic() + self.grace
        if number == signal.SIGTERM and not self._failures:
            self._signal_leaders(number)  # which may need their helpers until they have saved
        else:
            self._signal(number)

    def _tell_of_overrun(self) -> None:
        self._code = slots.OVERRUN
        ranks = ", ".join(map(str, sorted(self._ranks)))
        margin = f"{self.slot.margin:g} s"
        what = f"the slot is over, and so is its margin of {margin}, but not rank {ranks}"
        if math.isinf(self.slot.ends):
            first = f"a rank ended with exit code {slots.REQUEUE}"
            what = f"{first}, and {margin} later rank {ranks} had not"
        print(
            f"gradwire run: {what}: ending what runs; give --margin more than a step and a save "
            "take",
            file=sys.stderr,
            flush=True,
        )

    def _report(self) -> None:
        if not self._failures:
            return
        notes = read_notes(self._read_notes())
        failures = [each._replace(note=notes.get(each.process)) for each in self._failures]
        code = root_cause(failures).code
        self._code = code if code > 0 else 128 - code
        then = f"; ending the other {len(self._ranks)}" if self._ranks else ""
        print(f"gradwire run: {describe(failures, self._size)}{then}", file=sys.stderr, flush=True)

    def _signal(self, number: int) -> None:
        for process in self._ranks.values():
            _signal_group(process.pid, number)

    def _signal_leaders(self, number: int) -> None:
        """Signals the ranks themselves, and not what they have started."""
        for process in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # not send_signal(), which may reap it

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Forwards Ctrl-C, SIGTERM and SIGUSR1 to the ranks during the block.

        After one of the first two, another signal kills them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = [signal.signal(each, self._note) for each in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.told = True
        self._events.put(_Signalled(number))


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended, and only its zombie is left
        os.killpg(leader, number)
