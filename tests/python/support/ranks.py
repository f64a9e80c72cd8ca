"""Runs a function on p ranks: threads, or processes where a rank must be able to die."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import multiprocessing
import os
import pickle
import queue
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from gradwire import Communicator
from gradwire._bootstrap.mesh import LANES, Job, Link, Mesh, Peer, inproc_meshes
from gradwire._communicator import from_mesh
from gradwire._host import transport_kinds
from gradwire._host.interfaces import LOOPBACK
from sealing import as_set, tcp_pair

LIMIT = 240.0  # seconds, after which ranks and programs are taken to hang, however busy the machine
VANISHED = 3  # the exit code of a rank that does
# What every test of a fault goes over: whatever is added here inherits them.
# Between processes, which can die; rdma where there is a device.
PROCESS_TRANSPORTS = tuple(
    name for name in transport_kinds.DEFAULTS if transport_kinds.why_not(name) is None
)
assert {"shm", "tcp"} <= set(PROCESS_TRANSPORTS)  # else their tests would be left out in silence
TRANSPORTS = ("inproc", *PROCESS_TRANSPORTS)
over_processes = pytest.mark.parametrize("transport", PROCESS_TRANSPORTS)
over_all = pytest.mark.parametrize("transport", TRANSPORTS)
Body = Callable[..., Any]
# One name for all pairs of ranks, or one for each.
Transport = str | Callable[[int, int], str]


def nightly(*values: Any) -> list[Any]:
    """Parameters of a test that the gate leaves out."""
    return [pytest.param(each, marks=pytest.mark.nightly) for each in values]


def some(cases: Iterable[tuple[Any, ...]], chosen: Callable[..., bool]) -> list[Any]:
    """The cases, of which the gate runs those that are chosen: a covering set of a product."""
    return [
        each if chosen(*each) else pytest.param(*each, marks=pytest.mark.nightly) for each in cases
    ]


@dataclass
class Outcome:
    """The end of a rank; neither a value nor an error if its process died."""

    value: Any = None
    error: BaseException | None = None
    died: bool = False
    status: int = 0  # with which its process ended; -N: by signal N
    queued: float = 0.0  # seconds that its process waited for a processor, where that is told


def on_ranks(p: int | None = None, **options: Any) -> Callable[[Body], Callable[..., None]]:
    """Makes a test of what each rank runs with its communicator and with the test's parameters.

    `options` are those of `run`. `p`, if it is left out, and `transport` may be parameters.
    """

    def made(body: Body) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            chosen = {name: given[name] for name in ("transport",) if name in given}
            size = given["p"] if p is None else p
            run(size, functools.partial(body, **given), **chosen, **options)

        _, *parameters = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return made


def run(p: int, body: Body, *args: Any, **options: Any) -> list[Any]:
    """The result of `body(comm, *args)` on each rank; raises the first rank's error.

    A failed assertion comes before what other ranks meet because of it.
    """
    ended = outcomes(p, body, *args, **options)
    errors = [each.error for each in ended if each.error is not None]
    if errors:
        raise min(errors, key=lambda error: not isinstance(error, AssertionError))
    died = {rank: each.status for rank, each in enumerate(ended) if each.died}
    assert not died, f"ranks died, with status: {died}"
    return [each.value for each in ended]


def outcomes(
    p: int,
    body: Body,
    *args: Any,
    transport: Transport = "inproc",
    processes: bool = False,
    timeout: float = 30.0,
    job: str = "",
    sites: tuple[str, ...] = (),
    **setting: Any,
) -> list[Outcome]:
    """The outcome of `body(comm, *args)` on each rank, at the site of its name, if any.

    `setting` goes to from_mesh.
    """

    def rank_body(mesh: Mesh) -> Outcome:
        try:
            with from_mesh(mesh, timeout=timeout, **setting) as comm:
                return Outcome(body(comm, *args))
        except BaseException as error:
            return Outcome(error=error)

    made = meshes(p, transport, job)
    for mesh in made:
        mesh.site_names = sites
    return (_in_processes if processes else _in_threads)(made, rank_body)


def meshes(p: int, transport: Transport, name: str = "") -> list[Mesh]:
    """Joined by socket pairs, or by TCP connections on loopback."""
    if transport == "inproc":
        return inproc_meshes(p)
    job = Job(name or f"test-{secrets.token_hex(4)}", b"0" * 32)
    made = [Mesh(job, rank, p, 7, ("here",) * p, {}, LOOPBACK) for rank in range(p)]
    for low in range(p):
        for high in range(low + 1, p):
            name = transport if isinstance(transport, str) else transport(low, high)
            pairs = [_pair(name) for _ in ("control", *LANES)]
            for end, (owner, other) in enumerate(((low, high), (high, low))):
                links = {
                    lane: Link(name, pair[end]) for lane, pair in zip(LANES, pairs[1:], strict=True)
                }
                made[owner].peers[other] = Peer(True, pairs[0][end], links)
    return made


def _pair(transport: str) -> tuple[socket.socket, socket.socket]:
    if transport != "tcp":
        return socket.socketpair()
    return as_set(*tcp_pair())


def _in_threads(made: list[Mesh], rank_body: Callable[[Mesh], Outcome]) -> list[Outcome]:
    ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=lambda mesh=mesh: ended.put((mesh.rank, rank_body(mesh))))
        for mesh in made
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    found: dict[int, Outcome] = {}
    while len(found) < len(made):
        try:
            rank, outcome = ended.get(timeout=LIMIT)
        except queue.Empty:
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            raise AssertionError(f"only ranks {sorted(found)} ended within {LIMIT} s") from None
        found[rank] = outcome
    eventually(lambda: not any(_is_running(thread) for thread in threads))
    return [found[rank] for rank in range(len(made))]


def _is_running(thread: threading.Thread) -> bool:
    """Whether the process runs: a fork while it ends would copy OpenSSL's taken locks."""
    return Path(f"/proc/self/task/{thread.native_id}").exists()


