"""Trainings whose ranks die and join: all that train have the same bits, and nothing is left."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradwire
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from census import census, growth
from elastic_team import Plan, Team
from gradwire.torch import elastic
from gradwire.torch._ranks.group import communicator_of
from gradwire.torch._ranks.ranks import Ranks
from gradwire.torch.elastic.session import _communicator_of
from torch import nn
from trainer_options import grouped

DATA = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))


def run(ranks: int, body: Callable[..., Any], *args: Any, dying: tuple[int, ...] = ()) -> list[Any]:
    """The result of `body(communicator, *args)` on each rank."""
    return torch_ranks.run(ranks, _connected, body, *args, dying=dying)


def _connected(body: Callable[..., Any], *args: Any) -> Any:
    return body(communicator_of(dist.group.WORLD, 30), *args)


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, elastic.Session]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sampler = elastic.Sampler(options.pop("samples", 96), options.pop("batch", 8))
    return model, optimizer, elastic.session(model, optimizer, sampler, **grouped(**options))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(DATA[batch % 96]) - DATA[batch % 96, :4]).square().mean()


Values = dict[str, "np.ndarray[Any, Any]"]  # of a model; tensors would travel by shared memory


def values_of(model: nn.Module) -> Values:
    return {name: each.numpy().copy() for name, each in model.state_dict().items()}


def trained(comm: gradwire.Communicator, options: dict[str, Any]) -> Values:
    model, optimizer, session = made(ranks=comm, **options)
    with session as s:
        for batch in s:
            s.backward(loss_of(model, batch))
            if s.commit():
                optimizer.step()
    s.communicator.close()
    return values_of(model)


def trained_with_scales(comm: gradwire.Communicator, interval: int) -> Values:
    scaler = torch.amp.GradScaler("cpu", 16.0, growth_interval=interval)
    wish: dict[str, Any] = {"codec": "onebit", "warm_up": 0, "min_elements": 1}
    model, optimizer, session = made(ranks=comm, carry=[scaler], **wish)
    with session as s:
        for batch in s:
            s.backward(scaler.scale(loss_of(model, batch)))
            if s.commit():
                scaler.step(optimizer)
                scaler.update()
    s.communicator.close()
    return values_of(model)


def test_residuals_follow_a_carried_loss_scale() -> None:
    """Powers of two change no bit."""
    (constant, _), (growing, _) = (run(2, trained_with_scales, each) for each in (1000, 1))
    assert same(constant, growing)


def same(one: Values, other: Values) -> bool:
    return all(np.array_equal(each, other[name]) for name, each in one.items())


def test_two_ranks_train_as_one_with_all_samples() -> None:
    two = run(2, trained, {})
    assert same(*two)
    alone = run(1, trained, {"batch": 16, "min_ranks": 1})[0]
    for name, each in alone.items():
        np.testing.assert_allclose(two[0][name], each, rtol=1e-4, atol=1e-6)


def test_small_buckets_and_codecs_train() -> None:
    plain = run(2, trained, {"bucket_bytes": 100})
    for codec in ("fp16", "onebit"):
        options = {"codec": codec, "warm_up": 0 if codec == "onebit" else None, "min_elements": 1}
        one, two = run(2, trained, options)
        assert same(one, two)
        assert not same(one, plain[0])


def trained_and_lost(comm: gradwire.Communicator, way: str) -> tuple[Any, int, float]:
    rank = comm.rank

    def die(s: elastic.Session) -> None:
        if rank == 1 and s.steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer, session = made(ranks=comm, global_batch=way, verify=True, batch=4, wait=0)
    with session as s:
        for batch in s:
            die(s)
            s.backward(loss_of(model, batch))
            if s.commit():
                optimizer.step()
    s.communicator.close()
    return values_of(model), s.steps, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("way", "steps", "rate"), [("constant", 8, 0.1), ("proportional", 11, 0.2 / 3)]
)
def test_survivors_take_all_samples(way: str, steps: int, rate: float) -> None:
    ended = run(3, trained_and_lost, way, dying=(1,))
    (one, *numbers), (other, *_) = ended[0], ended[2]
    assert same(one, other)
    assert numbers == [steps, pytest.approx(rate)]


def rate_halved_between_changes(comm: gradwire.Communicator) -> float:
    """The rate at the end; the program halves it after rank 1's death and before a later change."""
    options = {"wait": 0, "min_ranks": 1, "global_batch": "proportional"}
    model, optimizer, session = made(ranks=comm, **options)
    with session as s:
        for batch in s:
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            s.backward(loss_of(model, batch))
            if s.commit():
                optimizer.param_groups[0]["lr"] /= 2
                s._reform()
                s._bring_together()
                break
    s.communicator.close()
    return float(optimizer.param_groups[0]["lr"])


