"""Runs a function on ranks that are processes with a group, forked from one that has torch."""

from __future__ import annotations

import faulthandler
import functools
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ranks import LIMIT

_context = multiprocessing.get_context("forkserver")  # imports torch once, has no threads
_context.set_forkserver_preload(["pytest", "torch._dynamo", "gradwire.torch"])


def on_ranks(
    ranks: int | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what each rank runs, with the test's parameters.

    `options` are those of `run`. `ranks`, if it is left out, and `backend` may be parameters.
    """

    def made(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            chosen = {name: given[name] for name in ("backend",) if name in given}
            size = given["ranks"] if ranks is None else ranks
            run(size, BodyOf(test), given, **chosen, **options)

        return test

    return made


@dataclass
class BodyOf:
    """The body of a test, which a rank finds by the name of the test."""

    test: Any

    def __call__(self, given: dict[str, Any]) -> None:
        self.test.__wrapped__(**given)


def described(error: BaseException) -> str:
    """Its traceback; where an assertion failed, with the values of variables."""
    found = traceback.TracebackException.from_exception(
        error, capture_locals=isinstance(error, AssertionError)
    )
    return "".join(found.format())


def run(
    ranks: int,
    body: Callable[..., Any],
    *args: Any,
    dying: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Any]:
    """The result of `body(*args)` on each rank; None for those that are to die in it.

    `body` is a function of a module, and its result can be pickled.
    """
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(ranks):
            ours, theirs = _context.Pipe(duplex=False)
            what = (f"{scratch}/store", rank, ranks, theirs, body, args, backend, {**os.environ})
            child = _context.Process(target=_child, args=what)
            child.start()
            theirs.close()
            children.append((child, ours))
        ended = [_outcome(child, pipe) for child, pipe in children]
    failures = [
        f"rank {rank}:\n{value}"
        for rank, (well, value) in enumerate(ended)
        if well == (rank in dying)
    ]
    assert not failures, "\n".join(failures)
    return [None if rank in dying else value for rank, (_, value) in enumerate(ended)]


def _child(
    store: str,
    rank: int,
    ranks: int,
    pipe: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # of whichever test has started the fork server
    os.environ.update(environment)
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=sys.__stderr__)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, ranks)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=ranks)
    meeting.set(f"joined {rank}", "")
    # Where one ends while another still connects, gloo fails there.
    meeting.wait([f"joined {each}" for each in range(ranks)])
    try:
        outcome = True, body(*args)
    except BaseException as error:
        outcome = False, described(error)
    pipe.send(outcome)


def _outcome(child: Any, pipe: Connection) -> tuple[bool, Any]:
    try:
        outcome = pipe.recv()
    except EOFError:
        child.join()
        outcome = False, f"died with exit code {child.exitcode}"
    child.join()
    pipe.close()
    return outcome


def gathered(value: Any) -> list[Any]:
    """All ranks' values, by rank; every rank calls it."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def die() -> None:
    """Ends this rank's process as a crash would."""
    os._exit(3)


def logged() -> list[str]:
    """Warnings of gradwire in this process from now on, as they come."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    return found
