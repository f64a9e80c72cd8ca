"""Velocities of one rank: what is sent, and what a step leaves, without ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from gradwire import ErrorFeedback, InvalidArgument
from gradwire.torch.ddp.momentum import Momentum, Velocities, momentum_of
from gradwire.torch.exchange.rules import Bucket


def bucket(**gradients: torch.Tensor) -> Bucket:
    return Bucket([], [*gradients], [*gradients.values()])


def made(nesterov: bool = False, masking: bool = False) -> Velocities:
    return Velocities(Momentum(0.5, nesterov, masking), {})


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_is_sent_is_what_torchs_sgd_would_apply(nesterov: bool) -> None:
    velocities, weight = made(nesterov), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 1.0, momentum=0.5, nesterov=nesterov)
    for step in range(4):
        before = weight.detach().clone()
        weight.grad = torch.tensor([1.0, -2.0, step])
        sent = weight.grad.clone()
        optimizer.step()
        velocities.apply(bucket(w=sent))
        velocities.end_step(True, [], None)
        assert torch.allclose(sent, before - weight.detach())


def test_a_step_that_is_not_kept_leaves_velocities_as_they_were() -> None:
    velocities = made()
    velocities.apply(bucket(w=torch.ones(2)))
    velocities.end_step(True, [], None)
    kept = velocities.kept["w"].clone()
    first = velocities.kept["w"].data_ptr()
    velocities.apply(bucket(w=torch.full((2,), 9.0)))
    dropped = velocities._next["w"].data_ptr()
    velocities.end_step(False, [], None)
    assert torch.equal(velocities.kept["w"], kept)
    velocities.apply(bucket(w=torch.ones(2)))
    assert velocities._next["w"].data_ptr() == dropped  # its memory serves again
    velocities.end_step(True, [], None)
    assert torch.equal(velocities.kept["w"], kept * 0.5 + 1)
    velocities.apply(bucket(w=torch.ones(2)))
    assert velocities._next["w"].data_ptr() == first
    velocities.end_step(True, [], None)
    other = torch.ones(2, 1)  # of another shape now
    velocities.apply(bucket(w=other))
    assert velocities._next["w"].shape == (2, 1)


def test_strides_of_a_gradient_are_not_those_of_its_velocity() -> None:
    velocities, gradient = made(masking=True), torch.arange(6.0).view(2, 3).t()
    velocities.apply(bucket(w=gradient))
    assert velocities._next["w"].is_contiguous()
    assert torch.equal(velocities._next["w"], gradient)


@pytest.mark.parametrize(("nesterov", "sent"), [(False, 3.0), (True, 1.5)])
def test_what_no_rank_used_is_taken_back(nesterov: bool, sent: float) -> None:
    velocities = made(nesterov)
    velocities.apply(bucket(a=torch.full((2,), 3.0), b=torch.ones(2)))
    (found,) = velocities.take_back(["a", "other"]).items()
    assert found[0] == "a"
    assert (found[1] == sent).all()
    velocities.end_step(True, [], None)
    assert velocities.kept.keys() == {"b"}


@pytest.mark.parametrize(
    ("keep", "masking", "feedback", "masks"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_masked(
    keep: bool, masking: bool, feedback: bool, masks: bool, dtype: torch.dtype
) -> None:
    residuals = ErrorFeedback()
    residuals.add("w", torch.tensor([0.0, 2.0, 0.0]).numpy())
    velocities = made(masking=masking)
    velocities.apply(bucket(w=torch.ones(3, dtype=dtype), dense=torch.ones(3)))
    velocities.end_step(keep, ["w", "other"], residuals if feedback else None)
    if keep:
        assert velocities.kept["w"].tolist() == ([0, 1, 0] if masks else [1, 1, 1])
        assert velocities.kept["dense"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("finite", [True, False])
def test_a_gpu_may_know_whether_a_step_is_kept(finite: bool) -> None:
    velocities, said = made(), torch.tensor(finite)
    velocities.apply(bucket(w=torch.ones(2)))
    velocities.end_step(True, [], None, said)
    first = velocities.kept["w"]
    assert first.tolist() == ([1, 1] if finite else [0, 0])
    assert finite or first.signbit().all()  # -0: adding it changes no bit
    velocities.apply(bucket(w=torch.ones(2)))
    velocities.end_step(True, [], None, said)
    assert velocities.kept["w"].tolist() == ([1.5, 1.5] if finite else [0, 0])
    velocities.apply(bucket(w=torch.ones(2)))
    velocities.end_step(False, [], None, torch.tensor(False))
    assert velocities.kept["w"].tolist() == ([1.5, 1.5] if finite else [0, 0])


def test_velocities_on_a_gpu_are_masked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = mock.Mock(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    feedback: Any = mock.Mock()
    gpu = mock.Mock(is_cuda=True, data_ptr=lambda: 4096, numel=lambda: 3)
    line = mock.Mock(float=lambda: gpu)
    velocities = made(masking=True)
    velocities._next = {"w": mock.Mock(is_cuda=True, view=lambda _: line)}
    assert velocities.on_gpu() is velocities._next["w"]
    velocities.end_step(True, ["w"], feedback)
    feedback._mask.assert_called_once_with([("w", 4096, 3)], 77)
    line.copy_.assert_called_once_with(gpu)
    assert not feedback._core.mask.called
    velocities.apply(bucket(v=torch.ones(1)))
    assert velocities.on_gpu() is None


def test_loaded_velocities_are_copies() -> None:
    velocities, saved = made(), torch.ones(2)
    velocities.kept["old"] = torch.zeros(1)
    velocities.load({"w": saved}, {"w": torch.device("cpu")})
    assert velocities.kept.keys() == {"w"}
    velocities.scale(4.0)
    assert velocities.kept["w"].tolist() == [4, 4]
    velocities.scale(torch.tensor(0.5))
    assert velocities.kept["w"].tolist() == [2, 2]
    assert saved.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((1.0, False, False), "momentum=1.0 is not from 0 to below 1"),
        ((-0.1, False, False), "momentum=-0.1 is not"),
        ((float("nan"), False, False), "momentum=nan"),
        ((None, True, False), "nesterov=True needs a momentum="),
        ((0.9, 3, False), "nesterov"),
        ((0.9, False, 3), "factor_masking"),
    ],
)
def test_what_is_no_momentum_is_refused(given: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        momentum_of(*given)


def test_momentum_is_from_0_to_below_1() -> None:
    assert momentum_of(None, False, True) is None
    assert [momentum_of(each, True, False) for each in (0.0, 0.5)] == [
        Momentum(0.0, True, False),
        Momentum(0.5, True, False),
    ]