def test_a_change_of_ranks_keeps_the_rates_of_the_program() -> None:
    rate, _ = run(2, rate_halved_between_changes, dying=(1,))
    assert rate == pytest.approx(0.1 / 2 / 2)


@pytest.mark.parametrize("plan", [Plan(codec="onebit"), Plan(global_batch="proportional")], ids=str)
def test_ranks_die_and_join(plan: Plan) -> None:
    with Team(3, plan) as team:
        assert team.wait(lambda: team.steps >= 3), team
        for _ in range(2):
            joiner = team.start(joins=True)
            assert team.wait(lambda joiner=joiner: joiner.steps > 0), team
            victim = team.members[0]  # also the one that joiners ask
            team.kill(victim)
            goal = team.steps + 2
            assert team.wait(lambda goal=goal: all(e.steps > goal for e in team.alive)), team
            assert all(each.size == 3 for each in team.alive)
            team.forget_dead()
        assert not team.problems


def test_too_few_end_with_an_error() -> None:
    with Team(2, Plan(min_ranks=2, wait=0.1)) as team:
        assert team.wait(lambda: team.steps >= 1), team
        team.kill(team.members[1])
        assert team.wait(lambda: team.members[0].dead), team
        assert "RendezvousError" in team.members[0].ended


@pytest.mark.parametrize("victims", [(0, 1, 2), (0, 1)], ids=str)
def test_a_minority_ends_with_an_error(victims: tuple[int, ...]) -> None:
    """By default: the others might train on behind a network that is cut."""
    with Team(4, Plan(min_ranks=None)) as team:
        assert team.wait(lambda: team.steps >= 1), team
        for each in victims:
            team.kill(team.members[each])
        assert team.wait(lambda: not team.alive), team
        for each in team.members:
            if each.number not in victims:
                assert "RendezvousError" in each.ended, team
                assert "no majority; pass min_ranks=" in each.ended, team


def test_a_majority_goes_on_at_once() -> None:
    with Team(3, Plan(min_ranks=None, wait=0)) as team:
        assert team.wait(lambda: team.steps >= 1), team
        team.kill(team.members[0])
        goal = team.steps + 3
        assert team.wait(lambda: all(e.steps > goal and e.size == 2 for e in team.alive)), team
        assert not team.problems


def test_a_training_waits_for_enough_ranks_to_begin() -> None:
    with Team(1, Plan(min_ranks=2, steps=3)) as team:
        joiner = team.start(joins=True)
        assert team.wait(lambda: not team.alive), team
        assert [(each.steps, each.size) for each in team.members] == [(3, 2), (3, 2)], team
        assert joiner.rank == 1
        assert not team.problems


def test_a_training_that_cannot_begin_ends_with_an_error() -> None:
    with Team(1, Plan(min_ranks=2, wait=0.1)) as team:
        assert team.wait(lambda: not team.alive), team
        assert "RendezvousError" in team.members[0].ended
        assert "min_ranks=2" in team.members[0].ended
        assert not team.steps


def test_one_rank_alone_begins_at_once() -> None:
    alone = gradwire.init(rank=0, ranks=1, store="unix://none")
    with made(ranks=alone)[2] as s:
        assert s.changes == 0
    alone.close()


def test_the_timeout_of_ranks_is_that_of_the_communicator(bare_environment: None) -> None:
    with made(ranks=Ranks(timeout=7))[2] as s:
        assert s.communicator._timeout == 7


def test_a_session_that_cannot_begin_leaves_the_model_as_it_was() -> None:
    alone = gradwire.init(rank=0, ranks=1, store="unix://none")
    model, _, session = made(ranks=alone, min_ranks=2, wait=0)
    with pytest.raises(gradwire.RendezvousError), session:
        pass
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


