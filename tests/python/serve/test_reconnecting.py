"""Clients that outlive their servers: `gradwire.serve.connect(reconnect=...)`."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import serve
from gradwire.serve import _histories, _reconnect
from gradwire.serve._vectors import Names

SIZE = 1000  # elements, of two shards
MANY = 4_000_000


def full(value: float, size: int = SIZE) -> list[np.ndarray]:
    return [np.full(size, value, np.float32)]


class Servers:
    """Two shards, each of a server of its own, that can be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.store = "tcp://127.0.0.1:0"
        self._servers: dict[int, serve.Server] = {}
        self.start(0)
        self.store = self._servers[0].store
        self.start(1)

    def start(self, shard: int) -> None:
        self._servers[shard] = serve.Server(
            2, only=[shard], store=self.store, snapshot=self._folder, timeout=30
        )

    def stop(self, shard: int) -> None:
        self._servers.pop(shard).stop()

    def path(self, shard: int) -> Path:
        return self._folder / f"shard-{shard}-of-2.gradwire"

    def end(self) -> None:
        for shard in sorted(self._servers, reverse=True):
            self.stop(shard)


@pytest.fixture
def servers(job_secret: str, tmp_path: Path, stack: ExitStack) -> Servers:
    made = Servers(tmp_path / "snapshots")
    stack.callback(made.end)
    return made


@pytest.fixture
def connect(servers: Servers, stack: ExitStack) -> Callable[..., serve.ParameterServer]:
    def make(like: Any, reconnect: float | None, **options: Any) -> serve.ParameterServer:
        options = {"store": servers.store, "timeout": 30, "reconnect": reconnect, **options}
        return stack.enter_context(serve.connect(like, serve.SGD(lr=1.0), **options))

    return make


Connect = Callable[..., serve.ParameterServer]


def beside(*actions: Callable[[], object]) -> threading.Thread:
    """Does something in another thread."""
    thread = threading.Thread(target=lambda: [each() for each in actions])
    thread.start()
    return thread


