"""The door of a communicator: one, on rank 0, found in the store, quiet where nobody fits in."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradwire
import numpy as np
import pytest
from elastic_job import SECRET, elastic_job
from gradwire import Communicator, _communicator
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.admission import open_door
from gradwire._bootstrap.door import key_of
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from ranks import eventually


def test_who_finds_no_room_causes_no_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits at the door, until a rank has gone."""
    monkeypatch.setenv("GRADWIRE_MAX_RANKS", "2")

    def body(comm: Communicator) -> Any:
        asked = comm.should_resize()  # opens the door
        if comm.rank == 0:
            eventually(lambda: comm._door._guests)  # type: ignore[union-attr]
        for _ in range(2):  # also in the communicator that the door is handed to
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

    def guest(comm: Communicator) -> None:
        comm.barrier()
        comm.close()

    with elastic_job() as job:
        members = job.start(2, body)
        joins = job.join(guest)
        assert members[0].value() == (False, 2, 1)
        joins.value()


def test_threads_open_one_door_together(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def opens(mesh: Mesh) -> Any:
        time.sleep(0.1)  # so that the other thread comes meanwhile
        opened.append(open_door(mesh))
        return opened[-1]

    monkeypatch.setattr(_communicator, "open_door", opens)
    with gradwire.init(rank=0, size=1) as comm, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: comm.should_resize(), range(2))) == [False, False]
        assert opened == [comm._door]
    for each in opened:
        each.close()


def test_only_rank_0_keeps_a_door() -> None:
    """Another rank may have opened one while it took rank 0 to be dead."""

    def body(comm: Communicator) -> Any:
        comm._door = open_door(comm._mesh)
        with comm.resize() as after:
            x = np.zeros(1)
            after.all_reduce(x)
            return after._door is not None

    with elastic_job() as job:
        assert [each.value() for each in job.start(2, body)] == [True, False]


def test_a_rank_that_serves_a_store_finds_the_next_one() -> None:
    """After resize(store=...), the door is in that store, and not in the one that rank 0 served."""
    name = f"elastic-{secrets.token_hex(4)}"
    first, second = (Address("unix", f"gradwire-{name}-{each}") for each in "ab")
    comm = gradwire.init(rank=0, size=1, store=str(first), secret=SECRET)
    job = comm._mesh.job
    with comm, StoreServer(second, job.name, SECRET.encode()):
        assert not comm.should_resize()  # nobody serves the first
        with comm.resize(store=str(second)):
            limit = Deadline(10)
            with contextlib.closing(
                StoreClient(second, job.name, SECRET.encode(), limit)
            ) as client:
                assert client.get(key_of(job.name, job.epoch), 10)
