"""Runs a function on ranks that are processes with a group, forked from one that has torch."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ranks import LIMIT

_context = multiprocessing.get_context("forkserver")  # imports torch once, has no threads
_context.set_forkserver_preload(["pytest", "torch._dynamo", "gradwire.torch"])


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
    dist.init_process_group(
        backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    try:
        outcome = True, body(*args)
    except BaseException:
        outcome = False, traceback.format_exc()
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
