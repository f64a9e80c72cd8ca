"""Clients of a parameter server at the edges: who is first, what is under way, odd arguments."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire import serve
from gradwire._base.deadline import Deadline
from gradwire.serve import _channels, _directory, _names
from ranks import eventually

Connect = Callable[..., serve.ParameterServer]
MANY = 1_000_000  # elements, of many frames


def full(value: float, size: int = 100) -> list[np.ndarray]:
    return [np.full(size, value, np.float32)]


def push_often(ps: serve.ParameterServer) -> None:
    for _ in range(10_000):
        ps.push(full(1))


def test_the_initial_values_are_one_clients(connect: Connect) -> None:
    made: dict[int, serve.ParameterServer] = {}

    def join(i: int) -> None:
        made[i] = connect(full(i, MANY), serve.SGD(lr=1.0))

    threads = [threading.Thread(target=join, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    first = [i for i, ps in made.items() if ps.first]
    found = full(-1, MANY)
    made[0].pull(found)
    assert len(first) == 1
    assert set(found[0].tolist()) == {float(first[0])}


def test_who_fails_with_the_initial_values_lets_the_next_one_be_first(server: serve.Server) -> None:
    found = _directory.service("parameters", server.store, None)
    entered, fail = threading.Event(), threading.Event()
    order: list[str] = []

    def failing() -> None:
        limit = Deadline(30)
        with _directory.opened(found, limit) as directory, directory.first_alone(2, limit):
            entered.set()
            assert fail.wait(30)
            order.append("failed")
            raise gradwire.TransportError("its end")

    def run() -> None:
        with pytest.raises(gradwire.TransportError):
            failing()

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(30)
    threading.Timer(0.1, fail.set).start()
    for name in ("next", "last"):
        limit = Deadline(30)
        with _directory.opened(found, limit) as directory, directory.first_alone(2, limit):
            order.append(name)
    thread.join()
    assert order == ["failed", "next", "last"]


def test_a_shard_admits_its_own_services_clients_alone(server: serve.Server) -> None:
    """One of another service may know an address that was its own server's before."""
    limit = Deadline(30)
    one, other = (_directory.service(name, server.store, None) for name in ("parameters", "other"))

    def introduce(transport: str) -> _channels.Introduction:
        return _channels.Introduction(1, "a client", transport)

    with _directory.opened(one, limit) as found, _directory.opened(other, limit) as stale:
        job, shard = found.job(limit), found.find(0, limit)
        stale.publish(0, 2, shard.address, shard.history)
        _channels.connect(found, job, 0, introduce, ("shm",), limit)
        with pytest.raises(gradwire.RendezvousError, match="could not reach shard 0"):
            _channels.connect(stale, job, 0, introduce, ("shm",), Deadline(0.5))


def test_clients_of_one_rank_are_told_apart(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    first, second = (connect(full(0), serve.SGD(lr=1.0)) for _ in range(2))
    for each in (first, second):
        each.push(full(1))
    assert [name.split(" (")[0] for name in first.stats()[0]["clients"]] == ["replica 0"] * 2


def test_a_name_by_rank_is_a_launchs_and_free_again(
    server: serve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _directory.service("parameters", server.store, None)

    def make(port: str) -> _names.Identity:
        monkeypatch.setenv("MASTER_PORT", port)
        return _names.identity(directory, found, None)

    monkeypatch.setenv("RANK", "0")
    with _directory.opened(found, Deadline(30)) as directory:
        mine = [make("1"), make("2"), make("1")]
        names = [each.name for each in mine]
        assert len(set(names)) == 3
        assert all(each.label.startswith("replica 0 (") for each in mine)
        del mine[0]
        assert make("1").name == names[0]  # as that of a process which was started again
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 5")
        assert make("1").name not in names


def test_close_waits_for_pushes_under_way(connect: Connect) -> None:
    values = full(0, 8 * MANY)
    ps, other = (connect(values, serve.SGD(lr=1.0)) for _ in range(2))
    for _ in range(5):
        ps.push(full(1, 8 * MANY), async_op=True)
    ps.close()
    other.pull(values)
    assert (values[0] == -5).all()


def test_a_rate_of_zero_or_nearly_is_one(connect: Connect) -> None:
    ps, found = connect(full(1), serve.SGD(lr=1.0)), full(0)
    ps.push(full(1), lr=0)
    ps.push(full(1), lr=1e-60)  # which is no float32
    ps.pull(found)
    assert (found[0] == 1).all()
    assert ps.versions == [2, 2]


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), 1e39])
def test_what_is_no_rate_is_refused_here(connect: Connect, lr: float) -> None:
    ps = connect(full(1), serve.SGD(lr=1.0))
    with pytest.raises(gradwire.InvalidArgument, match="lr="):
        ps.push(full(1), lr=lr)
    ps.push(full(1))


