"""Ranks that stay: processes with a group of the backend, which run one function after the other.

Most of a test's time would otherwise be the start of its ranks. After a failure the ranks are
ended, and the next function gets new ones.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import LIMIT
from torch_ranks import BodyOf, described

_END_SECONDS = 10.0  # for ranks to close their groups together

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch._dynamo", "gradwire.torch"])


class Pool:
    """A number of ranks; every function runs on all of them."""

    def __init__(self, size: int, scratch: Path) -> None:
        self.size, self._scratch = size, scratch
        self._ranks: list[tuple[Any, Connection]] = []
        self._starts = 0

    def run(self, body: Callable[..., Any], *args: Any) -> list[Any]:
        """The result of `body(*args)` on each rank; `body` is a function of a module."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((body, args))
        try:
            ended = [_outcome(pipe) for _, pipe in self._ranks]
        except BaseException:  # pytest's timeout: late answers would be taken for the next ones
            self.close()
            raise
        failures = [f"rank {rank}:\n{text}" for rank, (well, text) in enumerate(ended) if not well]
        if failures:
            self.close()
        assert not failures, "\n".join(failures)
        return [value for _, value in ended]

    def close(self) -> None:
        """Ends the ranks."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(_END_SECONDS)
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        self._starts += 1
        store = str(self._scratch / f"store-{self._starts}")
        for rank in range(self.size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(store, rank, self.size, theirs))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Makes a test of what every rank of the fixture `pool` runs, with the test's parameters."""

    @functools.wraps(body)
    def test(pool: Pool, **given: Any) -> None:
        pool.run(BodyOf(test), given)

    parameters = inspect.signature(body).parameters.values()
    pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([pool, *parameters])  # type: ignore[attr-defined]
    return test


def _outcome(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(LIMIT) else (False, f"no answer within {LIMIT} s")
    except EOFError:
        return False, "died"


def _serve(store: str, rank: int, size: int, pipe: Connection) -> None:
    faulthandler.enable(sys.__stderr__)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gradwire",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            break
        faulthandler.dump_traceback_later(LIMIT - 10, file=sys.__stderr__)
        try:
            outcome = True, body(*args)
        except BaseException as error:
            outcome = False, described(error)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)
        if not outcome[0]:
            os._exit(1)  # the group may be in any state
    dist.destroy_process_group()
