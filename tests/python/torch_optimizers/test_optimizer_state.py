"""States of the optimizers that exchange: saved ones, and what a failed step leaves."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import gradwire
import pytest
import torch
from gradwire import Communicator, InvalidArgument
from gradwire.torch import gather_state_dict, scatter_state_dict
from local_training import assert_same, bits, small
from ranks import LIMIT, on_ranks, run
from replicated_training import Replica, saved
from torch.nn import Parameter

SETTINGS: list[dict[str, Any]] = [
    {"codec": "onebit"},
    {"codec": "onebit", "every": 3},
    {"codec": "lowrank:rank=2", "clip_norm": 0.5, "warm_up_codec": "onebit"},
]
each_setting = pytest.mark.parametrize("settings", SETTINGS)


def state_of(replica: Replica) -> dict[str, Any]:
    return copy.deepcopy(replica.optimizer.state_dict())


def undelivered(replica: Replica) -> dict[str, torch.Tensor]:
    """This rank's residuals and its own momenta."""
    found = state_of(replica)
    residuals = {name: each["residual"] for name, each in found["feedback"].items()}
    momenta = {f"momentum of {name}": each.flatten() for name, each in found["velocities"].items()}
    return residuals | momenta


@each_setting
@on_ranks(2)
def test_a_resumed_training_has_the_same_bits_from_any_step(
    comm: Communicator, settings: dict[str, Any]
) -> None:
    replica, states = Replica(comm, **settings), []
    for _ in range(7):
        states.append(saved((state_of(replica), replica.model.state_dict())))
        replica.train(1)
    expected = bits(replica.model), state_of(replica)
    for begin in (0, 1, 3, 4, 6):
        again = Replica(comm, **settings)
        optimizer, model = states[begin]
        again.model.load_state_dict(model)
        again.optimizer.load_state_dict(optimizer)
        again.step_number = begin
        again.train(7 - begin)
        assert bits(again.model) == expected[0], begin
        assert_same(state_of(again), expected[1])


