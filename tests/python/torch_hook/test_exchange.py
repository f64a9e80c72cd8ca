"""The engine of all trainers: a step's reductions count whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import Communicator, ErrorFeedback, TransportError
from gradwire.torch.exchange.compression import Compression
from gradwire.torch.exchange.engine import Averages, Exchange
from gradwire.torch.exchange.gradient_scale import GradientScale
from gradwire.torch.exchange.residual_state import ResidualState
from gradwire.torch.exchange.rules import Bucket, Rules, Stages
from gradwire.torch.optimizers.warm_up_rules import WarmUpRules
from ranks import on_ranks, run

SHAPES = {"weight": (40, 50), "bias": (40,)}


def exchange(comm: Communicator, rules: Rules, feedback: ErrorFeedback | None = None) -> Exchange:
    names = {torch.empty(shape): name for name, shape in SHAPES.items()}
    return Exchange(comm, ResidualState(names, comm.size, rules, feedback))


def gradients(comm: Communicator, step: int, dtype: torch.dtype = torch.float32) -> Bucket:
    """One step's gradients of a rank."""
    drawn = torch.Generator().manual_seed(10 * step + comm.rank)
    parts = [torch.randn(shape, generator=drawn).to(dtype) for shape in SHAPES.values()]
    return Bucket(parts, list(SHAPES), parts)


def averaged(over: Exchange, step: int, keep: bool = True) -> list[torch.Tensor]:
    bucket = gradients(over.communicator, step)
    over.open(step, GradientScale())
    over.start(bucket)
    over.wait()
    assert over.end(keep) == keep
    return list(bucket.gradients)


def test_a_step_that_broke_off_leaves_no_trace() -> None:
    """The next step has the bits that it would have had without it."""

    def body(comm: Communicator, broken: bool) -> Any:
        feedback = ErrorFeedback()
        over = exchange(comm, Rules("onebit"), feedback)
        averaged(over, 0)
        if broken:
            over.open(1, GradientScale())
            over.start(gradients(comm, 7))  # nobody waits, and nobody ends it
        found = averaged(over, 1)
        return found, {name: feedback.residual(name).tolist() for name in SHAPES}

    for whole, broken in zip(run(2, body, False), run(2, body, True), strict=True):
        assert all(map(torch.equal, whole[0], broken[0]))
        assert whole[1] == broken[1]


@on_ranks(2)
def test_what_averages_do_not_deliver_stays_in_residuals(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    over = exchange(comm, Rules("onebit"), feedback)
    given = [gradients(comm, step).gradients[0].double() for step in range(3)]
    delivered = [averaged(over, step)[0].double() for step in range(3)]
    kept = torch.from_numpy(feedback.residual("weight")).double().view(SHAPES["weight"])
    found = comm.all_gather_object((sum(given), sum(delivered), kept))
    given, kept = (sum(each[i] for each in found) / 2 for i in (0, 2))
    torch.testing.assert_close(given, found[0][1] + kept, rtol=0, atol=1e-5)


@on_ranks(2)
def test_a_step_that_is_not_kept_changes_no_residual(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    over = exchange(comm, Rules("onebit"), feedback)
    averaged(over, 0)
    before = feedback.residual("weight")
    averaged(over, 1, keep=False)
    assert (feedback.residual("weight") == before).all()
    assert not over.end(True)  # there is no step any more
    assert (feedback.residual("weight") == before).all()


class Failing:
    """A work that fails, and notes that somebody has waited for it."""

    def __init__(self, waited: list[str], name: str) -> None:
        self._waited, self._name = waited, name

    def wait(self) -> None:
        self._waited.append(self._name)
        raise TransportError(self._name)


@on_ranks(1)
def test_all_works_are_waited_for_and_the_first_error_is_raised(comm: Communicator) -> None:
    over, waited = exchange(comm, Rules("none")), list[str]()
    over.add(Failing(waited, "one"))
    over.add(Failing(waited, "other"))
    with pytest.raises(TransportError, match="one"):
        over.wait()
    assert waited == ["one", "other"]
    over.wait()  # for nothing


@on_ranks(2)
def test_16_bit_averages_come_while_the_rest_travels(comm: Communicator) -> None:
    """Waiting for what is rounded does not wait for other works."""
    over, waited = exchange(comm, Rules("onebit"), ErrorFeedback()), list[str]()
    bucket = gradients(comm, 0, torch.bfloat16)
    own = bucket.gradients[0].clone()
    over.open(0, GradientScale())
    over.start(bucket)
    over.add(Failing(waited, "other"))
    over.wait_to_round()
    assert not waited
    assert not torch.equal(bucket.gradients[0], own)
    assert over.end(True)
    assert waited == ["other"]


@on_ranks(2)
def test_averages_with_nan_on_one_rank_change_no_residual_on_any(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    over = exchange(comm, Rules("onebit"), feedback)
    tensors = dict(zip(SHAPES, gradients(comm, 0).gradients, strict=True))
    if comm.rank == 1:
        tensors["bias"][3] = torch.nan
    averages = Averages(tensors, 0.5, over)
    averages.start(0)
    averages.wait()
    averages.wait()  # again does nothing
    assert not averages.finite
    assert sum(feedback.residual(name).size for name in SHAPES) == 0


def test_groups_of_a_codec_follow_stages_and_warm_ups() -> None:
    parts = [torch.empty(shape) for shape in SHAPES.values()]
    staged = Rules(Stages((0, "none"), (2, "onebit")))
    assert [staged.groups(list(SHAPES), parts, step)[0][0] for step in (1, 2)] == ["none", "onebit"]
    warming = WarmUpRules(Compression("onebit", min_elements=0), "fp16")
    warming.warming = frozenset(["bias"])
    assert warming.groups(list(SHAPES), parts, 0) == [("onebit", [0]), ("fp16", [1])]
    warming.warming = frozenset()
    assert warming.groups(list(SHAPES), parts, 1) == [("onebit", [0, 1])]
