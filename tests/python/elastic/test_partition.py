"""A network cut in two: the larger part goes on, and the other ends, since it is too small.

The hosts are network namespaces (`hosts.py`), with one rank each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from elastic_job import State, train
from gradwire import Communicator, RendezvousError
from hosts import Network
from ranks import nightly

from bench.network import namespaces

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setenv("GRADWIRE_TCP_TIMEOUT_SECONDS", "1")
    network = Network(3)
    yield network
    network.close()


@pytest.mark.parametrize("apart", [2, *nightly(0)])
def test_only_the_larger_part_goes_on(network: Network, apart: int) -> None:
    """Also where the smaller part has rank 0, its store and the door."""

    def body(comm: Communicator, pipe: Any) -> tuple[tuple[int, ...], State]:
        def goes_on(now: Communicator, state: State) -> bool:
            if state.steps == 1:
                pipe.send("trains")
            return now.epoch > 0 and now.size == 2

        comm, state = train(comm, goes_on, min_ranks=2, wait=1, timeout=5)
        with comm:
            return comm._mesh.job_ranks, state

    with network.start(range(3), body) as ranks:
        for each in ranks:
            assert each.pipe.recv() == "trains"
        with network.cut(apart):
            ended = [each.outcome() for each in ranks]
    left_out = ended.pop(apart)
    assert isinstance(left_out.error, RendezvousError), left_out
    text = str(left_out.error)
    assert "1 rank is here after wait=1 s, and min_ranks=2" in text
    assert "or the network between them and this part of the ranks has" in text
    assert [each.error for each in ended] == [None, None]
    (one, state), other = (each.value for each in ended)
    assert (one, state) == other
    assert one == tuple(rank for rank in range(3) if rank != apart)
    assert state.steps > 1
