"""How long the hook and the optimizers wait for a rank: as long as the process group does."""

from __future__ import annotations

from datetime import timedelta

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import DiLoCo, OneBitAdam, Ranks, register
from torch.nn.parallel import DistributedDataParallel
from torch_training import backward, mlp


def chosen(backend: str) -> list[float]:
    """The timeouts of communicators that are made over a group with one of 77 s."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=77))
    net = mlp()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    states = [
        register(DistributedDataParallel(mlp(), process_group=group)),
        register(DistributedDataParallel(mlp(), process_group=group), ranks=Ranks(timeout=33)),
        register(DistributedDataParallel(mlp())),
        OneBitAdam(mlp().named_parameters(), warm_up=1, ranks=group),
        DiLoCo(net, inner, ranks=group),
        OneBitAdam(mlp().named_parameters(), warm_up=1, ranks=Ranks(group, timeout=44)),
    ]
    return [each.communicator._timeout for each in states]


@pytest.mark.parametrize("backend", ["gloo", "gradwire"])
def test_the_process_groups_timeout_is_the_default(backend: str) -> None:
    whole = dist.constants.default_pg_timeout.total_seconds()
    for found in torch_ranks.run(2, chosen, backend):
        assert found == [77, 33, whole, 77, 77, 44]


@torch_ranks.on_ranks(2)
def test_a_timeout_of_the_group_that_has_changed_counts() -> None:
    group = dist.new_group(backend="gradwire", timeout=timedelta(seconds=77))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=55), group)
    optimizer = OneBitAdam(mlp().named_parameters(), warm_up=1, ranks=group)
    assert float(optimizer.communicator._timeout) == 55


@torch_ranks.on_ranks(2)
def test_a_rank_that_is_late_is_an_error_that_names_the_argument() -> None:
    """Rank 1 is alive, and makes no step."""
    ddp = DistributedDataParallel(mlp())
    state = register(ddp, ranks=Ranks(timeout=1))
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["given up"])
        return
    with pytest.raises(gradwire.Timeout) as raised:
        backward(ddp, 0)
    dist.distributed_c10d._get_default_store().set("given up", b"")
    assert state.error is not None
    assert "timed out after its timeout=1 s" in str(raised.value)
