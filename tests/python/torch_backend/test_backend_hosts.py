"""Training over the backend whose ranks are on two hosts (network namespaces)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import namespaces
import pytest
import torch
import torch.distributed as dist
import torch_hosts
from hosts import PORT, Network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
PLACES = (0, 0, 1)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(2, decoys=True)
    yield made
    made.close()


def gradient(module: nn.Module, weight: Any) -> set[float]:
    """The values in a weight's gradient, of four rows that hold the rank's number."""
    module(torch.full((4, 300), float(dist.get_rank()))).sum().backward()
    whole = weight.grad
    return set(getattr(whole, "full_tensor", lambda: whole)().flatten().tolist())


def train() -> tuple[Any, ...]:
    """What links a rank has; gradients under DDP and FSDP2; and a message of rank 2."""
    torch.manual_seed(7)
    comm = dist.group.WORLD._get_backend(torch.device("cpu"))._endpoint.communicator  # type: ignore[union-attr]
    links = comm.transports, comm.hosts, str(comm._mesh.interface)
    ddp = DistributedDataParallel(nn.Linear(300, 20))
    replicated = gradient(ddp, ddp.module.weight)
    linear = nn.Linear(300, 20)
    fully_shard(linear, mesh=init_device_mesh("cpu", (len(PLACES),)))
    sharded = gradient(linear, linear.weight)
    last = len(PLACES) - 1
    message = torch.full((1000,), float(dist.get_rank()))
    if dist.get_rank() == last:
        dist.send(message, 0)
    elif dist.get_rank() == 0:
        dist.recv(message, last)
    dist.barrier()
    return *links, replicated, sharded, set(message.tolist())


@pytest.mark.parametrize("filtered", [False, True], ids=["any port", "two ports of host 0"])
def test_ddp_and_fsdp_train_between_hosts(network: Network, filtered: bool) -> None:
    """Filtered, only the port of torch's store and GRADWIRE_PORT lead to host 0, none to host 1."""
    environment = {"GRADWIRE_PORT": "29400"} if filtered else {}
    if filtered:
        network.let_in(0, PORT, 29400)
        network.let_in(1)
    found = torch_hosts.run(network, PLACES, train, backend="gradwire", environment=environment)
    assert [each[0] for each in found] == [
        {1: "shm", 2: "tcp"},
        {0: "shm", 2: "tcp"},
        {0: "tcp", 1: "tcp"},
    ]
    for rank, (_, hosts, interface, replicated, sharded, message) in enumerate(found):
        assert hosts == ((0, 1), (2,))
        assert interface == f"eth0 (10.77.0.{PLACES[rank] + 1}): it reaches the store"
        assert replicated == sharded == {4.0}  # 4 rows of the ranks' mean, 1
        assert message == {(2.0, 1.0, 2.0)[rank]}
