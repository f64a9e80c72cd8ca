"""Trials, of which benchmarks of optimizers and of large batches consist, and that they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradwire
import pytest
import small_images
import torch
import torch_ranks

from bench.training import methods
from bench.training.models.transformers import LanguageModel, VisionTransformer
from bench.training.train_runs import append
from bench.training.trials import exchanges, ranks
from bench.training.trials.tasks import TASKS
from bench.training.trials.trial import Outcome, Point, Trial, best_rate, read

COMPRESSED = (
    "OneBitAdam",
    "OneBitAdam/codec=topk:density=0.005",
    "OneBitAdam/codec=topk:density=0.005-feedback",
)
TRIAL = Trial("vit", "adamw", "none", rate=1e-3, batch=8, steps=100, seed=1)


def outcome(trial: Trial = TRIAL, loss: float | None = 2.0, ratio: float = 1) -> Outcome:
    """A thousand parameters, whose first steps send a quarter of what dense ones do."""
    first, dense = trial.first_steps, 2 * 3 / 4 * 4 * 1000
    begun = first * dense / 4
    sent = begun + (trial.steps - first) * dense / ratio
    curve = [Point(first, 3.0, 0.25, 3.0, begun), Point(trial.steps, loss, 0.5, 2.0, sent)]
    return Outcome(trial, "Images", 1000, curve, True, 0.02, "2020-01-01", {"torch": "2"})


def test_the_transformers_have_so_many_parameters():
    def count(model: torch.nn.Module) -> int:
        return sum(each.numel() for each in model.parameters())

    assert count(LanguageModel(128, 3, 64)) == 636_160
    assert count(VisionTransformer(28, 96, 4)) == 454_858


def test_a_language_model_does_not_see_what_follows():
    torch.manual_seed(1)
    model = LanguageModel(16, 2, 8)
    one = torch.randint(128, (1, 8))
    other = one.clone()
    other[0, 5:] += 1
    same = (model(one) == model(other % 128)).all(1)
    assert same.tolist() == [True] * 5 + [False] * 3


def test_a_step_is_timed_with_its_share_of_an_exchange():
    assert exchanges.period("int8") == exchanges.period("OneBitAdam") == 1
    assert exchanges.period("OneBitAdam/every=3+int8=0.29") == 3
    assert exchanges.period("DiLoCo/10") == 10
    assert ranks.typical([5.0, 1.0, 1.0], 1) == 1.0
    assert ranks.typical([1.0, 1.0, 4.0, 1.0, 1.0, 4.0, 9.0], 3) == 2.0
    assert ranks.typical([1.0, 3.0], 3) == 2.0


def test_labels_of_text_are_the_bytes_that_follow():
    task = TASKS["lm"](None)
    inputs, labels = task.examples(torch.tensor([0, 7]))
    assert inputs.shape == labels.shape == (2, 64)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert int(task.examples(torch.tensor([task.count - 1]))[0].max()) < 128


@pytest.mark.parametrize(
    ("schedule", "half"), [("linear", 0.5), ("cosine", 0.5), ("poly", 0.5**0.5)]
)
def test_a_rate_rises_and_falls_to_nothing(schedule: str, half: float):
    trial = TRIAL._replace(schedule=schedule)
    factors = [trial.rate_factor(step) for step in range(101)]
    assert factors[:10] == sorted(factors[:10])
    assert (factors[10], factors[100]) == (1, 0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[55] == pytest.approx(half)


def test_it_is_measured_where_all_ranks_have_the_same_parameters():
    assert TRIAL.measured() == {20, 25, 50, 75, 100}
    assert TRIAL.measured(every=16) == {32, 64, 80, 100}


def test_bytes_after_the_first_steps_are_counted_apart():
    found = outcome(ratio=30)
    assert found.ratio() == pytest.approx(30)
    assert found.ratio(whole=True) == pytest.approx(100 / (20 / 4 + 80 / 30))


def test_the_best_rate_has_the_least_loss_and_is_finite():
    found = [
        outcome(TRIAL._replace(rate=rate), loss)
        for rate, loss in ((0.1, 2.0), (0.2, 1.5), (0.4, None))
    ]
    assert best_rate(found, TRIAL) == 0.2
    assert best_rate(found, TRIAL._replace(seed=2)) is None


def test_outcomes_are_read_as_they_were_written(tmp_path: Path):
    assert read(tmp_path / "runs") == []
    written = [outcome(), outcome(TRIAL._replace(seed=2, clip=1.0), None)]
    for each in written:
        append(tmp_path / "runs", each)
    assert read(tmp_path / "runs") == written


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("OneBitAdam/codec=topk:density=0.01-feedback", "OneBitAdam"),
        ("OneBitAdam/codec=onebit+int8=0.3", "OneBitAdam"),
        ("DiLoCo/16", "DiLoCo"),
        ("lowrank:rank=2+small=int8+int8=0.1", "lowrank"),
        (methods.GLOO_POWERSGD, methods.GLOO_POWERSGD),
    ],
)
def test_an_exchange_has_a_name(text: str, name: str):
    assert exchanges.name_of(exchanges.check(text)) == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gloo", "gloo DDP"),
        ("int8+feedback", "`int8`, with error feedback"),
        (
            "lowrank:rank=2+small=int8+int8=0.1",
            "`lowrank:rank=2`, small tensors in `int8`, `int8` in the first 10 % of the steps",
        ),
        (
            "onebit+momentum+rate+ends=int8-feedback",
            "`onebit`, momentum in the hook, residuals that follow the rate, first and last layer "
            "and small tensors in `int8`, without error feedback",
        ),
        (
            "OneBitAdam/codec=int8+int8=0.29",
            "`OneBitAdam`, momenta in `int8`, warm-up of 29 % of the steps",
        ),
        (
            "OneBitAdam/every=3-feedback",
            "`OneBitAdam`, an exchange every 3 steps, warm-up of 20 % of the steps, without error "
            "feedback",
        ),
    ],
)
def test_an_exchange_is_told_in_words(text: str, words: str):
    assert exchanges.words(text, first=0.2) == words


@pytest.mark.parametrize(
    "text",
    [
        "OneBitAdam/codec=onebits",
        "int8/every=3",
        "OneBitAdam+int8=2",
        "OneBitAdam/16",
        "DiLoCo",
        "DiLoCo/0",
        "Adam",
        "onebit+x",
    ],
)
def test_an_exchange_that_is_none_is_refused(text: str):
    with pytest.raises(gradwire.InvalidArgument):
        exchanges.check(text)


def serve(folder: str, chosen: list[dict[str, Any]]) -> list[Outcome]:
    """Trains on this rank, a few steps each."""
    task = TASKS["mlp"](Path(folder))
    trials = [Trial(**{**TRIAL._asdict(), "ranks": 2, "steps": 6, **each}) for each in chosen]
    return [ranks.train(each, task) for each in trials]


def test_every_way_trains_and_counts_its_bytes(tmp_path: Path):
    small_images.write(tmp_path)
    chosen = [
        {"optimizer": "sgd", "rate": 0.1, "weight_decay": 5e-4},
        {"exchange": "lowrank:rank=2+small=int8"},
        {"exchange": methods.GLOO_POWERSGD, "clip": 1.0},
        {"exchange": "DiLoCo/3", "optimizer": "lars"},
        {"exchange": "int8", "optimizer": "lamb"},
        {"exchange": "int8", "optimizer": "lion"},
        *({"exchange": each} for each in COMPRESSED),
    ]
    found = torch_ranks.run(2, serve, str(tmp_path), chosen)[0]
    assert all(each.identical and each.loss < 5 for each in found)
    dense, low_rank, powersgd, local, byte, lion = (e.ratio(whole=True) for e in found[:6])
    assert dense == pytest.approx(1, rel=0.02)  # for headers
    assert byte == lion == pytest.approx(4, rel=0.05)
    assert local == pytest.approx(3, rel=0.1)  # outer steps
    assert low_rank > 4
    assert powersgd > 1.5
    one_bit, topk, topk_lost = (e.ratio() for e in found[6:])
    assert one_bit > 20
    assert topk == pytest.approx(topk_lost, rel=0.05)
    assert topk > one_bit