def changed_behind(comm: gradwire.Communicator, victim: int) -> tuple[list[str], Values]:
    """What is logged of a change before which a rank no longer has the values of the others."""
    told: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = told.append  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    model, _, session = made(ranks=comm, verify=True)
    with session as s:
        s._bring_together()
        if comm.rank == victim:
            nn.init.zeros_(next(model.parameters()))
        s._reform()
        s._bring_together()
    s.communicator.close()
    return [x for each in told if "differ" in (x := each.getMessage())], values_of(model)


@pytest.mark.parametrize(
    ("victim", "told"), [(1, ["ranks [1] differ from rank 0 in bits, and take its state"]), (2, [])]
)
def test_ranks_that_differ_are_named_and_mended(victim: int, told: list[str]) -> None:
    (first, one), (second, other) = run(2, changed_behind, victim)
    assert first == second == told
    assert same(one, other)


def test_the_last_ranks_of_a_communicator_have_joined_it() -> None:
    for rank in range(4):
        comm = mock.Mock(spec=gradwire.Communicator, rank=rank, size=4, joined=1)
        assert _communicator_of(Ranks(comm)) == (comm, rank == 3)


def left_after_changes(comm: gradwire.Communicator, changes: int) -> list[Any]:
    """Counts what there is after each change, in which all ranks stay."""
    found = []
    model, optimizer, session = made(ranks=comm, samples=1 << 20, codec="fp16")
    with session as s:
        for batch in s:
            s.backward(loss_of(model, batch))
            if s.commit():
                optimizer.step()
            if s.steps % 2 == 0:
                s._reform()
                gc.collect()
                hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
                found.append((census(), len(gc.get_objects()), hooks))
            if len(found) == changes:
                break
    s.communicator.close()
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())
    return found


@pytest.mark.parametrize("changes", [6, pytest.param(50, marks=pytest.mark.nightly)])
def test_nothing_is_left_of_changes(changes: int) -> None:
    for found in run(2, left_after_changes, changes):
        counts = [each for each, _, _ in found[2:]]
        assert growth([each.threads for each in counts]) < 1
        assert growth([each.descriptors.total() for each in counts]) < 1
        assert growth([each.mappings for each in counts]) < 1
        assert growth([objects for _, objects, _ in found[2:]]) < 5
        assert len({hooks for _, _, hooks in found}) == 1


def differing(comm: gradwire.Communicator) -> str:
    batch = 8 + comm.rank
    with pytest.raises(gradwire.Error) as raised:
        trained(comm, {"batch": batch, "wait": 0.1, "min_ranks": 2})
    return f"{type(raised.value).__name__}: {raised.value}"


def test_other_settings_are_refused() -> None:
    first, second = run(2, differing)
    assert first.startswith("RendezvousError")
    assert "batch differs: this rank's session has 9, the others' has 8" in second


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"global_batch": "large"}, "global_batch='large'"),
        ({"min_ranks": 0}, "min_ranks=0"),
        ({"wait": -1}, "wait=-1"),
        ({"carry": [3]}, "carry= has a int"),
        ({"compression": "auto"}, "choose a codec"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=text):
        made(**given)


def lose_gradients(
    session: elastic.Session, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    with session as s:
        s._reference = 2  # so that a step has two batches of this rank
        for batch in s:
            optimizer.zero_grad()
            s.backward(loss_of(model, batch))
            s.commit()


def test_gradients_that_zero_grad_has_lost_are_told() -> None:
    alone = gradwire.init(rank=0, ranks=1, store="unix://none")
    model, optimizer, session = made(ranks=alone, min_ranks=1)
    with pytest.raises(gradwire.InvalidArgument, match=r"leave zero_grad\(\) out"):
        lose_gradients(session, model, optimizer)


def forget_to_commit(session: elastic.Session, model: nn.Module) -> None:
    with session as s:
        for batch in s:
            s.backward(loss_of(model, batch))


def test_a_forgotten_commit_is_told() -> None:
    alone = gradwire.init(rank=0, ranks=1, store="unix://none")
    model, _, session = made(ranks=alone, min_ranks=1)
    with pytest.raises(gradwire.InvalidArgument, match="without commit"):
        forget_to_commit(session, model)
