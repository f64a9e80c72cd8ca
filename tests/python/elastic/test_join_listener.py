"""The join listener of a communicator: one, on rank 0, quiet where nobody fits in."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import gradwire
import numpy as np
import pytest
from census import held
from elastic_job import SECRET, elastic_job
from gradwire import Communicator, _regrouping
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import join_listener, joining
from gradwire._bootstrap.join_listener import ListenerEntry, entry_key
from gradwire._bootstrap.mesh import AddressInfo, Mesh
from gradwire._bootstrap.resize import open_listener
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.survivor_links import MessageKind, SurvivorLinks, View
from gradwire._errors import RendezvousError
from ranks import LIMIT, eventually


def test_who_finds_no_room_causes_no_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits, until a rank has gone."""
    monkeypatch.setenv("GRADWIRE_MAX_RANKS", "2")

    def body(comm: Communicator) -> Any:
        comm.accept_joins()
        asked = comm.should_resize()
        if comm.rank == 0:
            eventually(lambda: comm._listener._joiners)  # type: ignore[union-attr]
        for _ in range(2):  # also in the communicator that the listener is handed to
            comm.barrier()
            asked = asked or comm.should_resize()
            comm = comm.resize()
        if comm.rank == 1:
            os._exit(1)
        while not comm.closed:
            with contextlib.suppress(gradwire.Error):
                comm.barrier()
        with comm.resize() as after:
            after.barrier()
            return asked, after.size, after.joined

    def joiner(comm: Communicator) -> None:
        comm.barrier()
        comm.close()

    with elastic_job() as job:
        members = job.start(2, body)
        joins = job.join(joiner)
        assert members[0].value() == (False, 2, 1)
        joins.value()


def test_threads_open_one_listener_together(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def opens(mesh: Mesh) -> Any:
        time.sleep(0.1)  # so that the other thread comes meanwhile
        opened.append(open_listener(mesh))
        return opened[-1]

    monkeypatch.setattr(_regrouping, "open_listener", opens)
    with gradwire.init(rank=0, ranks=1) as comm, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: comm.accept_joins(), range(2))) == [None, None]
        assert opened == [comm._listener]
    for each in opened:
        each.close()


def test_only_rank_0_keeps_a_join_listener() -> None:
    """Another rank may have opened one while it took rank 0 to be dead."""

    def body(comm: Communicator) -> Any:
        comm._listener = open_listener(comm._mesh)
        with comm.resize() as after:
            x = np.zeros(1)
            after.all_reduce(x)
            return after._listener is not None

    with elastic_job() as job:
        assert [each.value() for each in job.start(2, body)] == [True, False]


def test_a_rank_that_serves_a_store_finds_the_next_one() -> None:
    """After resize(store=...), the listener is in that store, not in the one that rank 0 served."""
    name = f"elastic-{secrets.token_hex(4)}"
    first, second = (Address("unix", f"gradwire-{name}-{each}") for each in "ab")
    comm = gradwire.init(rank=0, ranks=1, store=str(first), secret=SECRET)
    job = comm._mesh.job
    with comm, StoreServer(second, job.name, SECRET.encode()):
        comm.accept_joins()  # nobody serves the first
        with comm.resize(store=str(second)):
            limit = Deadline(10)
            with contextlib.closing(
                StoreClient(second, job.name, SECRET.encode(), limit)
            ) as client:
                assert client.get(entry_key(job.name), 10)


class Slate:
    """A store of one value; a `found` that is an error is raised instead."""

    def __init__(self, found: bytes | Exception) -> None:
        self.found, self.written = found, False

    def get(self, _: str, __: float) -> bytes:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def set(self, _: str, __: bytes) -> None:
        self.written = True


