"""Rounds: pace, fragments, and ranks that run out of data."""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import gradwire
import pytest
import torch
from gradwire import Communicator
from gradwire.torch.outer.outer import fragments_of
from gradwire.torch.outer.rounds import Round, Stopwatch, paced_steps
from local_training import Trainee, batch, bits, small, weights
from ranks import LIMIT, on_ranks, outcomes, run
from torch import nn
from torch.nn.functional import mse_loss


class Clock:
    """Seconds that a test counts."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Trainee):
    """A trainee whose inner steps take so many seconds."""

    def __init__(self, comm: Communicator, seconds: float, **settings: Any) -> None:
        self.clock, self.seconds = Clock(), seconds
        super().__init__(comm, clock=self.clock, **{"pace": True, **settings})

    def inner_step(self) -> None:
        super().inner_step()
        self.clock.now += self.seconds


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1, 1], [10, 10]),
        ([1, 5, 2.5, 1.2], [10, 2, 4, 8]),
        ([1, 1000], [10, 1]),
        ([0, 2, 4], [10, 10, 5]),
        ([0, 0], [10, 10]),
    ],
)
def test_steps_are_in_proportion_to_speed(seconds: list[float], expected: list[int]) -> None:
    assert paced_steps(10, seconds) == expected


def test_only_inner_steps_are_timed_and_one_long_pause_does_not_count() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    for inside, outside in ((2, 50), (2, 50), (300, 50), (3, 50), (2, 50)):
        watch.start()
        clock.now += inside
        watch.stop()
        clock.now += outside
    assert watch.median() == 2
    assert watch.median() == 2  # known, where no step was made since


@on_ranks(4)
def test_a_slow_rank_makes_fewer_steps_and_all_arrive_together(comm: Communicator) -> None:
    trainee = Timed(comm, [1, 1, 5, 2.5][comm.rank], every=10)
    seconds = []
    for _ in range(4):
        began = trainee.clock.now
        while not trainee.step():
            pass
        seconds.append(trainee.clock.now - began)
    found = comm.all_gather_object(
        (trainee.outer.pace, seconds, trainee.step_number, bits(trainee.model))
    )
    assert {each[0] for each in found} == {(10, 10, 2, 4)}
    assert [each[1] for each in found] == [
        [10] * 4,
        [10] * 4,
        [50, 10, 10, 10],
        [25, 10, 10, 10],
    ]
    assert [each[2] for each in found] == [40, 40, 16, 22]
    assert len({each[3] for each in found}) == 1


@pytest.mark.parametrize(
    ("fragments", "every", "delay"), [(1, 4, 0), (1, 4, 4), (2, 4, 0), (3, 7, 2), (4, 4, 1)]
)
@pytest.mark.parametrize("pace", [False, True])
@on_ranks(2)
def test_fragments_at_any_pace_end_in_the_same_bits(
    comm: Communicator, fragments: int, every: int, delay: int, pace: bool
) -> None:
    """Also of a rank that makes one step while the other makes `every`."""
    mix = 0.5 if delay else 0

    settings = {"fragments": fragments, "every": every, "delay": delay, "mix": mix}
    trainee = Timed(comm, [1, every][comm.rank], codec="onebit", pace=pace, **settings)
    while trainee.outer.rounds < 4:
        trainee.step()
    trainee.outer.finish()
    trainee.outer.check_agreement()
    (steps, one), (slow_steps, other) = comm.all_gather_object(
        (trainee.step_number, bits(trainee.model))
    )
    assert one == other
    assert slow_steps < steps / 2 if pace and every > 1 else slow_steps == steps


@on_ranks(2)
def test_a_fragment_is_exchanged_at_its_own_step(comm: Communicator) -> None:
    trainee = Trainee(comm, every=4, fragments=2, lr=1, momentum=0)
    found = []
    for _ in range(8):
        trainee.inner_step()
        mine = weights(trainee.model)
        trainee.outer.step()
        found.append((mine != weights(trainee.model)).int().unique_consecutive(return_counts=True))
    none, half = [(0, 524)], 33 * 8  # of the 40 rows of the first weight
    first, second = [(1, half), (0, 524 - half)], [(0, half), (1, 524 - half)]
    assert [list(zip(*map(torch.Tensor.tolist, each), strict=True)) for each in found] == [
        none,
        first,
        none,
        second,
    ] * 2


@on_ranks(2)
def test_a_delayed_average_is_that_of_the_parameters_that_were_sent(comm: Communicator) -> None:
    options = {"every": 3, "delay": 2, "mix": 0.25, "lr": 1, "momentum": 0}
    trainee = Trainee(comm, **options)
    assert not any(trainee.step() for _ in range(3))
    sent = weights(trainee.model)
    assert not trainee.step()
    trainee.inner_step()
    own = weights(trainee.model)
    assert trainee.outer.step()
    found = comm.all_gather_object((sent, own, weights(trainee.model)))
    mean = (found[0][0] + found[1][0]) / 2
    for _, own, after in found:
        torch.testing.assert_close(after, 0.75 * mean + 0.25 * own, rtol=0, atol=1e-6)


def simulated(
    ranks: int, steps: int, every: int, fragments: int, delay: int, mix: float
) -> list[torch.Tensor]:
    """The ranks' weights by Streaming DiLoCo's formulas, in float64, with one model after another.

    (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", sec. 2)
    """
    models = [small().double() for _ in range(ranks)]
    every_cut = [fragments_of(dict(model.named_parameters()), fragments) for model in models]
    own = [{name: each.real for part in cut for name, each in part.items()} for cut in every_cut]
    common = {name: each.clone() for name, each in own[0].items()}
    velocities = {name: torch.zeros_like(each) for name, each in common.items()}
    on_their_way: dict[int, dict[str, torch.Tensor]] = {}
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            x, y = batch(step - 1, rank)
            gradients = torch.autograd.grad(
                mse_loss(model(x.double()), y.double()), list(model.parameters())
            )
            with torch.no_grad():
                for each, gradient in zip(model.parameters(), gradients, strict=True):
                    each -= 0.1 * gradient
        if step % (every // fragments) == 0:
            part = every_cut[0][step // (every // fragments) % fragments - 1]
            arrived = on_their_way.pop(step, {})
            apply(arrived, common, velocities, own, mix)
            on_their_way[step + delay] = {
                name: sum(common[name] - its[name] for its in own) / ranks for name in part
            }
        apply(on_their_way.pop(step, {}), common, velocities, own, mix)
    return [weights(model) for model in models]


def apply(
    averages: dict[str, torch.Tensor],
    common: dict[str, torch.Tensor],
    velocities: dict[str, torch.Tensor],
    own: list[dict[str, torch.Tensor]],
    mix: float,
) -> None:
    for name, average in averages.items():
        velocities[name] = 0.9 * velocities[name] + average
        common[name] -= 0.7 * (average + 0.9 * velocities[name])
        for its in own:
            its[name].copy_(mix * its[name] + (1 - mix) * common[name])


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "mix"),
    [(3, 1, 0, 0), (3, 1, 2, 0.5), (6, 2, 1, 0), (6, 3, 2, 0.5), (1, 1, 1, 0.25)],
)
@on_ranks(2)
def test_rounds_follow_the_papers_formulas(
    comm: Communicator, every: int, fragments: int, delay: int, mix: float
) -> None:
    settings = {"every": every, "fragments": fragments, "delay": delay, "mix": mix}
    trainee = Trainee(comm, small().double(), **settings)
    trainee.train(14)
    expected = simulated(2, 14, every, fragments, delay, mix)
    for found, own in zip(comm.all_gather_object(weights(trainee.model)), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-12)


SHAPES = [(100, 3), (), (40,), (6, 2, 2), (0, 5), (4, 20), (3,), (96, 5)]  # 928 elements


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 200])
def test_fragments_are_rows_in_order_and_of_like_sizes(count: int) -> None:
    numbers = torch.arange(928.0).split([math.prod(shape) for shape in SHAPES])
    parameters = {
        str(i): nn.Parameter(each.view(shape))
        for i, (each, shape) in enumerate(zip(numbers, SHAPES, strict=True))
    }
    parts = fragments_of(parameters, count)
    assert len(parts) == count
    found = [torch.cat([each.real.flatten() for each in part.values()]) for part in parts]
    assert torch.equal(torch.cat(found), torch.arange(928.0))
    assert all(len(each) for each in found) or count == 200  # whose one part is parameter 4
    if count < 10:
        assert all(abs(len(each) - 928 / count) <= 20 for each in found)
    assert count > 1 or list(parts[0]) == list(parameters)


def test_a_cut_parameter_is_named_by_its_rows() -> None:
    part, other = fragments_of({"x": nn.Parameter(torch.zeros(5, 2))}, 2)
    assert [*part, *other] == ["x[0:2]", "x[2:5]"]


@on_ranks(2)
def test_rows_of_a_parameter_follow_its_rule(comm: Communicator) -> None:
    rules = [("0.weight", "none"), ("2.*", "none")]
    trainee = Trainee(comm, every=4, fragments=2, codec="onebit", rules=rules)
    trainee.train(4)
    feedback = trainee.outer.feedback
    assert feedback is not None
    kept = {name for name, _ in feedback.keys().items() if feedback.residual(name).any()}
    assert kept == {"0.bias"}


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (5, 2), (7, 7), (50, 4)])
def test_a_round_of_any_length_exchanges_every_fragment_once(every: int, fragments: int) -> None:
    for steps in range(1, every + 1):
        place = Round(every, fragments, delay=every // fragments)
        place.steps = place.next_steps = steps
        found = []
        for _ in range(steps):
            place.done += 1
            while place.is_due:
                found.append(place.fragment)
                assert place.delay <= steps
                place.end_exchange()
        assert found == list(range(fragments))
        assert place.done == 0


@on_ranks(3)
def test_ranks_that_run_out_of_data_wait_for_the_others(comm: Communicator) -> None:
    trainee = Trainee(comm, every=4, codec="onebit")
    trainee.train([3, 9, 21][comm.rank])
    trainee.outer.finish()
    first, rounds = bits(trainee.model), trainee.outer.rounds
    trainee.train([5, 4, 1][comm.rank])  # another epoch
    trainee.outer.finish()
    trainee.outer.finish()  # nothing to do
    found = comm.all_gather_object((first, rounds, bits(trainee.model)))
    assert found == [found[0]] * 3
    assert found[0][0] != found[0][2]


@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_any_speeds_and_any_data_end_alike(seed: int) -> None:
    source = random.Random(seed)
    ranks, fragments = source.randint(2, 4), source.randint(1, 4)
    every = source.randint(fragments, 12)
    settings: dict[str, Any] = {
        "every": every,
        "fragments": fragments,
        "delay": source.randint(0, every // fragments),
        "codec": source.choice(["none", "onebit", "topk:density=0.1"]),
    }
    epochs = [
        [(source.randint(0, 40), source.choice([0.3, 1, 5, 50])) for _ in range(2)]
        for _ in range(ranks)
    ]

    def body(comm: Communicator) -> list[tuple[bytes, int, Any]]:
        trainee = Timed(comm, 1, model=small(normalized=True), **settings)
        found = []
        for steps, trainee.seconds in epochs[comm.rank]:
            trainee.train(steps)
            trainee.outer.finish()
            trainee.outer.check_agreement()
            found.append((bits(trainee.model), trainee.outer.rounds, trainee.outer.pace))
        return found

    found = run(ranks, body)
    assert found == [found[0]] * ranks


@on_ranks(2)
def test_a_rank_without_steps_does_not_count_in_a_mean(comm: Communicator) -> None:
    trainee = Trainee(comm, every=4, lr=1, momentum=0)
    trainee.train(4 if comm.rank else 8)
    if comm.rank:
        trainee.outer.finish()
    for _ in range(3 * (comm.rank == 0)):  # alone
        trainee.step()
    own = weights(trainee.model)
    if comm.rank == 0:
        trainee.outer.finish()
    (own, after), (_, other) = comm.all_gather_object((own, weights(trainee.model)))
    torch.testing.assert_close(after, own, rtol=0, atol=1e-7)
    torch.testing.assert_close(after, other, rtol=0, atol=0)


def test_a_rank_that_does_not_come_is_named_by_a_timeout() -> None:
    over = threading.Event()

    def body(comm: Communicator) -> int:
        trainee = Trainee(comm, every=2)
        trainee.train(3 if comm.rank == 1 else 2)
        if comm.rank == 1:
            over.wait(LIMIT)
            return -1
        with pytest.raises(gradwire.Timeout) as raised:
            trainee.outer.finish()
        over.set()
        assert "rank 1" in str(raised.value)
        return raised.value.peer

    assert outcomes(2, body, timeout=1.0)[0].value == 1


@pytest.mark.parametrize(
    ("fragments", "delay", "pace"), [(1, 0, False), (1, 0, True), (2, 1, False), (2, 1, True)]
)
@on_ranks(3)
def test_all_ranks_stop_after_the_same_outer_step(
    comm: Communicator, fragments: int, delay: int, pace: bool
) -> None:
    setting = {"every": 4, "fragments": fragments, "delay": delay, "pace": pace}
    trainee = Timed(comm, seconds=1.0 + comm.rank, **setting)
    for step in range(100):
        if comm.rank == 1 and step == 5:
            comm.request_stop()
        trainee.step()
        if trainee.outer.should_stop():
            break
    saved = trainee.outer.state_dict()
    assert step < 50
    found = comm.all_gather_object((saved["steps"], saved["outer"]))
    assert [exchanges for exchanges, _ in found] == [found[0][0]] * 3
    for _, outer in found:
        assert all(torch.equal(outer[name], each) for name, each in found[0][1].items())
