"""A network cut in two: one part goes on, and the other ends, since it is too small.

The hosts are network namespaces (`hosts.py`), with one rank each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import namespaces
import pytest
from elastic_job import State, train
from gradwire import Communicator, RendezvousError
from hosts import Network
from ranks import Outcome, nightly

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Network]]:
    monkeypatch.setenv("GRADWIRE_TCP_TIMEOUT_SECONDS", "1")
    networks = []

    def make(hosts: int) -> Network:
        networks.append(Network(hosts))
        return networks[-1]

    yield make
    for each in networks:
        each.close()


def divided(network: Network, part: set[int], **options: Any) -> tuple[list[Outcome], ...]:
    """The ends of the ranks of this part, and of the others, when the network parts them.

    Those that go on end with their numbers in the job and their state, in a step after that.
    """
    size = len(network.hosts)

    def body(comm: Communicator, pipe: Any) -> tuple[tuple[int, ...], State]:
        def goes_on(now: Communicator, state: State) -> bool:
            if state.steps == 1:
                pipe.send("trains")
            return now.epoch > 0 and now.size in (len(part), size - len(part)) and state.steps > 1

        comm, state = train(comm, goes_on, timeout=5, **options)
        with comm:
            return comm._mesh.job_ranks, state

    with network.start(range(size), body) as ranks:
        for each in ranks:
            assert each.pipe.recv() == "trains"
        with network.divide(sorted(part)):
            ended = [each.outcome() for each in ranks]
    return [ended[r] for r in sorted(part)], [ended[r] for r in range(size) if r not in part]


def require_training(ended: list[Outcome], ranks: set[int]) -> None:
    """They have gone on together, alike."""
    assert [each.error for each in ended] == [None] * len(ranks)
    assert len({each.value for each in ended}) == 1
    assert ended[0].value[0] == tuple(sorted(ranks))


@pytest.mark.parametrize("minority", [{2, 3}, {3}, *nightly({1, 2}, {0})], ids=str)
def test_only_the_majority_goes_on(switch: Callable[[int], Network], minority: set[int]) -> None:
    """Or the half that has rank 0; also where the minority has rank 0, its store and listener."""
    out, on = divided(switch(4), minority)
    for each in out:
        assert isinstance(each.error, RendezvousError), each
        assert f" of 4 ranks{' without rank 0' * (len(minority) == 2)}" in str(each.error)
        assert "no majority; pass min_ranks=" in str(each.error)
        assert "or the network between them and this part of the ranks has" in str(each.error)
    require_training(on, {0, 1, 2, 3} - minority)


def test_a_given_number_of_ranks_alone_decides(switch: Callable[[int], Network]) -> None:
    """Both halves train on, as two trainings."""
    one, other = divided(switch(4), {2, 3}, min_ranks=2)
    require_training(one, {2, 3})
    require_training(other, {0, 1})


@pytest.mark.parametrize("apart", [2, *nightly(0)])
def test_a_part_with_too_few_waits_and_ends(switch: Callable[[int], Network], apart: int) -> None:
    out, on = divided(switch(3), {apart}, min_ranks=2, wait=1)
    text = str(out[0].error)
    assert "1 rank is here after wait=1 s, and min_ranks=2" in text
    assert "or the network between them and this part of the ranks has" in text
    require_training(on, {0, 1, 2} - {apart})
