"""Out of descriptors or threads: the rank that is out says so at once, and accept loops go on."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import gradwire
import numpy as np
import pytest
from elastic_job import Process
from gradwire import serve
from gradwire._base.deadline import Deadline
from gradwire._base.shortage import raise_limit
from gradwire._bootstrap import connect
from gradwire._bootstrap.authenticator import RefusalLog
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import RendezvousError
from ranks import LIMIT, eventually

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_bootstrap.authenticator", "serve._channels"):
        monkeypatch.setattr(f"gradwire.{module}.refusals", RefusalLog())


def take_descriptors(but: int = 0) -> list[int]:
    """Lowers this process's limit, and takes all descriptors within it, but so many."""
    raise_limit()  # once in a process, and not again
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 16, most))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for each in taken[:but]:
        os.close(each)
    return taken[but:]


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leaves this process no descriptor during the block."""
    raise_limit()  # as the first call of the library would
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = take_descriptors()
    try:
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_rank_that_is_out_of_descriptors_says_so_at_once(
    short: int, transport: str, bare_environment: None
) -> None:
    """Rank 0 accepts and rank 1 connects; both need one more than what they have."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def body(rank: int) -> Any:
        real = connect.listen

        def listen(*args: Any) -> Any:
            made = real(*args)
            if rank == short:
                take_descriptors(but=2)
            return made

        connect.listen = listen  # in a process of its own
        began = time.monotonic()
        with pytest.raises(gradwire.Error) as raised:
            gradwire.init(
                rank=rank, ranks=2, store=store, transports=[transport], secret=SECRET, timeout=60
            )
        return str(raised.value), time.monotonic() - began

    ranks = [
        Process(lambda rank=rank: body(rank), before=lambda: None)  # type: ignore[misc]
        for rank in range(2)
    ]
    found = [each.value() for each in ranks]
    text, seconds = found[short]
    assert "no file descriptor left" in text, text
    assert "ulimit -n" in text
    assert "firewall" not in text + found[1 - short][0]
    assert seconds < 30


def test_a_client_of_a_store_that_is_out_of_descriptors_says_so_at_once() -> None:
    began, init = time.monotonic(), gradwire.init  # is loaded here, which takes a descriptor
    with no_descriptors(), pytest.raises(RendezvousError, match="no file descriptor left"):
        init(rank=1, ranks=2, store="tcp://127.0.0.1:9", secret=SECRET, timeout=LIMIT)
    assert time.monotonic() - began < LIMIT / 2


def test_the_limit_of_descriptors_is_raised(bare_environment: None) -> None:
    def body() -> tuple[int, int]:
        raise_limit.cache_clear()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
        gradwire.init().close()
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    soft, hard = Process(body, before=lambda: None).value()
    assert soft == hard > 64


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    ("transport", "size", "groups", "most"),
    [("shm", 6, 4, 8), ("tcp", 6, 4, 20), ("shm", 2, 61, 4), ("tcp", 2, 61, 8)],
)
def test_a_group_takes_few_descriptors_and_no_thread(
    transport: str, size: int, groups: int, most: int, bare_environment: None
) -> None:
    """Groups share the progress thread; links over shared memory need no sockets."""

    def body(comm: gradwire.Communicator) -> tuple[float, int]:
        def use(each: gradwire.Communicator) -> None:
            each.all_reduce(np.ones(9, np.float32), async_op=True).wait()
            each.send(np.ones(9), (each.rank + 1) % each.size)
            each.recv(np.ones(9))
            each.broadcast(np.ones(9))

        use(comm)
        before = descriptors_and_threads()
        parts = [comm.split(0) for _ in range(groups)]
        for each in parts:
            assert each is not None
            use(each)
        after = descriptors_and_threads()
        for each in parts:
            each.close()
        assert descriptors_and_threads() == before
        return (after[0] - before[0]) / len(parts), after[1] - before[1]

    for descriptors, threads in gradwire.spawn(body, size, transports=[transport], timeout=LIMIT):
        assert descriptors <= most
        assert threads == 0


class Flaky:
    """A selector that fails for some turns, as it does without memory."""

    def __init__(self, real: selectors.BaseSelector) -> None:
        self._real, self.failures = real, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def select(self, timeout: float | None = None) -> Any:
        found = self._real.select(timeout)
        if self.failures > 0:
            self.failures -= 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return found


def test_a_stores_loop_survives_what_goes_wrong() -> None:
    address = Address("tcp", "127.0.0.1", 0)
    with StoreServer(address, "job", SECRET.encode()) as server:
        flaky = Flaky(server._selector)
        server._selector = flaky  # type: ignore[assignment]
        flaky.failures = 3

        def ask() -> bytes:
            limit = Deadline(LIMIT)
            client = StoreClient(server.address, "job", SECRET.encode(), limit)
            with contextlib.closing(client):
                client.set("key", b"value")
                return client.get("key", 1)

        assert ask() == b"value"
        assert ask() == b"value"
        assert flaky.failures == 0


def test_a_parameter_servers_door_survives_a_shortage_of_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = threading.Thread.start, 3

    def fails(self: threading.Thread) -> None:
        nonlocal failures
        if failures > 0 and threading.current_thread().name == "gradwire-listener":
            failures -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    values = [np.zeros(10, np.float32)]
    with serve.Server(1) as server:
        monkeypatch.setattr(threading.Thread, "start", fails)
        with serve.connect(values, serve.SGD(lr=1.0), store=server.store, timeout=LIMIT) as ps:
            ps.pull(values)
        assert failures == 0
        assert "there is no thread for it (can't start new thread)" in caplog.text


def test_a_parameter_servers_door_survives_a_shortage_of_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = [np.zeros(10, np.float32)]
    with serve.Server(1) as server:
        with serve.connect(values, serve.SGD(lr=1.0), store=server.store) as ps:
            unix = server._listener.address.unix
            with contextlib.ExitStack() as ends:
                waiting = [ends.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(9)]
                ends.enter_context(no_descriptors())
                for each in waiting:  # for most of which there is no descriptor
                    each.connect("\0" + unix)
                eventually(lambda: "Too many open files" in caplog.text)
                ps.pull(values)  # whoever is there goes on
        with serve.connect(values, serve.SGD(lr=1.0), store=server.store) as ps:
            ps.pull(values)


def test_the_elastic_door_survives_what_goes_wrong() -> None:
    with gradwire.init(rank=0, ranks=1, store="unix://nobody", secret=SECRET) as comm:
        comm.accept_joins()
        listener = comm._listener
        assert listener is not None
        flaky = Flaky(listener._selector)
        listener._selector = flaky  # type: ignore[assignment]
        flaky.failures = 3
        while flaky.failures:
            listener.announce()
        assert listener._thread.is_alive()
