"""spawn: runs a function on several ranks, from a test or a notebook."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import queue
import secrets
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from gradwire._base import arguments
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import Mesh, inproc_meshes
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import Error, InvalidArgument, RendezvousError
from gradwire._host import emulated_link
from gradwire._launch.at_exit import CONSEQUENCES
from gradwire._launch.reaping import children_are_kept
from gradwire._launch.root_cause import describe_exit
from gradwire._trace import session

GRACE_SECONDS = 2.0  # that the other ranks have to fail by themselves after one has failed
CONNECT_GRACE_SECONDS = 10.0  # that a rank has to say itself why it could not connect in time

_PR_SET_PDEATHSIG = 1
_CONNECTED = b""  # what a rank reports before its outcome


def spawn(
    fn: Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    threads: bool = False,
    transports: Sequence[str] | None = None,
    timeout: float = 300.0,
) -> list[Any]:
    """Runs `fn(comm, *args)` on `ranks` ranks; returns their results in rank order.

    The ranks are processes forked from this one, so `fn` may be any function, even one defined in a
    notebook, and sees what this process has loaded; its result is pickled. A fork copies only one
    thread, so OpenMP's parts of torch compute in one thread there; fork before starting CUDA or
    threads that hold locks, or run a script with `gradwire run` instead. With `threads=True` the
    ranks are threads of this process, nothing is copied, and `transports` does not apply.

    `timeout` (seconds) is for connecting, and the default for each operation. When a rank fails,
    the others are ended, and the first failure that is not a consequence of another is raised here;
    its `__cause__` names the rank and holds its traceback. Threads cannot be ended: one that goes
    on computing is left behind. Raises InvalidArgument, too.
    """
    ranks = arguments.whole(ranks, "ranks", least=1)
    if not callable(fn):
        raise arguments.wrong(fn, "fn", "a function of a communicator")
    args = tuple(arguments.items(args, "args", "a list of arguments"))
    timeout = arguments.seconds(timeout)
    if arguments.flag(threads, "threads"):
        if transports is not None:
            raise InvalidArgument("transports= does not apply to threads=True, which use inproc")
        emulated_link.require_none("threads=True joins threads by inproc")
        return _results(_Threads(fn, ranks, args, timeout).run())
    with children_are_kept():
        return _results(_Processes(fn, ranks, args, transports, timeout).run())


class SpawnedTraceback(Exception):
    """The cause of an error that spawn() raises: names the rank and holds its traceback."""


@dataclass
class _Outcome:
    """The end of a rank; `at` (monotonic seconds) orders failures."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    at: float = 0.0


def _failure(rank: int, error: BaseException) -> _Outcome:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return _Outcome(rank, error=error, trace=trace, at=time.monotonic())


def _results(outcomes: list[_Outcome]) -> list[Any]:
    failures = [outcome for outcome in outcomes if outcome.error is not None]
    if not failures:
        return [outcome.value for outcome in sorted(outcomes, key=lambda each: each.rank)]
    roots = [each for each in failures if not isinstance(each.error, CONSEQUENCES)]
    first = min(roots or failures, key=lambda each: each.at)
    assert first.error is not None
    raise first.error from SpawnedTraceback(f"on rank {first.rank}:\n{first.trace}".rstrip())


class _Threads:
    """Runs ranks that are threads, joined by the transport inproc."""

    def __init__(
        self, fn: Callable[..., Any], size: int, args: tuple[Any, ...], timeout: float
    ) -> None:
        self._fn, self._args, self._timeout = fn, args, timeout
        self._meshes = inproc_meshes(size)
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._open: dict[int, Communicator] = {}

    def run(self) -> list[_Outcome]:
        for mesh in self._meshes:
            name = f"gradwire-rank-{mesh.rank}"
            threading.Thread(target=self._run_rank, args=(mesh,), name=name, daemon=True).start()
        outcomes: list[_Outcome] = []
        limit: float | None = None
        try:
            while len(outcomes) < len(self._meshes):
                outcomes.append(self._outcomes.get(timeout=limit))
                if outcomes[-1].error is not None:
                    limit = GRACE_SECONDS
        except queue.Empty:  # a thread goes on computing
            pass
        finally:
            for comm in list(self._open.values()):
                comm.abort("spawn() is over")
        return outcomes

    def _run_rank(self, mesh: Mesh) -> None:
        self._outcomes.put(self._outcome(mesh))

    def _outcome(self, mesh: Mesh) -> _Outcome:
        try:
            comm = from_mesh(mesh, timeout=self._timeout)
        except BaseException as error:
            return _failure(mesh.rank, error)
        self._open[mesh.rank] = comm
        outcome = _call(self._fn, comm, mesh.rank, self._args)
        del self._open[mesh.rank]
        return outcome


def _call(fn: Callable[..., Any], comm: Communicator, rank: int, args: tuple[Any, ...]) -> _Outcome:
    """Runs the function, and closes the communicator, or aborts it if the function raised."""
    try:
        outcome = _Outcome(rank, fn(comm, *args))
        comm.close()
    except BaseException as error:
        outcome = _failure(rank, error)
        comm.abort(f"{type(error).__name__}: {error}")
    return outcome


@dataclass
class _Child:
    rank: int
    process: ForkProcess
    pipe: Connection[Any, Any]


