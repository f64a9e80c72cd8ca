"""Trainings wait for a rank that is slow as long as a timeout says; one that is lost is found."""

from __future__ import annotations

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.torch import elastic
from gradwire.torch._ranks.group import communicator_of
from ranks import eventually
from stopwatch import own_time
from torch import nn
from torch.nn.functional import mse_loss
from torch_steps import every_way, training
from torch_training import batch, mlp


@every_way
@torch_ranks.on_ranks(2)
def test_a_slow_rank_is_said_to_be_alive(way: str) -> None:
    """Rank 1 is alive, and does not come to the third step's exchange."""
    its = training(way, mlp(), timeout=4)
    for step in range(2):  # in the second forward DDP itself communicates
        its.finish(its.forward(*batch(step)))
    loss = its.forward(*batch(2))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"])
        return
    with pytest.raises(gradwire.Timeout) as raised:
        its.finish(loss)
    store.set("given up", b"")
    text = str(raised.value)
    assert "timed out after its timeout=4 s" in text
    assert "It is alive: rank 1 (process" in text


@every_way
@torch_ranks.on_ranks(2, dying=(1,))
def test_a_lost_rank_is_found_at_once(way: str) -> None:
    """Rank 1 dies; groups have their timeout of half an hour."""
    its = training(way, mlp())
    for step in range(2):
        its.finish(its.forward(*batch(step)))
    loss = its.forward(*batch(2))
    if dist.get_rank() == 1:
        torch_ranks.die()
    began = own_time()
    with pytest.raises(gradwire.TransportError) as raised:
        its.finish(loss)
    assert raised.value.peer == 1
    assert own_time() - began < 5


@torch_ranks.on_ranks(2)
def test_an_elastic_session_waits_for_a_rank_that_saves() -> None:
    """Rank 0 saves in the second step, for three of the timeouts after which ranks are lost."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    over = communicator_of(dist.group.WORLD)
    over._timeout = 1.0  # of its calls; the ranks may take longer to meet
    x, y = batch(0)
    with elastic.session(
        module, optimizer, elastic.Sampler(12, batch=2, epochs=1), ranks=over
    ) as s:
        for _ in s:
            s.backward(mse_loss(module(x), y))
            if s.commit():
                optimizer.step()
            if s.steps == 1 and s.communicator.rank == 0:
                began = own_time()
                eventually(lambda began=began: own_time() - began > 3)
    assert s.steps == 3
    assert s.changes == 0
    assert s.communicator.size == 2


@pytest.mark.parametrize("given", [None, 44.0])
@torch_ranks.on_ranks(2)
def test_its_patience_is_that_of_the_process_group(given: float | None) -> None:
    found = []
    over = communicator_of(dist.group.WORLD)
    module: nn.Module = mlp()
    s = elastic.session(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        elastic.Sampler(4, batch=2),
        ranks=over,
        patience=given,
    )
    found.append(s._patience)
    over.close()
    whole = dist.constants.default_pg_timeout.total_seconds()
    assert found == [given or whole]


def test_its_patience_is_torchs_without_a_group() -> None:
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sampler = elastic.Sampler(4, batch=2)
    assert elastic.session(module, optimizer, sampler)._patience == 1800
    with pytest.raises(gradwire.InvalidArgument, match="patience=0 is not a positive number"):
        elastic.session(module, optimizer, sampler, patience=0)