@each_setting
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@on_ranks(3)
def test_nan_or_inf_on_one_rank_skips_the_step_on_all(
    comm: Communicator,
    settings: dict[str, Any],
    wrong: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = Replica(comm, **settings)
    for good_steps in (0, 1, 4):
        replica.train(good_steps)
        before = bits(replica.model), state_of(replica)
        replica.backward()
        if comm.rank == 1:
            replica.model[0].weight.grad[3, 3] = wrong
        replica.optimizer.step()
        if good_steps:  # else the warm-up may end, at the begin of a step
            assert_same(state_of(replica)["velocities"], before[1]["velocities"])
        assert bits(replica.model) == before[0]
        assert state_of(replica)["steps"] == before[1]["steps"]
    assert replica.optimizer.skipped_steps == 3
    one, other, third = comm.all_gather_object(replica.train(2))
    assert one == other == third != []
    assert len([each for each in caplog.messages if "had NaN or Inf, and no rank" in each]) == 3


@each_setting
@on_ranks(2)
def test_a_parameter_without_a_gradient_on_any_rank_is_skipped(
    comm: Communicator, settings: dict[str, Any]
) -> None:
    """As torch's optimizers do; one that has a gradient on a rank counts as zeros on the others."""
    replica, found = Replica(comm, **settings, weight_decay=0.5), []
    idle = replica.model[2].weight
    for trained, kept_by in ((0, ()), (2, ()), (3, ()), (0, (1,))):
        replica.train(trained)
        before, was = undelivered(replica), idle.detach().clone()
        common = copy.deepcopy(replica.optimizer.state.get(idle))
        others = bits(replica.model[0])
        replica.backward()
        if comm.rank not in kept_by:
            idle.grad = None
        replica.optimizer.step()
        assert torch.equal(idle, was) == (not kept_by)
        if not kept_by:
            after = undelivered(replica)
            assert_same(replica.optimizer.state.get(idle), common)
            for name in (each for each in after if "2.weight" in each):
                assert torch.equal(after[name], before.get(name, after[name] * 0))
        assert bits(replica.model[0]) != others
        replica.optimizer.check_agreement()
        if replica.optimizer.steps % replica.every == 0:
            found.append(bits(replica.model))
    one, other = comm.all_gather_object(found)
    assert one == other != []


@each_setting
def test_all_ranks_states_go_to_another_number_of_ranks(settings: dict[str, Any]) -> None:
    def before(comm: Communicator) -> Any:
        replica = Replica(comm, **settings)
        replica.train(5)
        return gather_state_dict(replica.optimizer), undelivered(replica)

    ended = run(4, before)
    whole = saved(ended[0][0])
    mean = {name: sum(each[1][name] for each in ended) / 4 for name in ended[0][1]}

    def after(comm: Communicator) -> Any:
        replica = Replica(comm, **settings)
        scatter_state_dict(replica.optimizer, whole if comm.rank == 0 else None)
        found = undelivered(replica)
        replica.train(2)
        replica.optimizer.check_agreement()
        return found, replica.optimizer.steps

    found = run(2, after)
    for name, expected in mean.items():
        now = (found[0][0][name] + found[1][0][name]) / 2
        torch.testing.assert_close(now, expected, rtol=1e-4, atol=1e-5)
    assert [steps for _, steps in found] == [7, 7]


@on_ranks(2)
def test_states_that_do_not_fit_are_refused_on_all_ranks(comm: Communicator) -> None:
    replica = Replica(comm)
    early = state_of(replica)
    replica.train(5)
    good = state_of(replica)
    other = Replica(comm, model=torch.nn.Linear(3, 3))
    other.optimizer.step()
    states: list[Any] = [
        other.optimizer.state_dict() if comm.rank else good,
        torch.optim.AdamW(small().parameters()).state_dict(),
        {**good, "rank": 1 - comm.rank},
        {**good, "param_groups": [{"params": [0, 1]}, {"params": [2, 3]}]},
        {**good, "state": {0: {"exp_avg": torch.zeros(3)}}},
        {**good, "feedback": {"0.weight": {"residual": torch.zeros(3)}}},
        early if comm.rank else good,  # last, for it fits the rank
    ]
    texts = []
    for each in states:
        with pytest.raises(InvalidArgument) as raised:
            replica.optimizer.load_state_dict(each)
        texts.append(str(raised.value))
        if each is not states[-1]:
            assert_same(state_of(replica), good)
    replica.optimizer.load_state_dict(good)
    replica.train(1)
    expected = ("of [2] param", "version is None", "this is rank", "of [2, 2] param")
    for text, part in zip(texts, (*expected, "shape (3,)", "3 elements", "steps="), strict=True):
        assert part in text


@each_setting
def test_survivors_of_a_lost_rank_go_on(settings: dict[str, Any]) -> None:
    """Rank 2 leaves in the fifth step; the others' state is that of before, and they go on."""

    def body(comm: Communicator) -> Any:
        replica = Replica(comm, **settings)
        replica.train(4)
        replica.optimizer.check_agreement()
        before = bits(replica.model)
        replica.backward()
        if comm.rank == 2:
            comm.abort("leaves")
            return None
        with pytest.raises(gradwire.Aborted) as raised:
            replica.optimizer.step()
        assert raised.value.peer == 2
        assert bits(replica.model) == before
        assert replica.optimizer.steps == 4
        replica.optimizer.after_shrink(replica.optimizer.communicator.shrink(timeout=5))
        replica.step_number = 5
        found = replica.train(3)
        replica.optimizer.check_agreement()
        return found

    one, other, _ = run(3, body)
    assert one == other != []


def test_survivors_take_over_a_step_that_some_have_made() -> None:
    """Rank 0 aborts after a step of which the other has not got the result; own momenta stay."""

    def body(comm: Communicator) -> Any:
        replica = Replica(comm, warm_up=1, every=9)
        replica.train(3)
        if comm.rank == 0:
            with torch.no_grad():
                replica.model[0].weight.add_(1)
            replica.optimizer.steps += 1
            comm.abort("a failure")
        momentum = replica.optimizer.state[replica.model[0].weight]["own_avg"].clone()
        with pytest.raises(gradwire.Aborted):
            replica.train(1)
        replica.optimizer.after_shrink(comm.shrink(timeout=LIMIT))
        assert torch.equal(replica.optimizer.state[replica.model[0].weight]["own_avg"], momentum)
        replica.optimizer.check_agreement()
        return replica.optimizer.steps, bits(replica.model)

    one, other = run(2, body)
    assert one == other
    assert one[0] == 4


def test_survivors_take_over_an_exchange_that_ended_steps_alone() -> None:
    """Rank 0 aborts after a step that exchanged; on the other, momenta of its own end, too."""

    def body(comm: Communicator) -> Any:
        replica = Replica(comm, warm_up=1, every=2)
        optimizer = replica.optimizer
        replica.train(3)
        assert all("own_avg" in each for each in optimizer.state.values())
        if comm.rank == 0:
            with torch.no_grad():
                for _, each, group in optimizer._trained():
                    optimizer._move(each, optimizer.state[each]["own_avg"], group)
            optimizer.steps += 1
            comm.abort("a failure")
        with pytest.raises(gradwire.Aborted):
            replica.train(1)
        optimizer.after_shrink(comm.shrink(timeout=LIMIT))
        optimizer.check_agreement()
        assert not any("own_avg" in each for each in optimizer.state.values())
        assert optimizer.steps == 4
        return bits(replica.model), replica.train(2)

    one, other = run(2, body)
    assert one == other


def test_an_error_of_one_rank_alone_ends_the_others_step() -> None:
    def body(comm: Communicator) -> str:
        replica = Replica(comm)
        replica.train(1)

        def fail() -> torch.Tensor:
            raise RuntimeError("in the closure")

        replica.backward()
        if comm.rank == 1:
            replica.optimizer._step_with = lambda _: fail()
            with pytest.raises(RuntimeError, match="in the closure"):
                replica.optimizer.step()
            return ""
        with pytest.raises(gradwire.Aborted) as raised:
            replica.optimizer.step()
        return str(raised.value)

    assert "RuntimeError in OneBitAdam.step()" in run(2, body)[0]


@on_ranks(2)
def test_a_failure_between_exchange_and_step_leaves_residuals_as_they_were(
    comm: Communicator,
) -> None:
    replica = Replica(comm, warm_up_codec="onebit", clip_norm=0.1)
    replica.train(2)
    before = bits(replica.model), state_of(replica)
    replica.backward()
    if comm.rank == 1:
        comm.broadcast = lambda _: 1 / 0
        with pytest.raises(ZeroDivisionError):
            replica.optimizer.step()
        assert bits(replica.model) == before[0]
        assert_same(state_of(replica), before[1])
    else:
        with contextlib.suppress(gradwire.Aborted):  # rank 0 may have sent its norm in time
            replica.optimizer.step()


def test_a_copy_says_that_it_has_no_connections() -> None:
    def body(comm: Communicator) -> str:
        replica = Replica(comm)
        replica.train(1)
        again = copy.deepcopy(replica.optimizer)
        assert isinstance(again.param_groups[0]["params"][0], Parameter)
        with pytest.raises(InvalidArgument) as raised:
            again.step()
        return f"{raised.value} {again!r:.10}"

    assert "without the original's connections" in run(1, body)[0]


@each_setting
@on_ranks(3)
def test_all_ranks_stop_after_the_same_step(comm: Communicator, settings: dict[str, Any]) -> None:
    replica, found = Replica(comm, **settings), []
    for step in range(8):
        if comm.rank == 1 and step == 2:
            comm.request_stop()
        replica.train(1)
        found.append(replica.optimizer.should_stop())
    answers = comm.all_gather_object(found)
    assert answers == [answers[0]] * 3
    assert answers[0][:2] == [False, False]
    assert answers[0][-1]
