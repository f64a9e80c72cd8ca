"""A session's rules on one rank, with stand-ins for the other ranks and for what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import gradwire
import pytest
import torch
from gradwire import InvalidArgument, TransportError
from gradwire.torch import elastic
from gradwire.torch._ranks.group import default_timeout
from gradwire.torch._ranks.ranks import Ranks
from gradwire.torch.elastic.members import MemberReport
from scripted_session import BROKEN, ranks, scripted
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer_options import grouped


@pytest.fixture
def alone() -> Iterator[gradwire.Communicator]:
    with gradwire.init(rank=0, ranks=1, store="unix://none") as comm:
        yield comm


def made(**options: Any) -> Any:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wish = {"model": model, "optimizer": optimizer, "sampler": elastic.Sampler(8, 2), **options}
    return elastic.session(**grouped(**wish))


def loss(session: Any) -> torch.Tensor:
    return torch.stack([each.sum() for each in session._averager._names]).sum()


def test_a_batch_has_one_backward_and_one_commit(alone: gradwire.Communicator) -> None:
    session = made(ranks=alone)
    assert repr(session) == "Session(not begun, steps=0, changes=0)"
    with pytest.raises(InvalidArgument, match="has not begun"):
        _ = session.communicator
    with session as s:
        assert repr(s) == "Session(rank 0 of 1, steps=0, changes=0)"
        refuse(s, backward="for a batch", commit="call backward")
        for _ in s:
            refuse(s, commit="call backward")
            s.backward(loss(s))
            refuse(s, backward="called twice")
            assert s.commit() is True
            refuse(s, backward="for a batch", commit="call backward")
        assert (s.steps, s.epoch, s.changes) == (4, 1, 0)


def refuse(s: Any, **told: str) -> None:
    for name, text in told.items():
        with pytest.raises(InvalidArgument, match=text):
            s.commit() if name == "commit" else s.backward(loss(s))


def test_gradients_of_several_batches_of_a_step_add_up(alone: gradwire.Communicator) -> None:
    session, said = made(ranks=alone), []
    with session as s:
        s._reference = 2  # as after the loss of one of two ranks
        for _ in s:
            s.backward(loss(s))
            said.append(s.commit())
            assert all((each.grad == (1 if said[-1] else 0.5)).all() for each in s._averager._names)
    assert said == [False, True] * 2


def test_a_step_that_fails_from_the_beginning_is_tried_four_times(
    alone: gradwire.Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    session = made(ranks=alone)
    session._averager.finish = mock.Mock(side_effect=BROKEN)
    with pytest.raises(gradwire.Error, match=r"step 0 failed.* 4 times: a link broke"):
        train(session)
    assert (session.steps, session.changes) == (0, 4)
    assert caplog.text.count("no rank is lost: a link broke") == 4


def train(session: Any) -> None:
    with session as s:
        for _ in s:
            s.backward(loss(s))
            s.commit()


def test_a_step_that_failed_begins_without_its_traces(alone: gradwire.Communicator) -> None:
    """Also one that failed twice, and the next ones may fail as often again."""
    session, seen = made(ranks=alone), []
    wait = session._averager.finish
    session._averager.finish = lambda: wait() if len(seen) % 3 == 2 else fail()
    restore = mock.Mock(wraps=session._averager.buffers.restore)
    session._averager.buffers.restore = restore

    def fail() -> None:
        raise BROKEN

    with session as s:
        for indices in s:
            s.backward(loss(s))
            s.commit()
            seen.append(indices.tolist())
    assert seen[::3] == seen[1::3] == seen[2::3]
    assert sorted(each for some in seen[::3] for each in some) == list(range(8))
    assert (session.steps, session.changes) == (4, restore.call_count) == (4, 8)


@pytest.mark.parametrize(
    ("size", "joined", "repeats"), [(2, 0, 1), (1, 0, 0), (3, 1, 0), (2, 1, 0)]
)
def test_a_change_of_ranks_is_no_repeat(size: int, joined: int, repeats: int) -> None:
    before, after = ranks(), ranks(size=size, joined=joined)
    before.resize.return_value = after
    session = scripted(before)
    session._failure = BROKEN
    session._resize()
    assert (session.communicator, session.changes, session._repeats) == (after, 1, repeats)
    before.resize.assert_called_once_with(wait=7.0, min_ranks=2)
    after._core.set_patience.assert_called_once_with(9.0)
    session._failure = None
    after.resize.return_value = ranks(size=size)
    session._resize()
    assert (session.changes, session._repeats) == (2, 0)


def test_at_the_end_one_rank_is_enough() -> None:
    comm = ranks()
    comm.barrier.side_effect = BROKEN
    comm.resize.return_value = ranks(size=1)
    session = scripted(comm)
    session._has_state = True
    assert not session._end()
    assert comm.resize.call_args.kwargs["min_ranks"] == 1
    assert session._end()
    assert session.changes == 1


@pytest.mark.parametrize(
    ("size", "joined", "least", "lacks"),
    [(1, 0, None, False), (1, 0, 2, True), (2, 0, 2, False), (1, 1, 2, False), (3, 0, 2, False)],
)
def test_fewer_ranks_than_min_ranks_wait_unless_they_join_others(
    size: int, joined: int, least: int | None, lacks: bool
) -> None:
    comm = ranks(size=size, joined=joined)
    assert scripted(min_ranks=least)._lacks_ranks(comm) is lacks


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize(
    ("error", "closed", "aborts"),
    [(None, False, False), (ValueError("x"), False, True), (ValueError("x"), True, False)],
)
def test_others_go_on_without_a_rank_whose_loop_fails(
    owns: bool, error: Exception | None, closed: bool, aborts: bool
) -> None:
    comm = ranks()
    comm.closed = closed
    session = scripted(comm, owns=owns)
    session.__exit__(type(error) if error else None, error, None)
    assert comm.abort.call_args_list == [mock.call("ValueError in the training loop")] * aborts
    assert comm._core.set_patience.call_args == mock.call(0)
    assert comm.close.called == owns
    assert session._averager.mock_calls == [mock.call.end(False), mock.call.close()]


def test_the_loops_own_error_wins_over_that_of_its_step() -> None:
    session = scripted(ranks())
    session._averager.end.side_effect = BROKEN
    session.__exit__(ValueError, ValueError("x"), None)
    with pytest.raises(TransportError):
        session.__exit__(None, None, None)
    assert session._averager.close.call_count == 2


def test_a_session_that_cannot_connect_ends(alone: gradwire.Communicator) -> None:
    session = scripted()
    session.__exit__(None, None, None)
    session._averager.close.assert_called_once()


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize(
    ("rank", "joined", "has"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_rank_0_has_the_state_at_the_beginning(
    rank: int, joined: bool, has: bool, owns: bool
) -> None:
    comm = ranks(rank)
    session = scripted(owns=owns)
    session._connect.return_value = comm, joined
    assert session.__enter__() is session
    comm.all_gather_object.assert_called_once_with((has, 0, False))
    assert comm.accept_joins.called != owns
    assert session._target == 2
    assert session._averager.mock_calls == [mock.call.end(False), mock.call.adopt(comm)]


def test_ranks_meet_again_where_one_fails_at_the_beginning() -> None:
    first, second = ranks(), ranks(size=3)
    first.all_gather_object.side_effect = BROKEN
    first.resize.return_value = second
    session = scripted()
    session._connect.return_value = first, False
    with session:
        assert session.communicator is second
        assert (session._target, session._failure, session.changes) == (3, BROKEN, 1)


def test_an_error_at_the_beginning_ends_the_session() -> None:
    comm = ranks()
    comm.all_gather_object.side_effect = InvalidArgument("no")
    session = scripted()
    session._connect.return_value = comm, False
    with pytest.raises(InvalidArgument, match="no"), session:
        pass
    comm.abort.assert_called_once()
    session._averager.close.assert_called_once()


def test_a_committed_step_moves_the_position_once() -> None:
    session = scripted(ranks(), rates=mock.Mock())
    session._sampler.position, session._samples = 16, 8
    session._failure, session._repeats, session._prepared = BROKEN, 3, True
    session._settle(committed=True)
    assert (session.steps, session._sampler.position) == (1, 24)
    assert (session._failure, session._repeats, session._prepared) == (None, 0, False)
    session._rates.step.assert_called_once_with()
    session._settle(committed=False)
    assert (session.steps, session._sampler.position) == (1, 24)
    session._rates.step.assert_called_once_with()
    session._averager.buffers.restore.assert_not_called()
    assert session._averager.end.call_args_list == [mock.call(True), mock.call(False)]


@pytest.mark.parametrize("committed", [True, False])
def test_ranks_commit_what_another_has_committed(committed: bool) -> None:
    """A rank that is prepared commits, where another has; it restores buffers else."""
    comm = ranks(others=(True, 1 if committed else 0, False))
    session = scripted(comm)
    session._has_state = session._prepared = session._is_under_way = True
    session._sampler.position, session._samples = 0, 8
    assert session._report() is True
    comm.all_gather_object.assert_called_once_with(MemberReport(True, 0, True))
    assert session.steps == committed
    assert session._averager.buffers.restore.called != committed
    assert (session._has_state, session._prepared, session._is_under_way) == (True, False, False)
    assert session._averager.mock_calls[-1] == mock.call.adopt(comm)


def test_a_rank_behind_the_others_loses_its_state() -> None:
    session = scripted(ranks(others=(True, 5, False)))
    session._has_state = True
    assert session._report()
    assert not session._has_state
    assert (session._news.holders, session._news.receivers) == ((1,), (0,))


def test_ranks_meet_between_steps_until_none_fails() -> None:
    comm = ranks()
    comm.should_resize.side_effect = [True, False]
    comm.resize.return_value = comm
    session = scripted(comm)
    session._share = mock.Mock(side_effect=[BROKEN, None, None])
    session._has_state = True
    session._bring_together()
    assert (session.changes, session._news, session._failure) == (2, None, BROKEN)
    assert session._share.call_count == 2
    assert comm.should_resize.call_count == 1
    session._bring_together()
    assert (session.changes, comm.should_resize.call_count) == (2, 2)


@pytest.mark.parametrize(("size", "shown"), [(98, "x" * 98 + "'"), (99, "x" * 99 + "…")])
def test_settings_that_differ_are_told_in_short(size: int, shown: str) -> None:
    session = scripted(settings={"model": "x" * size, "batch": 3})
    session._require_alike({"settings": {"batch": 3}})
    with pytest.raises(InvalidArgument) as raised:
        session._require_alike({"settings": {"batch": 3, "model": ""}})
    assert f"model differs: this rank's session has '{shown}, the others' has ''" in str(raised)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": object.__new__(DistributedDataParallel)}, "inside DistributedDataParallel"),
        ({"model": 3}, "model"),
        ({"optimizer": 3}, "optimizer"),
        ({"sampler": 3}, "sampler"),
        ({"wait": float("inf")}, "wait=inf"),
        ({"wait": float("nan")}, "wait=nan"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"verify": 3}, "verify"),
        ({"patience": 0}, "patience"),
    ],
)
def test_what_no_session_can_have_is_refused(given: dict[str, Any], text: str) -> None:
    model = nn.Linear(4, 2)
    wish = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **given}
    with pytest.raises(InvalidArgument, match=text):
        made(**wish)


def test_options_reach_the_session() -> None:
    plain = made(wait=0, min_ranks=1, bucket_bytes=1)
    assert (plain._wait, plain._min_ranks, plain._patience) == (0, 1, default_timeout())
    assert (plain._rates, plain._verify, plain._owns) == (None, False, True)
    assert plain._settings["feedback"] is False
    other = made(patience=5.0, verify=True, codec="onebit", global_batch="proportional")
    assert (other._min_ranks, other._patience, other._verify) == (None, 5.0, True)
    assert other._rates is not None
    assert other._settings["feedback"] is True


@pytest.mark.parametrize(
    ("given", "options"), [(None, {}), (Ranks(timeout=7), {"timeout": 7})], ids=["plain", "timeout"]
)
def test_a_session_makes_a_communicator_that_others_can_join(
    monkeypatch: pytest.MonkeyPatch, given: Ranks | None, options: dict[str, Any]
) -> None:
    comm = mock.Mock(spec=gradwire.Communicator, rank=0, size=1, joined=0)
    init = mock.Mock(return_value=comm)
    monkeypatch.setattr(gradwire, "init", init)
    assert made(ranks=given)._connect() == (comm, False)
    init.assert_called_once_with(elastic=True, **options)