def test_an_entry_that_nobody_could_read_is_replaced_only_where_the_store_answers() -> None:
    """Else it would be written, once the store goes on, over one of a later communicator."""
    silent = Slate(RendezvousError("has not answered"))
    with (
        gradwire.init(rank=0, ranks=1) as comm,
        contextlib.closing(open_listener(comm._mesh)) as listener,
    ):
        job = comm._mesh.job
        entry = ListenerEntry(job.name, job.secret, AddressInfo("", "", (), "", "::1", 0), 0, 0)
        with pytest.raises(RendezvousError, match="has not answered"):
            listener._replace_entry(silent, entry)  # type: ignore[arg-type]
        assert not silent.written
        later = replace(entry, membership=10**6)
        forged = replace(later, secret=b"of a stranger, as long as ours")
        for found in (TimeoutError("nobody set it"), b"not an entry", forged.pack()):
            slate = Slate(found)
            listener._replace_entry(slate, entry)  # type: ignore[arg-type]
            assert slate.written
        slate = Slate(later.pack())
        listener._replace_entry(slate, entry)  # type: ignore[arg-type]
        assert not slate.written


class SilentHost:
    """A store whose host has vanished: connections stay, and nothing answers."""

    def __init__(self) -> None:
        self.asked, self.ends = threading.Event(), threading.Event()

    def client(self, *_: Any, **__: Any) -> Any:
        self.asked.set()
        self.ends.wait(LIMIT)
        raise OSError("timed out")


def test_no_thread_of_the_program_waits_for_a_store_whose_host_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = SilentHost()
    monkeypatch.setattr(join_listener, "StoreClient", host.client)
    monkeypatch.setattr(join_listener, "_CLOSE_SECONDS", 0.01)
    with gradwire.init(rank=0, ranks=1, store="unix://silent", secret=SECRET) as comm:
        comm.accept_joins()
        assert not comm.should_resize()
        assert host.asked.wait(LIMIT)
        comm = comm.resize()
        assert not comm.should_resize()
        thread = comm._listener._thread  # type: ignore[union-attr]
        comm.close()
        assert thread.is_alive()
    host.ends.set()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_who_joins_asks_a_store_that_does_not_answer_once() -> None:
    """It would be left out where it did not answer its leader meanwhile."""
    asked = []

    def read(*_: Any) -> bytes:
        asked.append(1)
        raise gradwire.RendezvousError("lost the store")

    entry = ListenerEntry("job", b"", AddressInfo("", "", (), "", "::1", 0), 0, 0)
    watch = joining._EntryWatch(read, entry)
    assert [watch.is_current() for _ in range(3)] == [True] * 3
    assert len(asked) == 1


def test_a_child_holds_nothing_of_a_join_listener() -> None:
    """Neither its sockets nor those of a store that it serves: who connects would wait in vain."""
    with gradwire.init(rank=0, ranks=1, store=f"unix://{secrets.token_hex(8)}") as comm:
        before = held().descriptors
        comm.accept_joins()
        eventually(lambda: not comm._listener._renew.passed)  # type: ignore[union-attr]
        assert held().descriptors.total() > before.total()
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writes, str(held().descriptors.total() - 2).encode())
            finally:
                os._exit(0)
        os.close(writes)
        found = os.read(reads, 99)
        os.close(reads)
        os.waitpid(child, 0)
        assert int(found) <= before.total()


def test_the_addresses_of_thousands_of_ranks_reach_a_joiner() -> None:
    payload = secrets.token_bytes(4096 * 400)
    one, other = (SurvivorLinks((), 1) for _ in range(2))
    for links, sock in zip((one, other), socket.socketpair(), strict=True):
        links.add(1, sock)
    with contextlib.closing(one), contextlib.closing(other):
        view = View(frozenset({0}))
        one.send(1, MessageKind.ADDRESS, view, payload)
        found: list[Any] = []
        while not found:
            one.poll(0)
            found = other.poll(0.1)
        assert found == [(1, MessageKind.ADDRESS, view, payload)]
        with pytest.raises(gradwire.RendezvousError, match="too many to resize"):
            one.send(1, MessageKind.ADDRESS, view, bytes((1 << 26) + 1))
