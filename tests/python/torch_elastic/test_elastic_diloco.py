"""elastic.DiLoCo: rounds go on without who is late, and its steps count in the next one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import ErrorFeedback, InvalidArgument, TransportError, serve
from gradwire.torch import Compression, Stages, elastic
from gradwire.torch.elastic import diloco
from local_training import batch, bits, small, weights
from ranks import LIMIT
from torch.nn.functional import mse_loss

from bench.local_sgd.ranks import Plan, Team, joined, network

LONG = 1000.0  # seconds: a grace time that is longer than any test


@pytest.fixture(autouse=True)
def _no_launcher(bare_environment: None) -> None:
    """No variable of a launcher: every test has a store of its own."""


NEVER = 10**6  # steps: a rank pushes when a test says so


class Rank:
    """One rank's model, inner optimizer and DiLoCo; a test makes the steps of several in turn."""

    def __init__(self, store: str, number: int, seed: int = 0, **options: Any) -> None:
        self.number, self.made = number, 0
        self.model = small()
        with torch.no_grad():
            for each in self.model.parameters():
                each.add_(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        options = {"every": NEVER, "lr": 1.0, "momentum": 0.0, "grace": LONG, **options}
        self.outer = elastic.DiLoCo(
            self.model, self.optimizer, store=store, replica=f"rank {number}", timeout=30, **options
        )

    def inner(self, steps: int = 1) -> None:
        inner(self.model, self.optimizer, self.number, range(self.made, self.made + steps))
        self.made += steps

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.inner()
            self.outer.step()

    def push(self, steps: int = 1, weight: float = 1.0) -> None:
        """Makes inner steps, and pushes them with a weight, when the push before has arrived."""
        self.inner(steps)
        self.outer._settle(wait=True)
        self.outer.every = 1
        self.outer.step(weight)
        self.outer.every = NEVER
        assert self.outer._has_pushed

    def take(self) -> None:
        """Goes on until common values come; the steps change nothing, and weigh next to nothing."""
        deadline = time.monotonic() + LIMIT
        while not self.outer.step(1e-20):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def inner(model: Any, optimizer: Any, number: int, steps: range) -> None:
    for step in steps:
        x, y = batch(step, number)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()


Make = Callable[..., Rank]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes ranks of one service of two shards."""
    with ExitStack() as opened:
        server = opened.enter_context(serve.Server(2))

        def made(number: int, **options: Any) -> Rank:
            rank = Rank(server.store, number, **options)
            opened.callback(rank.outer.close)
            return rank

        yield made


def mean_of(*ranks: Rank, by: list[float] | None = None) -> torch.Tensor:
    """The mean of the ranks' parameters."""
    by = by or [1.0] * len(ranks)
    parts = [weight * weights(each.model) for weight, each in zip(by, ranks, strict=True)]
    return sum(parts[1:], parts[0]) / sum(by)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_all_begin_with_the_first_ones_values(make: Make) -> None:
    first, other = make(0), make(1, seed=1)
    assert first.outer.server.first
    assert not other.outer.server.first
    assert bits(first.model) == bits(other.model) == bits(small())


def test_a_rank_alone_trains_as_its_inner_optimizer(make: Make) -> None:
    rank, model = make(0, every=3), small()
    inner(model, torch.optim.SGD(model.parameters(), 0.1), 0, range(10))
    rank.step(10)
    assert_close(weights(rank.model), weights(model))
    rank.outer.finish()
    assert_close(weights(rank.model), weights(model))
    assert rank.outer.rounds >= 1


def test_a_push_goes_out_after_every_steps(make: Make) -> None:
    rank = make(0, every=3)
    rank.step(2)
    assert not rank.outer._has_pushed
    rank.step()
    assert rank.outer._has_pushed


def test_a_round_is_the_mean_by_weight(make: Make) -> None:
    ranks, by = [make(number) for number in range(3)], [1.0, 2.0, 5.0]
    for each in ranks:
        each.inner(2)
    wanted = mean_of(*ranks, by=by)
    for each, weight in zip(ranks, by, strict=True):
        each.push(0, weight)
    for each in ranks:
        each.take()
        assert_close(weights(each.model), wanted)
    assert len({bits(each.model) for each in ranks}) == 1
    assert [each.outer.rounds for each in ranks] == [1, 1, 1]


def test_what_is_learnt_while_a_round_ends_is_not_lost(make: Make) -> None:
    one, other = make(0), make(1)
    one.push()
    other.push()
    common, before = mean_of(one, other), weights(one.model)
    one.step()
    learnt = weights(one.model) - before
    one.take()
    assert_close(weights(one.model), common + learnt)
    other.take()
    assert_close(weights(other.model), common)
    one.push(0, 1e-20)
    other.push(0, 1e-20)
    for each in (one, other):
        each.take()
        assert_close(weights(each.model), common + learnt)


def test_a_late_rank_counts_in_the_next_round(make: Make) -> None:
    one, two, late = (make(number, quorum=2, grace=0.0) for number in range(3))
    late.step()
    learnt = weights(late.model) - weights(small())
    for rounds in range(1, 4):
        one.push()
        two.push()
        common = mean_of(one, two)
        for each in (one, two):
            each.take()
            assert_close(weights(each.model), common)
            assert each.outer.rounds == rounds
    late.take()  # pushes its step, and takes the others' values
    late.outer._settle(wait=True)
    assert_close(weights(late.model), common)
    one.push(0, 1.0)
    two.push(0, 1.0)
    for each in (one, late):
        each.take()
        assert_close(weights(each.model), common + learnt / 3)
    assert late.outer.server.stats()[0]["staleness"][3] == 1


def test_a_quorum_is_awaited(make: Make) -> None:
    one, two, _absent = (make(number, quorum=2, grace=0.0) for number in range(3))
    one.push()
    one.outer._settle(wait=True)
    assert min(one.outer._versions_now()) == 0
    two.push()
    one.take()
    assert one.outer.rounds == 1


def test_who_leaves_is_not_waited_for(make: Make) -> None:
    one, other = make(0), make(1)
    one.push()
    other.outer.close()
    one.take()
    assert one.outer.rounds == 1


def test_a_joiner_is_in_within_one_round(make: Make) -> None:
    one = make(0)
    one.push()
    one.take()
    joiner = make(1, seed=1)
    assert_close(weights(joiner.model), weights(one.model))
    joiner.step()
    learnt = weights(joiner.model) - weights(one.model)
    one.push()
    one.take()  # the end of a round that did not wait for the joiner
    joiner.take()  # which pushes its step
    joiner.outer._settle(wait=True)
    common = weights(one.model)
    assert_close(weights(joiner.model), common)
    one.push(0, 1.0)
    joiner.push(0, 1.0)  # in time, from now on
    for each in (one, joiner):
        each.take()
        assert each.outer.rounds == 3
        assert_close(weights(each.model), common + learnt / 3)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_compressed_rounds_end_with_the_same_bits(make: Make, codec: str) -> None:
    compression = Compression(codec, rules=[("*.bias", "none")])
    ranks = [make(number, compression=compression, pull_codec=codec) for number in range(2)]
    for _ in range(4):
        wanted = mean_of(*ranks)
        for each in ranks:
            each.push()
        wanted = mean_of(*ranks)
        for each in ranks:
            each.take()
    assert bits(ranks[0].model) == bits(ranks[1].model)
    torch.testing.assert_close(weights(ranks[0].model), wanted, rtol=0, atol=0.02)


def test_what_a_push_loses_goes_with_the_next_one_of_any_weight(make: Make) -> None:
    """But with none by which a rank only ends the round: there it would count for nothing."""
    rank = make(0, compression="int8")
    kept = rank.outer._feedback
    assert isinstance(kept, ErrorFeedback)
    rank.push()
    rank.outer._settle(wait=True)
    before = {name: kept.residual(name) for name in list(kept.keys())}
    assert any(each.any() for each in before.values())
    rank.push(0, diloco._NOTHING)
    rank.outer._settle(wait=True)
    assert all((kept.residual(name) == each).all() for name, each in before.items())


def test_small_parameters_travel_uncompressed(make: Make) -> None:
    rank = make(0, compression=Compression("onebit", min_elements=100))
    model = small()
    inner(model, torch.optim.SGD(model.parameters(), 0.1), 0, range(1))
    rank.push()
    rank.take()
    wanted = dict(model.named_parameters())
    for name, each in rank.model.named_parameters():
        is_close = torch.allclose(each, wanted[name], rtol=0, atol=1e-6)
        assert is_close == name.endswith("bias")


def test_nan_ends_with_the_parameters_of_before(make: Make) -> None:
    rank = make(0)
    rank.push()
    rank.take()
    before = bits(rank.model)
    rank.step()
    rank.outer.every = 1
    with torch.no_grad():
        rank.model[0].weight[0, 0] = math.nan  # type: ignore[index]
    with pytest.raises(InvalidArgument, match=r"'0.weight' had NaN or Inf"):
        rank.outer.step()
    assert bits(rank.model) == before
    rank.outer.every = NEVER
    rank.push()
    rank.take()
    assert rank.outer.rounds == 2


@pytest.mark.usefixtures("job_secret")
def test_training_goes_on_while_a_server_is_away(tmp_path: Path) -> None:
    server = serve.Server(1, snapshot=tmp_path, store="tcp://127.0.0.1:0")
    store = server.store
    rank = Rank(store, 0, every=2, reconnect=30)
    rank.step(4)
    rank.outer.finish()
    known = weights(rank.model)
    server.stop()
    rank.step(5)
    learnt = weights(rank.model) - known
    with serve.Server(1, snapshot=tmp_path, store=store):
        rank.outer.finish()
        assert_close(weights(rank.model), known + learnt)
        rank.outer.close()


def test_a_server_that_ended_is_named(make: Make) -> None:
    server = serve.Server(1)
    rank = Rank(server.store, 0, every=2)
    server.stop()
    with pytest.raises(TransportError, match="shard 0"):
        rank.step(10_000)
    rank.outer.close()


def test_wrong_arguments_are_named(make: Make) -> None:
    rank = make(0)
    for wrong in (0, -1.0, 1e-30, 1e30, math.nan, math.inf, "3"):
        with pytest.raises(InvalidArgument, match="weight"):
            rank.outer.step(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="every"):
        make(1, every=0)
    with pytest.raises(InvalidArgument, match="quorum"):
        make(1, quorum=0)
    with pytest.raises(InvalidArgument, match="grace"):
        make(1, grace=-1.0)
    with pytest.raises(InvalidArgument, match="no Stages"):
        make(1, compression=Stages((0, "none"), (5, "int8")))
    with pytest.raises(InvalidArgument, match=r"decay=0\.9"):
        make(1, compression=Compression("onebit", decay=0.9))
    with pytest.raises(InvalidArgument, match="rule 'rounds"):
        make(1, every=2, momentum=0.5)
    model = small().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InvalidArgument, match="float32"):
        elastic.DiLoCo(model, optimizer)


