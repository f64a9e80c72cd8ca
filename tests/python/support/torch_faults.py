"""Faults that a rank with process groups commits, and what the other ranks find."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import gradwire
import torch.distributed as dist


class Found(NamedTuple):
    """An error of gradwire on one rank."""

    kind: str
    peer: int
    job_peer: int
    text: str
    seconds: float  # since the rank began to make calls


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os._exit(3)


def leave() -> None:
    """Ends the program as sys.exit() does, which a child of multiprocessing does not."""
    atexit._run_exitfuncs()
    os._exit(0)


def fail() -> None:
    """Raises an exception that nothing catches, as the interpreter does."""
    try:
        raise ValueError("out of luck")
    except ValueError as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


def stop() -> None:
    """Stops until `wait_for_all` of the other ranks ends the process."""
    store = dist.distributed_c10d._get_default_store()
    store.set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


# What each raises on the other ranks.
FAULTS: dict[Callable[[], None], str] = {
    kill: "TransportError",
    crash: "TransportError",
    leave: "TransportError",
    fail: "Aborted",
    stop: "Timeout",
}


def set_timeout(groups: Sequence[Any], seconds: float) -> None:
    for each in groups:
        each.set_timeout(timedelta(seconds=seconds))


def first_error(calls: Callable[[], None]) -> Found:
    """The error that ends the calls, which go on until then."""
    began = time.monotonic()
    try:
        calls()
    except gradwire.Error as error:
        at = time.monotonic() - began
        peer, job_peer = getattr(error, "peer", -1), getattr(error, "job_peer", -1)
        return Found(type(error).__name__, peer, job_peer, str(error), at)
    raise AssertionError("no error")


def wait_for_all(others: int) -> None:
    """Returns when so many ranks have come here; ends the stopped one, if there is one."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("found", 1) < others:
        store.wait(["all found"])
        return
    if store.check(["stopped"]):
        os.kill(int(store.get("stopped")), signal.SIGKILL)
    store.set("all found", b"")