class _Processes:
    """Runs ranks that are forked processes; this process serves the store where they meet."""

    def __init__(
        self,
        fn: Callable[..., Any],
        size: int,
        args: tuple[Any, ...],
        transports: Sequence[str] | None,
        timeout: float,
    ) -> None:
        self._fn, self._size, self._args = fn, size, args
        self._transports, self._timeout = transports, timeout
        self._collects = gc.isenabled()
        self._secret = secrets.token_bytes(32)
        self._job = f"spawn-{secrets.token_hex(8)}"
        name = f"gradwire-{os.getuid()}-{self._job}"
        self._server = StoreServer(Address("unix", name), self._job, self._secret)
        self._children: list[_Child] = []
        self._waiting: dict[int, _Child] = {}  # not reported yet

    def run(self) -> list[_Outcome]:
        try:
            for rank in range(self._size):
                self._waiting[rank] = self._fork(rank)
                self._children.append(self._waiting[rank])
            self._server.start()  # only now: a fork would not copy its thread
            return self._collect()
        finally:
            self._end()
            self._server.close()

    def _fork(self, rank: int) -> _Child:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=self._run_rank, args=(rank, theirs, os.getpid()), name=f"gradwire-rank-{rank}"
        )
        with warnings.catch_warnings(), _nothing_collected():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # as the docstring does
            process.start()
        theirs.close()
        return _Child(rank, process, ours)

    def _run_rank(self, rank: int, pipe: Connection[Any, Any], parent: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        gc.freeze()  # the parent's garbage may wait for threads that only the parent has
        if self._collects:
            gc.enable()
        _compute_in_one_thread()
        self._server.close()
        outcome = self._outcome(rank, pipe)
        session.write_part()  # such a process ends without what runs at an exit
        pipe.send_bytes(_pickled(outcome))

    def _outcome(self, rank: int, pipe: Connection[Any, Any]) -> _Outcome:
        launch = LaunchInfo(rank, self._size, "spawn()", self._job, store=str(self._server.address))
        try:
            comm = rendezvous(
                launch,
                lambda mesh: from_mesh(mesh, timeout=self._timeout),
                timeout=self._timeout,
                transports=self._transports,
                secret=self._secret,
            )
            pipe.send_bytes(_CONNECTED)
        except BaseException as error:
            return _failure(rank, error)
        return _call(self._fn, comm, rank, self._args)

    def _collect(self) -> list[_Outcome]:
        """The ends of all ranks; after a failure, of those that end in time, too."""
        outcomes: list[_Outcome] = []
        connecting, failed = set(self._waiting), False
        limit: Deadline | None = Deadline(self._timeout + CONNECT_GRACE_SECONDS)
        while self._waiting and not (limit and limit.passed):
            for child in self._ready(limit):
                connecting.discard(child.rank)
                if (outcome := self._receive(child)) is not None:
                    outcomes.append(outcome)
                    del self._waiting[child.rank]
            if not failed and any(outcome.error for outcome in outcomes):
                limit, failed = Deadline(GRACE_SECONDS), True
            elif not failed and not connecting:
                limit = None
        return outcomes + ([] if failed else list(map(self._unconnected, sorted(connecting))))

    def _ready(self, limit: Deadline | None) -> list[_Child]:
        """Waits for ranks that have reported something, or ended."""
        sources = {each: child for child in self._waiting.values() for each in _sources(child)}
        ready = wait(list(sources), limit.remaining if limit else None)
        return list({sources[each].rank: sources[each] for each in ready}.values())  # type: ignore[index]

    def _unconnected(self, rank: int) -> _Outcome:
        text = (
            f"rank {rank} of {self._size} did not connect within {self._timeout:g} s, nor say why: "
            "it is a fork, which may wait for a lock that another thread of this process held, or "
            "for that thread; spawn() before threads start, or run a script with `gradwire run`"
        )
        return _failure(rank, RendezvousError(text))

    def _receive(self, child: _Child) -> _Outcome | None:
        """Returns what a rank has reported, or how it ended; None where it has only connected."""
        try:
            if child.pipe.poll():
                report = child.pipe.recv_bytes()
                outcome: _Outcome | None = None if report == _CONNECTED else pickle.loads(report)
                return outcome
        except (EOFError, OSError):  # it ended in the middle of its report
            pass
        child.process.join()
        how = describe_exit(child.process.exitcode or 0)
        return _failure(child.rank, Error(f"rank {child.rank} of {self._size} {how}"))

    def _end(self) -> None:
        """Waits for ranks that have reported; ends the others."""
        for child in self._waiting.values():
            child.process.terminate()
        limit = Deadline(GRACE_SECONDS)
        for child in self._children:
            child.process.join(limit.remaining)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
            child.process.close()
            child.pipe.close()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Turns the garbage collector off; a fork inherits that, and turns it on when it is ready."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _sources(child: _Child) -> tuple[Connection[Any, Any], int]:
    return child.pipe, child.process.sentinel


def _pickled(outcome: _Outcome) -> bytes:
    """The outcome as the parent can read it, whatever the function returned or raised."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception as error:
        if outcome.error is None:
            return pickle.dumps(_failure(outcome.rank, error))
        kind, text = type(outcome.error).__name__, str(outcome.error)
        outcome.error = Error(f"{kind}: {text}")
        return pickle.dumps(outcome)
    return data


def _compute_in_one_thread() -> None:
    """Makes OpenMP compute in the calling thread alone, in a fork.

    A fork copies GNU's record of its pool of threads, but not the threads: libgomp waits for ever
    for them in the next parallel region of the thread that forked.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # MKL's too, which counts its own
    for path in _loaded_libraries("libgomp"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_set_num_threads(1)


def _loaded_libraries(name: str) -> set[str]:
    """The paths of this process's libraries of that name."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        fields = (line.split(maxsplit=5) for line in maps)
        paths = {each[5].rstrip("\n") for each in fields if len(each) == 6}
        return {each for each in paths if each.rpartition("/")[2].startswith(name)}
    return set()
