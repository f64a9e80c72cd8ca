"""Faults that a rank with process groups commits, and what the other ranks find."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import gradwire
import torch.distributed as dist

_PAUSE = 1.0  # seconds, of ranks that go on


class Found(NamedTuple):
    """An error of gradwire on one rank."""

    kind: str
    peer: int
    job_peer: int
    text: str
    seconds: float  # since the fault


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
        atexit._run_exitfuncs()
        os._exit(1)


def stop() -> None:
    """Stops until `wait_for_all` of the other ranks ends the process."""
    store = dist.distributed_c10d._get_default_store()
    store.set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def be_slow() -> None:
    time.sleep(_PAUSE)


def pause() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {_PAUSE}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


# What each may raise on the other ranks. One that leaves may wait for ranks that are behind, or
# abort what is in flight.
FAULTS: dict[Callable[[], None], tuple[str, ...]] = {
    kill: ("TransportError",),
    crash: ("TransportError",),
    leave: ("TransportError", "Aborted", "Timeout"),
    fail: ("Aborted",),
    stop: ("Timeout",),
}
HARMLESS = (be_slow, pause)


def commit(fault: Callable[[], None]) -> None:
    """Commits a fault, whose time the other ranks learn."""
    dist.distributed_c10d._get_default_store().set("fault", str(time.monotonic()))
    fault()


def set_timeout(groups: Sequence[Any], seconds: float) -> None:
    for each in groups:
        each.set_timeout(timedelta(seconds=seconds))


def error_of(calls: Callable[[], None]) -> Found | None:
    """gradwire's error that ends the calls, or None."""
    try:
        calls()
    except Exception as raised:
        at = time.monotonic()
        error: BaseException | None = raised
        while error is not None and not isinstance(error, gradwire.Error):
            error = error.__cause__ or error.__context__
        if error is None:
            raise
        store = dist.distributed_c10d._get_default_store()
        began = float(store.get("fault")) if store.check(["fault"]) else at
        peer, job_peer = getattr(error, "peer", -1), getattr(error, "job_peer", -1)
        return Found(type(error).__name__, peer, job_peer, str(error), at - began)
    return None


def wait_for_all(others: int) -> None:
    """Returns when so many ranks have come here; ends the stopped one, if there is one."""
    store = dist.distributed_c10d._get_default_store()
    if store.add("found", 1) < others:
        store.wait(["all found"])
        return
    if store.check(["stopped"]):
        os.kill(int(store.get("stopped")), signal.SIGKILL)
    store.set("all found", b"")
