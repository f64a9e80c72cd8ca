"""The study of OneBitAdam's parts, with all ranks in one process."""

from __future__ import annotations

import sys

import gradwire
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from bench.training.trials import skipped_rounds, virtual_ranks
from bench.training.trials.tasks import TASKS
from bench.training.trials.trial import Trial
from bench.training.trials.virtual_ranks import Study

TRIAL = Trial("lm", "adamw", "", 0.004, 4, 3, 1, first=1 / 3)


def study(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Study:
    monkeypatch.setattr(sys, "argv", ["virtual_ranks.py", *arguments])
    return Study(TRIAL, virtual_ranks.parse_options())


def test_its_codec_is_onebit():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    codec = gradwire.codec.get("onebit")
    expected = codec.decode(codec.encode(values.numpy()), values.shape)
    torch.testing.assert_close(virtual_ranks.one_bit(values), torch.as_tensor(expected))


def test_without_its_parts_it_is_adamw(monkeypatch: pytest.MonkeyPatch):
    """But for elements of a small second moment, after the warm-up of one step."""
    trained = study(monkeypatch, "--codec", "none", "--second-moment", "exact")
    torch.manual_seed(1)
    model = TASKS["lm"](None).model()
    before = model.layers.layers[0].linear1.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batches in enumerate(virtual_ranks._batches(TRIAL, trained.task)):
        optimizer.param_groups[0]["lr"] = TRIAL.rate * TRIAL.rate_factor(step)
        optimizer.zero_grad()
        for inputs, labels in batches:
            (cross_entropy(model(inputs), labels.flatten()) / len(batches)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    trained.run()
    expected = model.layers.layers[0].linear1.weight.detach() - before
    found = trained.model.layers.layers[0].linear1.weight.detach() - before
    assert float((found - expected).norm()) < 0.2 * float(expected.norm())


def test_what_is_compressed_differs_from_it(monkeypatch: pytest.MonkeyPatch):
    exact = study(monkeypatch, "--codec", "none")
    loss = exact.run()
    for arguments in ([], ["--sends", "local"]):
        other = study(monkeypatch, *arguments)
        assert abs(other.run() - loss) < 0.5
        assert not torch.equal(other.values, exact.values)


def test_exchanges_are_skipped_in_every_way(monkeypatch: pytest.MonkeyPatch):
    """With an exchange at every step they train as without any of it."""
    task = TASKS["lm"](None)
    monkeypatch.setitem(TASKS, "lm", lambda _: task)
    monkeypatch.setattr(virtual_ranks, "_loss", lambda *_: 0.0)

    def values(between: str, every: int) -> torch.Tensor:
        arguments = ["--codec", "none", "--every", str(every), "--between", between]
        monkeypatch.setattr(sys, "argv", ["skipped_rounds.py", *arguments])
        chosen = skipped_rounds.parse_options()
        trained = skipped_rounds.STUDIES[between](TRIAL, chosen)
        trained.run()
        return trained.values

    exact = study(monkeypatch, "--codec", "none")
    exact.run()
    found = []
    for between in skipped_rounds.STUDIES:
        torch.testing.assert_close(values(between, 1), exact.values, rtol=0, atol=1e-5)
        found.append(values(between, 2))
    assert len({float(each.sum()) for each in (exact.values, *found)}) == 5
