"""The benchmark of local SGD: what its ranks compute, and what it reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.local_sgd import losses
from bench.local_sgd.losses import Exchange, StackedMuon, Training
from bench.local_sgd.losses_report import Outcome, Rows, Way, document, read
from bench.training.models.stacked import StackedModel

DENSE = Way("adamw", 0.004, 2, 4, 2)
SPARSE = Way("adamw", 0.004, 4, 4, 2, 1.0, 0.0, "topk:density=0.015625,values=2bit", 0.95)


def test_stacked_ranks_are_models_of_their_own() -> None:
    """Two ranks have the losses and gradients that one has with the windows of either."""
    x = torch.randint(0, 128, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    both, one = StackedModel(2, 8, 1, 8, seed=1), StackedModel(1, 8, 1, 8, seed=1)
    losses = both.losses(x[..., :-1], x[..., 1:])
    losses.sum().backward()
    for rank in range(2):
        own = one.losses(x[rank : rank + 1, :, :-1], x[rank : rank + 1, :, 1:])
        torch.testing.assert_close(own[0], losses[rank])
        gradients = torch.autograd.grad(own.sum(), list(one.parameters.values()))
        for found, wanted in zip(gradients, both.parameters.values(), strict=True):
            assert wanted.grad is not None
            torch.testing.assert_close(found[0], wanted.grad[rank], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", [DENSE, SPARSE._replace(decay=1.0), SPARSE])
def test_what_is_not_delivered_stays_and_decays(way: Way) -> None:
    exchange, given, moved = Exchange(way), torch.zeros(2000), torch.zeros(2000)
    for _ in range(3):
        every = torch.randn(way.ranks, 2000)
        given += every.sum(0)
        moved += exchange.average("w", every) * way.ranks
    kept = [each.residual("w") for each in exchange._feedback[: way.ranks]]
    left = sum((torch.from_numpy(each) for each in kept if len(each)), torch.zeros(2000))
    torch.testing.assert_close(moved + left, given, rtol=0, atol=1e-4)
    exchange.end_round()
    for before, feedback in zip(kept, exchange._feedback, strict=False):
        torch.testing.assert_close(feedback.residual("w"), before * way.decay)


@pytest.mark.parametrize("shape", [(3, 8, 16), (3, 16, 8)])
def test_muon_of_stacked_ranks_is_that_of_torch(shape: tuple[int, ...]) -> None:
    """Whose iteration is in bfloat16."""
    stacked = torch.nn.Parameter(torch.randn(shape))
    alone = [torch.nn.Parameter(each.detach().clone()) for each in stacked]
    one, other = StackedMuon([stacked]), torch.optim.Muon(alone, lr=0.02, momentum=0.95)
    one.param_groups[0]["lr"] = 0.02
    before = stacked.detach().clone()
    for _ in range(3):
        stacked.grad = torch.randn(shape)
        for rank, each in enumerate(alone):
            each.grad = stacked.grad[rank].clone()
        one.step()
        other.step()
    found = torch.stack([each.detach() for each in alone])
    torch.testing.assert_close(stacked.detach(), found, rtol=0, atol=2e-3)
    assert (stacked - before).abs().max() > 2e-2


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_a_round_ends_with_the_same_parameters_on_all_ranks(inner: str) -> None:
    training = Training(SPARSE._replace(inner=inner, steps=2), seed=1)
    outcome = training.run()
    for each in training.model.parameters.values():
        assert all(torch.equal(each[0], other) for other in each)
    assert (outcome.rounds, outcome.parameters) == (1, 69_360)
    assert 0 < outcome.bytes < 4 * outcome.parameters / 100
    assert 3 < outcome.loss < 6


def test_what_has_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    class Fake:
        def __init__(self, way: Way, seed: int) -> None:
            trained.append((way, seed))
            self.outcome = Outcome(way, seed, 2 + way.rate, 9, 9.0, 2)

        def run(self) -> Outcome:
            return self.outcome

    monkeypatch.setattr(losses, "Training", Fake)
    monkeypatch.setattr(sys, "argv", ["local_sgd", "--output", str(tmp_path / "found")])
    assert losses.main() == 0
    once = list(trained)
    assert len(set(once)) == len(once) == len(read(tmp_path / "found-runs.jsonl"))
    assert losses.main() == 0
    assert trained == once
    assert "missed" in (tmp_path / "found.md").read_text(encoding="utf-8")


def test_the_report_takes_the_best_way_and_says_what_is_missed() -> None:
    outcomes = [Outcome(Way("adamw", 0.008, 1, 9), seed, 2.0, 100, 0, 0) for seed in (1, 2)]
    for rate, loss in ((0.004, 2.2), (0.008, 2.1)):
        way = DENSE._replace(rate=rate, ranks=4, every=30)
        outcomes += [Outcome(way, seed, loss, 100, 400, 3) for seed in (1, 2)]
    outcomes.append(Outcome(SPARSE._replace(every=30), 1, 2.31, 100, 4, 3))
    rows = Rows(outcomes)
    assert rows.by_ranks()[-1] == "| DiLoCo, 4 ranks | 2.100 ± 0.000 | +5.0 ± 0.0 % | 0.008 | 0.9 |"
    assert rows.by_rounds()[-1] == "| 30 | 3 | 2.100 ± 0.000 | 2.310 (1 seed) | +10.0 % |"
    assert "+10.0 %, missed" in document(outcomes, "command")