def test_a_client_goes_on_and_says_what_was_lost(
    servers: Servers, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ps, found = connect(full(0), 30.0), full(9)
    ps.push(full(1))
    ps.checkpoint()
    shutil.copy(servers.path(1), tmp_path / "older")
    ps.push(full(1))
    servers.stop(1)
    shutil.copy(tmp_path / "older", servers.path(1))
    with caplog.at_level(logging.WARNING, "gradwire"):
        thread = beside(lambda: servers.start(1))
        ps.stats()  # which finds out, so that nothing of the next push is under way
        thread.join()
    ps.push(full(1))
    assert "shard 1 is at version 1, was at 2" in caplog.text
    ps.pull(found)
    assert set(found[0][:400].tolist()) == {-3.0}
    assert set(found[0][-400:].tolist()) == {-2.0}
    assert ps.versions == [3, 2]


def test_the_server_that_hosts_the_store_may_come_back(servers: Servers, connect: Connect) -> None:
    ps, found = connect(full(0), 30.0), full(9)
    ps.push(full(1))
    servers.stop(0)
    thread = beside(lambda: servers.start(0))
    ps.pull(found)
    thread.join()
    assert set(found[0].tolist()) == {-1.0}
    other = connect(full(0), None)  # which finds both shards at the new store
    other.push(full(1))
    ps.pull(found)
    assert set(found[0].tolist()) == {-2.0}


def test_a_pull_under_way_is_made_again(servers: Servers, connect: Connect) -> None:
    ps, found = connect(full(5), 30.0), full(9)
    pending = ps.pull(found, async_op=True)
    assert pending is not None
    servers.stop(1)
    thread = beside(lambda: servers.start(1))
    assert pending.wait() == [0, 0]
    thread.join()
    assert set(found[0].tolist()) == {5.0}


def test_without_reconnect_the_end_is_an_error(servers: Servers, connect: Connect) -> None:
    ps = connect(full(5), None)
    servers.stop(1)
    for _ in range(2):
        with pytest.raises(gradwire.TransportError, match=r"^shard 1 \("):
            ps.pull(full(0))


def test_who_dials_in_vain_says_so(servers: Servers, connect: Connect) -> None:
    ps = connect(full(5), 0.3)
    servers.stop(1)
    for _ in range(2):
        with pytest.raises(gradwire.TransportError, match=r"^shard 1 \(.*dialled for 0\.3 s"):
            ps.pull(full(0))


class Dialling(logging.Handler):
    """Notes that a client has begun to dial."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "dialling for" in record.getMessage():
            self.begun.set()


def test_waits_have_their_time_while_another_thread_dials(
    servers: Servers, connect: Connect, stack: ExitStack
) -> None:
    ps, dialling = connect(full(5), 60.0), Dialling()
    logging.getLogger("gradwire").addHandler(dialling)
    stack.callback(logging.getLogger("gradwire").removeHandler, dialling)
    over = ps.pull(full(0), async_op=True)
    assert over is not None
    over.wait()
    late = ps.pull(full(0), async_op=True)
    servers.stop(1)
    thread = beside(lambda: ps.push(full(1)))
    assert dialling.begun.wait(30)
    waiting = beside(over.wait)
    if late is not None:
        with contextlib.suppress(gradwire.Timeout):
            late.wait(0.01)
    waiting.join(30)
    held_up = waiting.is_alive() or not thread.is_alive()
    servers.start(1)
    thread.join()
    assert not held_up


def test_two_clients_of_one_name_do_not_take_turns(connect: Connect) -> None:
    first = connect(full(5), 30.0, replica="twin")
    second = connect(full(5), 30.0, replica="twin")
    for _ in range(2):
        with pytest.raises(gradwire.TransportError, match=r"this one's name.*replica="):
            first.pull(full(0))
        second.pull(full(0))


def test_staleness_counts_from_values_that_were_pulled_before(
    servers: Servers, connect: Connect
) -> None:
    ps, other = connect(full(0), 30.0), connect(full(0), 30.0)
    ps.pull(full(0))
    for _ in range(3):
        other.push(full(1))
    servers.stop(1)
    servers.start(1)
    ps.stats()  # which finds out
    ps.push(full(1))
    assert [each["staleness"][-1] for each in ps.stats()] == [1, 1]
    assert [each["most_staleness"] for each in ps.stats()] == [3, 3]


def test_versions_that_a_restart_has_lost_count_as_the_oldest_since(
    servers: Servers, connect: Connect, tmp_path: Path
) -> None:
    ps, other = connect(full(0), 30.0), connect(full(0), 30.0)
    ps.push(full(1))
    ps.checkpoint()
    shutil.copy(servers.path(1), tmp_path / "older")
    for _ in range(3):
        ps.push(full(1))
    pending = ps.pull(full(0), async_op=True)
    assert pending is not None
    versions = pending.wait()
    assert versions == [4, 4]
    servers.stop(1)
    shutil.copy(tmp_path / "older", servers.path(1))
    servers.start(1)
    ps.stats()  # which finds out
    other.pull(full(0))
    for _ in range(6):
        other.push(full(1), versions=[10, 10])
    assert [each["version"] for each in ps.stats()] == [10, 7]
    ps.push(full(1), versions=versions)
    (counts, lost) = (each["staleness"] for each in ps.stats())
    assert [counts[6], lost[6]] == [1, 1]  # since versions 4 and 1


def test_staleness_is_exact_for_who_comes_back_after_others(
    servers: Servers, connect: Connect, tmp_path: Path
) -> None:
    ps, other = connect(full(0), 30.0), connect(full(0), 30.0)
    ps.push(full(1))
    ps.checkpoint()
    shutil.copy(servers.path(1), tmp_path / "older")
    for _ in range(3):
        ps.push(full(1))
    pending = ps.pull(full(0), async_op=True)
    assert pending is not None
    versions = pending.wait()
    for _ in range(2):  # from the same snapshot, and with pushes that are lost again
        servers.stop(1)
        shutil.copy(tmp_path / "older", servers.path(1))
        servers.start(1)
        other.pull(full(0))
        for _ in range(6):
            other.push(full(1), versions=other.versions)
    ps.stats()  # which finds out
    assert [each["version"] for each in ps.stats()] == [16, 7]
    ps.push(full(1), versions=versions)
    ps.push(full(1))  # of the values that were pulled last, which are the same
    kept, lost = (each["staleness"] for each in ps.stats())
    assert [kept[12], kept[13], lost[6], lost[7]] == [1, 1, 1, 1]  # since versions 4 and 1


def dialled(call: Callable[[], object]) -> bool:
    """Whether a call says that a server is dialled."""
    text = ""
    try:
        call()
    except serve.Dialling as error:
        text = str(error)
    assert not text or re.match(r"shard 1 \(.*it is dialled, for 30 s at most", text)
    return bool(text)


def test_calls_may_raise_while_a_thread_dials(servers: Servers, connect: Connect) -> None:
    ps, found = connect(full(5), 30.0, while_dialling="raise"), full(0)
    pending = ps.pull(found, async_op=True)
    assert pending is not None
    pending.wait()
    servers.stop(1)
    late = None
    while late is None:  # it learns of the end by and by
        with contextlib.suppress(serve.Dialling):
            ps.pull(full(0))
            continue
        late = [dialled(lambda: ps.push(full(1))), dialled(ps.stats), dialled(pending.wait)]
    assert late == [True, True, False]  # what is over stays so
    servers.start(1)
    while dialled(lambda: ps.pull(found)):
        pass
    assert set(found[0].tolist()) == {5.0}
    assert ps.lost == 0


def test_who_is_dialled_in_vain_fails_in_the_end(servers: Servers, connect: Connect) -> None:
    ps = connect(full(5), 0.3, while_dialling="raise")
    servers.stop(1)

    def pull_until_it_fails() -> None:
        while True:
            with contextlib.suppress(serve.Dialling):
                ps.pull(full(0))

    with pytest.raises(gradwire.TransportError, match=r"^shard 1 \(.*dialled for 0\.3 s"):
        pull_until_it_fails()


def test_commands_to_vectors_are_not_made_again(connect: Connect) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="without reconnect="):
        connect(full(5), 30.0)._command([Names()])


def test_a_shard_without_its_values_is_no_end_of_dialling(
    servers: Servers, connect: Connect
) -> None:
    ps = connect(full(5), 30.0)
    servers.stop(1)
    servers.path(1).unlink()
    servers.start(1)
    with pytest.raises(gradwire.TransportError, match="shard 1 was started again without values"):
        ps.pull(full(0))


def test_a_push_under_way_is_made_once_at_most(
    servers: Servers, connect: Connect, tmp_path: Path
) -> None:
    feedback, found = gradwire.ErrorFeedback(), full(0, MANY)
    ps = connect(full(0, MANY), 60.0)
    ps.checkpoint()
    servers.stop(1)
    command = [sys.executable, "-m", "gradwire", "serve", "--shards", "2", "--only", "1"]
    command += ["--store", servers.store, "--snapshot", str(servers.path(1).parent)]
    with subprocess.Popen(command) as child:
        try:
            ps.pull(found)
            child.send_signal(signal.SIGSTOP)
            pending = ps.push(full(1, MANY), feedback=feedback, async_op=True)
            assert pending is not None
            # Of which nothing is sent, behind the other; and for which nobody waits.
            ps.push(full(7, MANY), feedback=False, async_op=True)
        finally:
            child.kill()
    thread = beside(lambda: servers.start(1))
    pending.wait()
    thread.join()
    ps.pull(found)
    pushed = feedback.residual("0") - found[0]
    assert ps.lost == 2
    half = MANY // 2
    assert (pushed[:half] == 1).all()
    # What was sent to a server that was killed is lost, and no more than its window.
    assert set(pushed[half:].tolist()) <= {0.0, 1.0}
    assert (pushed[half:] == 1).mean() > 0.5


@pytest.mark.parametrize(
    "given", [[[1, -1]], [[2**63, 0]], [[1, 2, 3]], [[1]], [["a", 0]], [[1.0, 0]], [[1, 0]] * 257]
)
def test_histories_that_no_server_writes_are_refused(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        _histories.parse(given)


def test_versions_for_other_shards_are_refused(servers: Servers, stack: ExitStack) -> None:
    ps = serve.connect(full(0), serve.SGD(1.0), store=servers.store, reconnect=30)
    stack.callback(ps.close)
    servers.stop(1)
    servers.start(1)
    ps.pull(full(0))
    with pytest.raises(gradwire.InvalidArgument):
        ps.push(full(1), versions=[0, 0, 0])


def test_a_thread_that_fails_to_dial_says_why(
    servers: Servers, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = serve.connect(
        full(0), serve.SGD(1.0), store=servers.store, reconnect=30, while_dialling="raise"
    )
    stack.callback(ps.close)

    def broken(*_: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(_reconnect.LastingClient, "_dial_until", broken)
    servers.stop(1)

    def pull_until_it_is_over() -> None:
        while True:
            with contextlib.suppress(serve.Dialling):
                ps.pull(full(0))

    with pytest.raises(gradwire.TransportError, match="no memory"):
        pull_until_it_is_over()
