"""DiLoCo's state: checkpoints, other numbers of ranks, and ranks that are lost."""

from __future__ import annotations

import copy
import threading
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire import Communicator, InvalidArgument, TransportError
from gradwire.torch import gather_state_dict, scatter_state_dict
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch.exchange.engine import Averages
from local_training import Trainee, assert_same, bits, small, weights
from ranks import LIMIT, on_ranks, run
from replicated_training import saved

SETTINGS: list[dict[str, Any]] = [
    {"every": 4, "codec": "onebit"},
    {"every": 4, "codec": "int8:rounding=stochastic", "feedback": True, "delay": 3},
    {"every": 5, "codec": "onebit", "fragments": 2, "delay": 2, "mix": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS)
@on_ranks(2)
def test_a_resumed_training_has_the_same_bits_from_any_step(
    comm: Communicator, settings: dict[str, Any]
) -> None:
    trainee = Trainee(comm, small(normalized=True), **settings)
    states = []
    for _ in range(12):
        states.append(saved((trainee.outer.state_dict(), trainee.model.state_dict())))
        trainee.step()
    expected = bits(trainee.model), trainee.outer.state_dict()
    for begin in range(3, 12):
        again = Trainee(comm, small(normalized=True), **settings)
        outer, model = states[begin]
        again.model.load_state_dict(model)
        again.outer.load_state_dict(outer)
        again.step_number = begin
        again.train(12 - begin)
        assert bits(again.model) == expected[0], begin
        assert_same(again.outer.state_dict(), expected[1])


@on_ranks(2)
def test_pace_is_saved(comm: Communicator) -> None:
    """Steps take no time (`float()` is 0), so that the round after has `every` steps again."""
    trainee = Trainee(comm, every=4, pace=True, clock=float)
    trainee.outer._steps._round.steps = 1 + comm.rank
    trainee.outer._steps.pace = (1, 2)
    again = Trainee(comm, every=4, pace=True, clock=float)
    again.outer.load_state_dict(saved(trainee.outer.state_dict()))
    assert again.outer.pace == (1, 2)
    assert [again.step() for _ in range(2)].index(True) == comm.rank


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_states_go_to_another_number_of_ranks(size: int) -> None:
    def before(comm: Communicator) -> Any:
        trainee = Trainee(comm, every=3, codec="onebit")
        trainee.train(6)
        kept = trainee.outer.feedback.residual("0.weight")
        return gather_state_dict(trainee.outer), weights(trainee.model), kept

    ended = run(4, before)
    whole, expected = saved(ended[0][0]), ended[0][1]
    mean = sum(each[2] for each in ended) / 4

    def after(comm: Communicator) -> Any:
        trainee = Trainee(comm, every=3, codec="onebit")
        scatter_state_dict(trainee.outer, whole if comm.rank == 0 else None)
        kept = trainee.outer.feedback.residual("0.weight")
        loaded = weights(trainee.model)
        trainee.train(3)
        trainee.outer.check_agreement()
        return kept, loaded, bits(trainee.model)

    found = run(size, after)
    for _, loaded, last in found:
        assert torch.equal(loaded, expected)
        assert last == found[0][2]
    torch.testing.assert_close(sum(each[0] for each in found) / size, mean, rtol=0, atol=1e-6)


@on_ranks(2)
def test_states_that_do_not_fit_are_refused_on_all_ranks(comm: Communicator) -> None:
    trainee = Trainee(comm, every=2, codec="onebit")
    first = trainee.outer.state_dict()
    trainee.train(2)
    second = trainee.outer.state_dict()
    other = copy.deepcopy(second)
    other["outer"]["0.weight"] = torch.zeros(3)
    wrong: list[Any] = [
        {**second, "rank": 1 - comm.rank} if comm.rank else second,
        first if comm.rank else second,
        other if comm.rank else second,
        {"a": 1},
    ]
    texts = []
    for each in wrong:
        with pytest.raises(InvalidArgument) as raised:
            trainee.outer.load_state_dict(each)
        texts.append(str(raised.value))
    (texts, others) = comm.all_gather_object(texts)
    assert "failed on rank 1" in texts[0]
    assert "the state is that of rank 0 of 2, and this is rank 1" in others[0]
    assert "different state= by rank: 1 on rank 0; 0 on rank 1" in texts[1]
    assert "'0.weight': torch.float32 of shape (3,)" in others[2]
    assert "version is None" in texts[3]


def test_survivors_go_on_with_what_they_have_learnt() -> None:
    before = threading.Barrier(3)

    def body(comm: Communicator) -> Any:
        trainee = Trainee(comm, every=3, codec="onebit", pace=True, clock=float)
        trainee.train(7)
        before.wait(LIMIT)
        if comm.rank == 1:
            comm.abort("leaves")
            return None
        own = weights(trainee.model)
        with pytest.raises(gradwire.Aborted):
            trainee.train(3)
        smaller = trainee.outer.communicator.shrink()
        learnt = weights(trainee.model)
        residual = trainee.outer.feedback.residual("0.weight")
        trainee.outer.after_shrink(smaller)
        assert torch.equal(weights(trainee.model), learnt)
        assert not torch.equal(own, learnt)
        assert len(trainee.outer.pace) == 2
        # An average over fewer ranks gives each residual more weight.
        scaled = trainee.outer.feedback.residual("0.weight")
        assert abs(residual).max() > 0
        assert abs(scaled - residual * 2 / 3).max() < 1e-7
        last = trainee.train(3)[-1]
        trainee.outer.check_agreement()
        trainee.outer.finish()
        smaller.close()
        return last

    found = run(3, body)
    assert found[0] == found[2]


def go_on_without_a_rank() -> tuple[int, bytes]:
    """Loses rank 1, whose process dies within a round."""
    group = dist.group.WORLD
    with communicator_of(group) as comm:
        trainee = Trainee(comm, every=3, codec="int8", feedback=True)
        trainee.train(4)
        if comm.rank == 1:
            torch_ranks.die()
        with pytest.raises(TransportError) as raised:
            trainee.train(5)
        smaller = trainee.outer.communicator.shrink()
    trainee.outer.after_shrink(smaller)
    trainee.train(7)
    trainee.outer.finish()
    trainee.outer.check_agreement()
    smaller.close()
    return raised.value.peer, bits(trainee.model)


def test_survivors_of_a_process_that_died_go_on() -> None:
    ended = torch_ranks.run(3, go_on_without_a_rank, dying=(1,))
    assert ended[0] == ended[2]
    assert ended[0][0] == 1


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_survivor_that_missed_an_outer_step_takes_over_its_result(
    fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank fails when its averages have come, while the other applies them."""
    wait = Averages.wait
    failing: set[int] = set()

    def fail(self: Averages) -> None:
        if id(self._exchange) in failing:
            failing.clear()
            self.undo()
            raise TransportError("rank 1 is gone")
        wait(self)

    monkeypatch.setattr(Averages, "wait", fail)

    def body(comm: Communicator) -> Any:
        trainee = Trainee(comm, every=2 * fragments, fragments=fragments, codec="onebit")
        trainee.train(2 * fragments + 1)
        if comm.rank == 2:
            failing.add(id(trainee.outer._steps._exchange))
            with pytest.raises(TransportError):
                trainee.step()
            comm.abort("as a failure would")
        else:
            trainee.step()
        if comm.rank == 1:
            return None
        with pytest.raises(gradwire.Error):
            comm.barrier()
        smaller = comm.shrink(timeout=5)
        trainee.outer.after_shrink(smaller)
        trainee.outer.check_agreement()
        common = bits(trainee.model) if fragments == 1 else b""
        trainee.train(2 * fragments)
        trainee.outer.check_agreement()
        trainee.outer.finish()
        smaller.close()
        return common, bits(trainee.model)

    found = run(3, body)
    assert found[0] == found[2]