def _in_processes(made: list[Mesh], rank_body: Callable[[Mesh], Outcome]) -> list[Outcome]:
    context = multiprocessing.get_context("fork")
    children = []
    for mesh in made:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(mesh, made, rank_body, theirs))
        with warnings.catch_warnings():  # pytest's process may have idle threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        theirs.close()
        children.append((child, ours))
    for mesh in made:
        mesh.close()
    return [_outcome_of(child, pipe) for child, pipe in children]


def _child(
    mesh: Mesh, made: list[Mesh], rank_body: Callable[[Mesh], Outcome], pipe: Connection
) -> None:
    faulthandler.enable(sys.__stderr__)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    for other in made:
        if other is not mesh:
            other.close()
    outcome = rank_body(mesh)
    try:
        pipe.send(outcome)
    except (pickle.PicklingError, AttributeError, TypeError):
        pipe.send(Outcome(error=RuntimeError(repr(outcome))))
    faulthandler.cancel_dump_traceback_later()


def _outcome_of(child: Any, pipe: Connection) -> Outcome:
    outcome = Outcome(died=True)
    with contextlib.suppress(EOFError):
        outcome = pipe.recv()
    child.join()
    outcome.status = child.exitcode
    child.close()
    pipe.close()
    return outcome


def vanish(comm: Communicator) -> None:
    """Ends this rank's process as a crash would."""
    os._exit(VANISHED)


@contextlib.contextmanager
def reserved_store() -> Iterator[str]:
    """The address of a store on loopback that rank 0 is to serve."""
    with socket.socket() as reserved:  # bound and never listening: keeps the port for us
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{reserved.getsockname()[1]}"


def eventually(condition: Callable[[], object]) -> None:
    """Waits until it holds."""
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The state of a process in /proc/PID/stat: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
