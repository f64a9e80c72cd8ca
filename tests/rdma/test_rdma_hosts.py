"""Ranks of several hosts: shared memory within a host, RDMA between hosts.

The hosts are two network namespaces which share the device, or, where `RDMA_VM_SIZE` says so, two
virtual machines. Each of the machines runs this file, and its own ranks.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import gradwire
import namespaces
import numpy as np
import pytest
from device import PATIENCE, TRANSPORT, on_a_device, on_two_machines, started
from gradwire import Communicator, TransportError
from hosts import Network

SIZE = 4
PLACES = (0, 0, 1, 1)
LENGTHS = (1, 1_000, 100_003)
CODECS = [name for name in gradwire.codecs() if name not in ("none", "lowrank")]
Body = Callable[[Communicator], Any]


def whole(n: int, rank: int) -> np.ndarray:
    """Small integers: float sums of them are exact, in whatever order."""
    return ((np.arange(n) * (7 + 4 * rank)) % 199 - 99).astype(np.float32)


def check_sums(comm: Communicator) -> None:
    """Plain sums are right; lossy ones are the same on all ranks, and lose little in the end."""
    for n in LENGTHS:
        total = np.sum([whole(n, rank) for rank in range(SIZE)], axis=0)
        for algorithm in ("auto", "ring", "hierarchical(ring,direct)"):
            x = comm.all_reduce(whole(n, comm.rank), algorithm=algorithm)
            np.testing.assert_array_equal(x, total)
        np.testing.assert_array_equal(
            comm.all_gather(whole(n, comm.rank)),
            np.concatenate([whole(n, rank) for rank in range(SIZE)]),
        )
    for codec in CODECS:
        feedback = gradwire.ErrorFeedback()
        n = LENGTHS[-1]
        x = comm.all_reduce(whole(n, comm.rank), codec=codec, feedback=feedback, key="x")
        owed = comm.all_reduce(feedback.residual("x"), algorithm="ring")
        np.testing.assert_allclose(x + owed, total, rtol=0, atol=0.01)
        everyones = comm.all_gather(x).reshape(SIZE, n)
        assert (everyones == x).all(), codec


def links(comm: Communicator) -> tuple[dict[int, str], tuple[tuple[int, ...], ...]]:
    check_sums(comm)
    return comm.transports, comm.hosts


def expected(rank: int, within: str) -> tuple[dict[int, str], tuple[tuple[int, ...], ...]]:
    """Of `links`."""
    peers = [peer for peer in range(SIZE) if peer != rank]
    here = PLACES[rank]
    return {peer: within if PLACES[peer] == here else TRANSPORT for peer in peers}, ((0, 1), (2, 3))


@on_a_device
@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
def test_two_namespaces_that_share_a_device() -> None:
    """The device's address is on a network of neither, so they use it where there is no tcp."""
    network = Network(2)
    try:
        environment = {"GRADWIRE_TRANSPORT": f"shm,{TRANSPORT}"}
        found = network.values(
            PLACES,
            lambda comm, _: links(comm),
            environment=lambda rank: environment,
            timeout=PATIENCE,
        )
    finally:
        network.close()
    assert found == [expected(rank, "shm") for rank in range(SIZE)]


def sums_without_end(comm: Communicator) -> None:
    x = np.ones(100_000, np.float32)
    while True:
        comm.all_reduce(x)


def on_this_machine(body: Body, port: int, **options: Any) -> dict[int, Any]:
    """What two of the four ranks return, or None where they died; the other machine has others."""
    first = 2 * int(os.environ["RDMA_VM_RANK"])
    bodies = dict.fromkeys((first, first + 1), body)
    store = f"tcp://{os.environ['RDMA_VM_ADDR0']}:{port}"
    with started(bodies, SIZE, store, **options) as ranks:
        ended = {rank: each.outcome() for rank, each in ranks.items()}
    for each in ended.values():
        if each.error is not None:
            raise each.error
    return {rank: each.value for rank, each in ended.items()}


@on_two_machines
def test_machines_use_shared_memory_within_and_rdma_between() -> None:
    for rank, found in on_this_machine(links, 29501).items():
        assert found == expected(rank, "shm")


@on_two_machines
def test_machines_use_rdma_alone() -> None:
    for rank, found in on_this_machine(links, 29502, transports=[TRANSPORT]).items():
        assert found == expected(rank, TRANSPORT)


@on_two_machines
def test_machines_both_name_a_rank_that_was_killed_on_one() -> None:
    def body(comm: Communicator) -> TransportError:
        comm.barrier()
        if comm.rank == 3:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(TransportError) as raised:
            sums_without_end(comm)
        return raised.value

    for rank, error in on_this_machine(body, 29503).items():
        assert (error is None) == (rank == 3)
        if error is not None:
            assert error.peer == 3, error