def test_pushes_say_which_values_they_are_from(connect: Connect) -> None:
    ps = connect(full(1), serve.SGD(lr=1.0))
    pulled = ps.pull(full(0), async_op=True)
    assert pulled is not None
    versions = pulled.wait()
    ps.push(full(1))
    ps.push(full(1))
    ps.pull(full(0))
    ps.push(full(1), versions=versions)
    assert ps.stats()[0]["most_staleness"] == 2
    with pytest.raises(gradwire.InvalidArgument, match="2 shards"):
        ps.push(full(1), versions=[0])


def test_merged_pushes_leave_their_arrays_free(connect: Connect) -> None:
    ps, gradient, found = connect(full(0, MANY), serve.SGD(lr=1.0)), full(1, MANY), full(0, MANY)
    pushes = [ps.push(gradient, async_op=True) for _ in range(20)]
    assert sum(each is not None and each.copied for each in pushes) == ps.merged
    for each in pushes:
        assert each is not None
        each.wait()
    ps.pull(found)
    assert (found[0] == -20).all()


class UnderWay:
    """Stands for a call that is not over."""

    def done(self) -> bool:
        return False

    def refusals(self) -> int:
        return 0


def test_refusals_are_known_when_a_push_is_over() -> None:
    pending = serve.Pending(None, UnderWay())  # type: ignore[arg-type]
    with pytest.raises(gradwire.InvalidArgument, match=r"wait\(\) first"):
        _ = pending.refusals


def test_many_pulls_at_once(connect: Connect) -> None:
    ps = connect(full(3, MANY), serve.SGD(lr=1.0))
    arrays = [full(0, MANY) for _ in range(30)]
    for pending in [ps.pull(each, async_op=True) for each in arrays]:
        assert pending is not None
        pending.wait()
    assert all((each[0] == 3).all() for each in arrays)


def test_autograd_notices_a_pull(connect: Connect) -> None:
    values = torch.ones(5)
    ps = connect([values], serve.SGD(lr=1.0))
    leaf = torch.ones(5, requires_grad=True)
    loss = (leaf * values).sum()
    ps.pull([values])
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_replaced_client_is_told(connect: Connect) -> None:
    old = connect(full(1), serve.SGD(lr=1.0), replica="b")
    connect(full(1), serve.SGD(lr=1.0), replica="b")
    with pytest.raises(gradwire.TransportError, match="under this one's name"):
        push_often(old)


@pytest.mark.parametrize("name", ["x" * 250, "a\nb"])
def test_odd_names_are_refused_here(connect: Connect, name: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="replica="):
        connect(full(1), serve.SGD(lr=1.0), replica=name)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_wait(connect: Connect) -> None:
    ps = connect(full(1), serve.SGD(lr=1.0))
    pending = ps.push(full(1), async_op=True)
    assert pending is not None
    child = os.fork()
    if child == 0:
        try:
            pending.wait(5)
        except gradwire.Aborted:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    pending.wait()


def test_a_server_takes_a_free_port(job_secret: str, stack: ExitStack) -> None:
    server = stack.enter_context(serve.Server(1, store="tcp://127.0.0.1:0"))
    assert int(server.store.rpartition(":")[2]) > 0
    ps = stack.enter_context(serve.connect(full(1), serve.SGD(lr=1.0), store=server.store))
    found = full(0)
    ps.pull(found)
    assert np.array_equal(found, full(1))


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    monkeypatch.setenv("GRADWIRE_STORE", "")
    assert stack.enter_context(serve.Server(1)).store.startswith("unix:")


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_no_store_opens_over_tcp_without_a_secret(host: str) -> None:
    with pytest.raises(gradwire.RendezvousError, match="export GRADWIRE_SECRET="):
        serve.Server(1, store=f"tcp://{host}:0")


@pytest.mark.parametrize(
    "text",
    [b"[" * 60000, b"\xff", b"3", b"{}", json.dumps({"number": 1e400}).encode(), b"1" * 9999],
)
def test_hostile_introductions_are_refused(text: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(struct.pack("<H", len(text)) + text)
        with pytest.raises(gradwire.InvalidArgument):
            _channels.receive_introduction(far, ["shm"])


def test_clients_leave_nothing_behind(connect: Connect, server: serve.Server) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def join(**options: Any) -> None:
        with serve.connect(full(1), serve.SGD(lr=1.0), store=server.store, **options):
            pass

    def go() -> None:
        for _ in range(5):
            join()
        with pytest.raises(gradwire.InvalidArgument):
            serve.connect(full(1, 7), serve.SGD(lr=1.0), store=server.store)
        while any(each["clients"] for each in server.stats()):
            time.sleep(0.01)

    connect(full(1), serve.SGD(lr=1.0)).close()
    go()
    before = sum(count())
    go()
    go()
    # The server may still be closing the channels of the one that it refused.
    eventually(lambda: sum(count()) <= before)