def test_killed_stopped_and_new_ranks(tmp_path: Path) -> None:
    plan = Plan(small=True, every=5, step_seconds=0.002, grace=0.02)

    def go_on(*numbers: int, steps: int = 30) -> None:
        goals = {number: len(team.times(number)) + steps for number in numbers}
        deadline = time.monotonic() + LIMIT
        while any(len(team.times(number)) < goal for number, goal in goals.items()):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def await_round(version: int) -> None:
        deadline = time.monotonic() + LIMIT
        while server.stats()[0]["version"] < version:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with serve.Server(1) as server, Team(plan, server.store, tmp_path) as team:
        for number in range(3):
            team.start(number)
        go_on(0, 1, 2, steps=10)
        team.stop(1)
        rounds = server.stats()[0]["version"]
        go_on(0, 2)  # without the one that is stopped
        await_round(rounds + 4)
        team.kill(2)
        go_on(0)  # and the one that is killed
        team.start(2)
        team.start(3)
        go_on(0, 2, 3)  # with one that comes back, and one that joins
        team.resume(1)
        go_on(0, 1, 2, 3)
        team.finish(LIMIT)
        assert len(server.stats()[0]["gone"]) == 1
        ends = []
        for seed in (1, 2):
            model = network(replace(plan, seed=seed), 8)
            with closing(joined(plan, model, server.store, f"watcher {seed}")):
                ends.append(bits(model))
        assert ends[0] == ends[1]
