"""Which rank gives its state to which, and whose random generators follow whose: on one rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from gradwire.torch.elastic import random_state
from gradwire.torch.elastic.session import Session
from scripted_session import ranks, scripted


class Shared(NamedTuple):
    """What a session has asked of the others in `_share`."""

    session: Any
    comm: Any
    transfers: list[tuple[Any, ...]]  # holders, receivers, state


Share = Callable[..., Shared]
OTHER = ("another state of random generators", "")


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> Share:
    def run(rank: int, holders: Any, receivers: Any, others: Any = OTHER, **options: Any) -> Shared:
        comm = ranks(rank, others=others)
        session = scripted(comm, **options)
        session._joined, session._has_state = False, rank in holders
        session._replica.digest.return_value = "bits"
        session._load = mock.Mock()
        transfers: list[tuple[Any, ...]] = []

        def transfer(_: Any, *given: Any) -> Any:
            transfers.append(given[:3])
            return "state"

        monkeypatch.setattr(sys.modules[Session.__module__], "share", transfer)
        session._state = lambda: "own state"
        comm.broadcast_object.side_effect = lambda state, root: state or random_state.capture()
        session._share(comm, mock.Mock(holders=holders, receivers=receivers))
        return Shared(session, comm, transfers)

    return run


@pytest.mark.parametrize(
    ("rank", "holders", "receivers", "state"),
    [(0, (0,), (1,), "own state"), (1, (0,), (1,), None), (0, (1,), (0,), None)],
)
def test_who_has_the_state_gives_it(
    share: Share, rank: int, holders: Any, receivers: Any, state: str | None
) -> None:
    session, comm, transfers = share(rank, holders, receivers, rates=mock.Mock())
    assert transfers == [([*holders], [*receivers], state)]
    assert session._load.called == (rank in receivers)
    assert session._has_state
    assert not comm.broadcast_object.called  # generators are not alike
    assert session._rates.mock_calls == [mock.call.undo(), mock.call.follow(2)]


def test_no_state_travels_where_all_have_it(share: Share) -> None:
    assert share(0, (0, 1), ()).transfers == []


@pytest.mark.parametrize(
    ("verify", "rank", "holders", "digests"),
    [(False, 0, (0,), 0), (True, 1, (0,), 0), (True, 0, (0,), 1)],
)
def test_bits_are_compared_where_the_program_wishes(
    share: Share, verify: bool, rank: int, holders: Any, digests: int
) -> None:
    shared = share(rank, holders, (1,), verify=verify)
    assert shared.session._replica.digest.call_count == digests


def test_who_differs_in_bits_takes_the_state_of_the_first(share: Share) -> None:
    shared = share(1, (0, 1), (), (OTHER[0], "other bits"), verify=True)
    assert shared.transfers == [([0], [1], None)]
    assert shared.session._load.called


@pytest.mark.parametrize("rank", [0, 1])
def test_generators_that_began_alike_follow_the_first_holder(share: Share, rank: int) -> None:
    torch.manual_seed(7)
    mine = random_state.capture()
    alike = (random_state.digest(mine), "")
    shared = share(rank, (1,), (0,), alike)
    (call,) = shared.comm.broadcast_object.call_args_list
    assert call.kwargs == {"root": 1}
    assert (call.args[0] is not None) == (rank == 1)
    assert shared.session._alike is True


def test_a_rank_alone_is_like_no_other() -> None:
    comm = ranks(size=1)
    session = scripted(comm)
    session._joined, session._has_state = False, True
    session._share(comm, mock.Mock(holders=(0,), receivers=()))
    assert session._alike is False


def test_who_joins_leaves_it_to_the_others_whether_generators_are_alike() -> None:
    comm = ranks(size=1)
    session = scripted(comm)
    session._joined = session._has_state = True
    session._share(comm, mock.Mock(holders=(0,), receivers=()))
    assert session._alike is None


@pytest.mark.parametrize(
    ("joined", "alike", "seeds"),
    [(True, False, True), (True, True, False), (False, False, False), (False, None, False)],
)
@pytest.mark.parametrize("rates", [False, True])
def test_a_joiner_takes_all_that_the_others_have(
    joined: bool, alike: bool | None, seeds: bool, rates: bool
) -> None:
    theirs = scripted(ranks(), rates=mock.Mock(size=5) if rates else None)
    theirs._steps, theirs._sampler.position, theirs._reference, theirs._alike = 3, 24, 4, alike
    own = scripted(ranks(), rates=mock.Mock(size=1) if rates else None)
    own._joined = joined
    torch.manual_seed(1)
    before = random_state.digest(random_state.capture())
    state = theirs._state()
    own._load(state, "a seed")
    assert (own._steps, own._sampler.position, own._reference, own._alike) == (3, 24, 4, alike)
    assert state["ranks_of_rates"] == (own._rates.size if rates else 0) == 5 * rates
    own._replica.load_state_dict.assert_called_once_with(theirs._replica.state_dict())
    own._averager.load_state_dict.assert_called_once_with(theirs._averager.state_dict())
    assert (random_state.digest(random_state.capture()) != before) == seeds
    own._load({**state, "alike": False}, "another seed")  # who has the state keeps its generators
    after = random_state.digest(random_state.capture())
    own._load({**state, "alike": False}, "a third")
    assert random_state.digest(random_state.capture()) == after
