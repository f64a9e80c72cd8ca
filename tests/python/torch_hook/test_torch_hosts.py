"""A DistributedDataParallel model whose ranks are on two hosts (network namespaces)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import namespaces
import pytest
from hosts import PORT, Network, debians_etc_hosts

pytest.importorskip("torch")

import gradwire.torch
import torch
import torch.distributed as dist
import torch_hosts
from ranks import eventually
from torch.nn.parallel import DistributedDataParallel

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
PLACES = (0, 0, 1)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(2, decoys=True)
    yield made
    made.close()


def train() -> tuple[Any, ...]:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(torch.nn.Linear(300, 200))
    state = gradwire.torch.register(ddp, algorithm="hierarchical(ring,ring)")
    ddp(torch.full((4, 300), float(dist.get_rank()))).sum().backward()
    gradients = torch.cat([each.grad.flatten() for each in ddp.parameters()])
    comm = state.communicator
    found = comm.transports, comm.hosts, str(comm._mesh.interface), gradients.tolist()
    state.close()
    return found


def test_ddp_averages_gradients_between_hosts(network: Network) -> None:
    found = torch_hosts.run(network, PLACES, train, backend="gloo")
    links = [each[0] for each in found]
    assert links == [{1: "shm", 2: "tcp"}, {0: "shm", 2: "tcp"}, {0: "tcp", 1: "tcp"}]
    for rank, (_, groups, interface, gradients) in enumerate(found):
        assert groups == ((0, 1), (2,))
        assert interface == f"eth0 (10.77.0.{PLACES[rank] + 1}): it reaches the store"
        assert gradients == found[0][3]
        assert set(gradients[: 300 * 200]) == {4.0}  # 4 rows of the ranks' mean, 1


def interface_of(comm: Any, _: Any) -> str:
    comm.barrier()
    return str(comm._mesh.interface)


def test_ranks_that_torchrun_starts_meet_though_the_masters_name_means_loopback(
    network: Network, tmp_path: Path
) -> None:
    def environment(rank: int) -> dict[str, str]:
        names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        place = {name: str(value) for name, value in names.items()}
        return {**place, "MASTER_ADDR": "node0", "MASTER_PORT": str(PORT)}

    found = network.values(
        (0, 1),
        interface_of,
        store=None,
        environment=environment,
        etc_hosts=debians_etc_hosts(tmp_path),
    )
    for rank, interface in enumerate(found):
        assert interface == f"eth0 (10.77.0.{rank + 1}): it reaches the store"


def train_for_ever(under_way: Path) -> int:
    """The peer that this rank names, whose host is cut off while they train."""
    os.environ["GRADWIRE_TCP_TIMEOUT_SECONDS"] = "2"  # in place of 15; the group waits 30 minutes
    ddp = DistributedDataParallel(torch.nn.Linear(300, 200))
    state = gradwire.torch.register(ddp)

    def train() -> None:
        while True:
            ddp(torch.ones(4, 300)).sum().backward()
            if state.steps > 2:  # in the second forward DDP itself communicates, by gloo
                under_way.touch()

    with pytest.raises(gradwire.TransportError) as raised:
        train()
    assert repr(raised.value) == repr(state.error)
    return raised.value.peer


def test_a_host_that_vanishes_is_found_long_before_the_timeout(
    network: Network, tmp_path: Path
) -> None:
    under_way, over = tmp_path / "under way", threading.Event()

    def cut() -> None:
        eventually(under_way.exists)
        with network.cut(1):
            over.wait()

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        found = torch_hosts.run(network, PLACES, partial(train_for_ever, under_way), backend="gloo")
    finally:
        over.set()
        cutter.join()
    assert found[:2] == [2, 2]
    assert found[2] in (0, 1)
