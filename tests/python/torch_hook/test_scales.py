"""Scales that residuals follow, what a step does with them, and the types that codecs take."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from gradwire import Error, ErrorFeedback, InvalidArgument
from gradwire.torch.exchange import rules
from gradwire.torch.exchange.engine import round_into
from gradwire.torch.exchange.gradient_scale import (
    GradientScale,
    PersistentState,
    RatesDifferError,
    ScaleTracker,
    persistent_state_of,
)
from gradwire.torch.exchange.residual_state import Call, ResidualState
from gradwire.torch.exchange.rules import Bucket, BucketLayout, Rules, Stages

UNKNOWN = GradientScale()


@pytest.mark.parametrize(("before", "after"), [(0, 0), (4, 0), (0, 4), (4, 4)])
def test_what_is_not_followed_or_stays_changes_nothing(before: int, after: int) -> None:
    one, other = (
        GradientScale(each, (each,) if each else (), each) for each in (float(before), float(after))
    )
    for factor in (one.loss_factor, one.rate_factor, one.share_factor):
        assert factor(other) == 1


def test_factors_keep_what_a_residual_moves() -> None:
    one = GradientScale(4.0, (0.4, 0.1), 3)
    other = GradientScale(8.0, (0.2, 0.05), 6)
    assert one.loss_factor(other) == 2
    assert one.rate_factor(other) == pytest.approx(2)
    assert one.share_factor(other) == 2
    assert other.rate_factor(one) == pytest.approx(1 / 2)
    assert one.rate_factor(GradientScale(rates=(0.4, 0.0))) == 1
    assert one.rate_factor(GradientScale(rates=(0.4,))) == 1
    assert GradientScale(rates=(0.4,)).rate_factor(GradientScale(rates=(0.1,))) == 4
    assert one.rate_factor(GradientScale(rates=(0.2, 0.05 * (1 + 1e-8)))) == pytest.approx(2)
    for rates in ((0.2, 0.1), (0.2, 0.05001)):
        with pytest.raises(RatesDifferError, match=r"changed from \[0.4, 0.1\] to"):
            one.rate_factor(GradientScale(rates=rates))


def test_a_scale_takes_from_another_what_it_does_not_follow() -> None:
    other = GradientScale(8.0, (0.2,), 6)
    assert UNKNOWN.or_else(other) == other.or_else(UNKNOWN) == other
    own = GradientScale(2.0, (0.1,), 3)
    assert own.or_else(other) == own
    assert GradientScale(2.0, (0.0,), 3).or_else(other) == GradientScale(2.0, (0.2,), 3)


def optimizer(*rates: float) -> Any:
    return mock.Mock(param_groups=[{"lr": each} for each in rates])


def scaler(scale: Any) -> Any:
    return mock.Mock(spec=["get_scale"], get_scale=lambda: scale)


def test_a_tracker_reads_what_it_is_given() -> None:
    assert ScaleTracker(None, None).read() == UNKNOWN
    assert ScaleTracker(scaler(0.5), None).read() == GradientScale(0.5)
    assert ScaleTracker(None, optimizer(1, 2)).read() == GradientScale(rates=(1.0, 2.0))
    both = ScaleTracker(scaler(2.0), optimizer(1))
    assert both.read() == both.read(on_host=True) == GradientScale(2.0, (1.0,))
    given = ((None, None), (scaler(1.0), None), (None, optimizer(1)))
    assert [ScaleTracker(*each).followed for each in given] == [False, True, True]
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InvalidArgument, match="the GradScaler's scale is"):
            ScaleTracker(scaler(wrong), None).read()


@pytest.mark.parametrize(
    ("enabled", "on_cuda", "there"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_scale_on_a_gpu_is_read_only_where_it_must_be(
    enabled: bool, on_cuda: bool, there: bool
) -> None:
    scale = mock.Mock(spec=torch.Tensor, is_cuda=on_cuda)
    read = mock.Mock(_get_scale_async=lambda: scale, get_scale=mock.Mock(return_value=4.0))
    read.is_enabled = lambda: enabled
    tracker = ScaleTracker(read, optimizer(1))
    assert tracker.on_gpu() is (scale if there else None)
    assert tracker.read() == GradientScale(0.0 if there else 4.0, (1.0,))
    assert read.get_scale.called != there
    assert tracker.read(on_host=True) == GradientScale(4.0, (1.0,))
    del read.is_enabled
    assert (tracker.on_gpu() is scale) == on_cuda
    read._get_scale_async = lambda: None  # there is none yet
    assert tracker.on_gpu() is None


@pytest.mark.parametrize(
    ("closed", "error", "alike", "free"),
    [
        (False, None, True, True),
        (False, None, False, False),
        (True, None, False, True),
        (False, Error("x"), False, True),
    ],
)
def test_residuals_are_of_one_models_hook(
    closed: bool, error: Exception | None, alike: bool, free: bool
) -> None:
    own, its = torch.zeros(1), torch.zeros(1)
    other = mock.Mock(closed=closed, error=error, _names={own if alike else its: "w"})
    for state in (None, lambda: None):
        PersistentState(state=state).require_free({own: "w"})  # type: ignore[arg-type]
    found = PersistentState(state=lambda: other)  # type: ignore[arg-type]
    if free:
        found.require_free({own: "w"})
    else:
        with pytest.raises(InvalidArgument, match="in use by another model's hook"):
            found.require_free({own: "w"})


def test_a_feedback_has_one_persistent_state() -> None:
    one, other = ErrorFeedback(), ErrorFeedback()
    assert persistent_state_of(one) is persistent_state_of(one)
    assert persistent_state_of(one) is not persistent_state_of(other)
    assert persistent_state_of(None) is not persistent_state_of(None)
    assert persistent_state_of(None).scale == UNKNOWN
    assert persistent_state_of(None).velocities == {}


# ---- Residuals of a step ------------------------------------------------------------------------


def made(
    rules: Rules | None = None, feedback: Any = True, names: Any = (), **options: Any
) -> ResidualState:
    kept = ErrorFeedback() if feedback is True else feedback
    return ResidualState(dict(names), 4, rules or Rules("onebit"), kept, **options)


def bucket(*gradients: torch.Tensor, named: bool = True) -> Bucket:
    flat = torch.cat([each.reshape(-1) for each in gradients])
    names = [f"p{i}" for i in range(len(gradients))] if named else []
    return Bucket([flat], names, list(gradients))


def scaled(feedback: Any) -> list[float]:
    return [call.args[0] for call in feedback.scale.call_args_list]


def test_residuals_follow_the_scale_of_each_step() -> None:
    feedback = mock.MagicMock(spec=ErrorFeedback)
    state = made(feedback=feedback)
    state.open_step(0, GradientScale(2.0, (0.1,), 4))
    assert scaled(feedback) == []
    state.open_step(1, GradientScale(4.0, (0.1,), 4))
    state.open_step(2, GradientScale(4.0, (0.05,), 4))
    state.open_step(3, GradientScale(4.0, (0.05,), 8))
    assert scaled(feedback) == [2, 2, 2]
    state.open_step(4, GradientScale(8.0, (0.025,), 16))
    assert scaled(feedback)[3:] == [8]
    state.open_step(5, UNKNOWN)
    state.open_step(6, GradientScale(8.0, (0.025,), 16))
    assert len(scaled(feedback)) == 4
    assert feedback.begin_step.call_count == 7
    state.follow_ranks()  # from 16 to 4
    assert scaled(feedback)[4:] == [0.25]
    assert state._persistent.scale == GradientScale(8.0, (0.025,), 4)


def test_a_paused_step_uses_and_changes_no_residual() -> None:
    feedback = mock.MagicMock(spec=ErrorFeedback)
    state = made(feedback=feedback)
    assert state.is_counted
    state.paused = True
    state.open_step(0, GradientScale(2.0))
    (call,) = state.calls(bucket(torch.zeros(3)))
    assert (call.codec, call.keys) == ("none", None)
    assert not state.is_counted
    assert state.end_step(True) is False
    assert not feedback.begin_step.called
    assert not feedback.scale.called
    assert not feedback.end_step.called
    state.paused = False
    assert not state.is_counted  # until the next step
    state.open_step(1, GradientScale(2.0))
    (call,) = state.calls(bucket(torch.zeros(3)))
    assert (call.codec, call.keys) == ("onebit", [("p0", 3)])
    feedback.end_step.return_value = "kept"
    assert state.end_step(False) == "kept"
    feedback.end_step.assert_called_once_with(False)
    unbiased = made(Rules("fp16"), None)
    unbiased.paused = True
    unbiased.open_step(0, UNKNOWN)
    assert [each.codec for each in unbiased.calls(bucket(torch.zeros(3)))] == ["fp16"]
    assert [made(feedback=None).end_step(each) for each in (True, False)] == [True, False]


def test_calls_are_by_codec_and_as_large_as_they_can_be() -> None:
    gradients = torch.zeros(2, 3), torch.zeros(4), torch.zeros(5)
    some = bucket(*gradients)
    mixed = Rules("int8", [("p1", "none")])
    one, other = made(mixed).calls(some)
    assert [each.data_ptr() for each in one.arrays] == [gradients[i].data_ptr() for i in (0, 2)]
    assert (one.codec, one.keys) == ("int8", [("p0", 6), ("p2", 5)])
    assert (other.codec, other.keys) == ("none", [("p1", 4)])
    assert [each.keys for each in made(mixed, None).calls(some)] == [None, None]
    (whole,) = made(Rules("int8"), None).calls(some)
    assert whole == Call(some.whole, "int8")
    (single,) = made(Rules("int8")).calls(some)
    assert len(single.arrays) == 3
    (nameless,) = made(mixed).calls(bucket(*gradients, named=False))
    assert (nameless.arrays, nameless.codec, nameless.keys) == ([mock.ANY], "int8", None)
    double = bucket(torch.zeros(3, dtype=torch.float64))
    (plain,) = made().calls(double)
    assert (plain.codec, plain.keys) == ("none", None)
    staged = made(Rules(Stages((0, "none"), (1, "fp16"))), None)
    for step, codec in ((0, "none"), (1, "fp16")):
        staged.open_step(step, UNKNOWN)
        assert [each.codec for each in staged.calls(some)] == [codec]
    fresh = made(Rules(Stages((0, "none"), (1, "fp16"))), None)
    assert [each.codec for each in fresh.calls(some)] == ["none"]


@pytest.mark.parametrize(
    ("codec", "feedback", "sent", "keeps"),
    [
        ("int8", True, "int8", True),
        ("fp16", None, "none", False),
        ("fp16", True, "bf16", True),
        ("none", True, "none", True),
    ],
)
def test_gradients_of_16_bits_are_rounded_when_they_have_come(
    codec: str, feedback: Any, sent: str, keeps: bool
) -> None:
    gradient = torch.ones(3, dtype=torch.bfloat16)
    (call,) = made(Rules(codec), feedback).calls(bucket(gradient))
    assert call.codec == sent
    assert (call.keys is not None) == keeps
    assert {each.dtype for each in call.arrays} == {torch.float32 if keeps else torch.bfloat16}
    assert bool(call.rounded) == keeps


def test_a_state_says_what_it_follows() -> None:
    weight = torch.zeros(3)
    state = made(names={weight: "w"})
    assert state.names == {weight: "w"}
    state.feedback.add("w", torch.ones(3).numpy())  # type: ignore[union-attr]
    assert state.state_dict()["loss_scale"] is None
    state.open_step(0, GradientScale(2.0, (0.1,), 4))
    state.end_step(True)
    saved = state.state_dict()
    assert (saved["loss_scale"], saved["learning_rates"]) == (2.0, [0.1])
    other = made(names={weight: "w"})
    other.load_state_dict({**saved, "world_size": 2})  # of two ranks, and now there are four
    assert torch.equal(other.state_dict()["feedback"]["w"]["residual"], torch.full((3,), 2.0))
    other.open_step(0, GradientScale(4.0, (0.1,), 4))
    assert torch.equal(other.state_dict()["feedback"]["w"]["residual"], torch.full((3,), 4.0))
    other.add_residuals({**saved, "world_size": 4})  # of a loss scale of 2
    assert torch.equal(other.state_dict()["feedback"]["w"]["residual"], torch.full((3,), 6.0))
    assert other.state_dict()["loss_scale"] == 4.0
    with pytest.raises(InvalidArgument, match="this hook keeps none"):
        made(feedback=None, names={weight: "w"}).load_state_dict(saved)
    made(feedback=None, names={weight: "w"}).load_state_dict({**saved, "feedback": {}})
    assert made(feedback=None).state_dict()["feedback"] == {}


def test_a_scale_that_only_a_gpu_knows_is_fetched_when_it_is_needed() -> None:
    state = made(names={torch.zeros(1): "w"})
    persistent = state._persistent
    persistent.on_gpu, persistent.scale = torch.tensor(8.0), GradientScale(0.0, (0.1,), 4)
    assert state.state_dict()["loss_scale"] == 8
    assert persistent.on_gpu is None
    persistent.on_gpu, persistent.scale = torch.tensor(8.0), GradientScale(2.0)
    assert state.state_dict()["loss_scale"] == 2  # what the host has seen since


def test_residuals_follow_a_scale_on_a_gpu_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = mock.Mock(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    feedback = mock.MagicMock(spec=ErrorFeedback)
    state = made(feedback=feedback)
    state.scales = mock.Mock(followed=True)
    state.scales.on_gpu.return_value = None
    state.open_step(0, GradientScale(2.0, (0.1,)))  # on the host
    assert not feedback._follow.called
    state.open_step(1, GradientScale(rates=(0.1,)))  # there is none yet
    assert not feedback._follow.called
    scale = state.scales.on_gpu.return_value = mock.Mock()
    state.open_step(2, GradientScale(rates=(0.1,)))
    device, address = scale.device.index, scale.data_ptr.return_value
    feedback._follow.assert_called_once_with(device, address, 77, 2.0)
    assert state._persistent.on_gpu is scale.clone.return_value
    assert state._persistent.scale == GradientScale(0.0, (0.1,))
    state._follow = mock.Mock()  # type: ignore[method-assign]
    state.open_step(3, GradientScale(rates=(0.1,)))
    state._follow.assert_called_once_with(scale, scale.clone.return_value)
    without = made(feedback=None)
    without.scales = state.scales
    without.open_step(0, UNKNOWN)
    assert without._persistent.on_gpu is scale.clone.return_value
    state.scales.followed = False
    state.open_step(4, UNKNOWN)
    assert feedback._follow.call_count == 2


# ---- Types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "device", "fits"),
    [
        (torch.float32, "cpu", True),
        (torch.complex64, "cpu", True),
        (torch.bfloat16, "cpu", True),
        (torch.float16, "cpu", True),
        (torch.float64, "cpu", False),
        (torch.float32, "meta", True),
        (torch.bfloat16, "meta", False),
        (torch.float64, "meta", False),
    ],
)
def test_codecs_apply_to_float32_and_on_the_cpu_to_16_bits(
    dtype: torch.dtype, device: str, fits: bool
) -> None:
    assert rules.compressible(torch.empty(3, dtype=dtype, device=device)) is fits


@pytest.mark.parametrize(
    ("ranks", "codec"), [(1, "fp16"), (2, 1 / 2), (3, 1 / 4), (4, 1 / 4), (5, 1 / 8)]
)
def test_sums_of_16_bits_do_not_overflow(ranks: int, codec: Any) -> None:
    assert rules.codec_for_16_bits(torch.bfloat16, ranks) == "bf16"
    wanted = codec if isinstance(codec, str) else f"fp16:scale={codec}"
    assert rules.codec_for_16_bits(torch.float16, ranks) == wanted


def test_finite_averages_stay_finite() -> None:
    average = torch.tensor([1e6, -1e6, math.inf, math.nan, 2.0])
    half, brain = (torch.zeros(5, dtype=each) for each in (torch.float16, torch.bfloat16))
    round_into(half, average)
    round_into(brain, average)
    assert half.tolist()[:3] == [65504, -65504, math.inf]
    assert half.isnan().tolist() == [False, False, False, True, False]
    assert half[4] == brain[4] == 2
    assert brain[0] == torch.tensor(1e6).bfloat16()


def test_complex_gradients_are_pairs() -> None:
    pairs, real = torch.zeros(2, 3, dtype=torch.complex64), torch.zeros(2, 3)
    assert rules.gradient_shape(pairs) == (2, 3, 2)
    assert (rules.gradient_elements(pairs), rules.gradient_elements(real)) == (12, 6)
    assert rules.real_view(pairs).shape == (12,)
    assert rules.real_view(real) is real


@pytest.mark.parametrize(
    "buffer", [torch.zeros(7), torch.zeros(5), torch.zeros(2, 3), torch.zeros(12)[::2]]
)
def test_a_buffer_is_filled_by_its_gradients(buffer: torch.Tensor) -> None:
    layout = BucketLayout.of({"a": torch.zeros(2), "b": torch.zeros(2, 2)})
    flat = torch.arange(6.0)
    whole, names, gradients = layout.bucket(flat, "it")
    assert (whole, names) == ([flat], ("a", "b"))
    assert [each.tolist() for each in gradients] == [[0, 1], [[2, 3], [4, 5]]]
    with pytest.raises(Error, match="gradients must lie end to end"):
        layout.bucket(buffer, "it")
