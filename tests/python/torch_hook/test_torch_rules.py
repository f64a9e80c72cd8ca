"""Rules: a parameter's codec, changes of it, and the counters."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import gradwire
import pytest
import torch
import torch.distributed as dist
import torch_ranks
from gradwire.codec import OneBit
from gradwire.torch import Compression, Stages, register, stats
from gradwire.torch.exchange.rules import Rules, is_at_least_16_bits, is_sparse
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    LOSSY,
    SMALL_BUCKETS,
    backward,
    mlp,
    same_everywhere,
    with_each,
    wrapped,
)
from trainer_options import grouped


def test_the_first_pattern_that_matches_decides() -> None:
    rules = Rules("onebit", [("*.bias", "none"), ("0.*", "fp16"), ("0.bias", "bf16")])
    found = [rules.codec(name, 10**6, 0) for name in ("0.bias", "0.weight", "1.weight")]
    assert found == ["none", "fp16", "onebit"]
    assert rules.needs_feedback
    assert not Rules("fp16", [("*", "bf16")]).needs_feedback


def test_gradients_without_names_take_the_codec_that_no_pattern_changes() -> None:
    assert Rules("onebit", [("*", "none")]).default(0) == "onebit"
    changing = Rules(Stages((0, "none"), (5, "fp16")), [("*", "int8")])
    assert [changing.default(step) for step in (4, 5)] == ["none", "fp16"]


def test_small_parameters_travel_as_they_are_where_the_codec_is_biased() -> None:
    rules = Rules("onebit", [("half", "fp16")], min_elements=100)
    found = [rules.codec(f"of {elements}", elements, 0) for elements in (99, 100)]
    assert found == ["none", "onebit"]
    assert rules.codec("half", 5, 0) == "fp16"


def test_stages_change_at_their_steps() -> None:
    stages = Stages((0, "none"), (5, "fp16"), (7, "onebit"))
    assert [stages(step) for step in (0, 4, 5, 6, 7, 100)] == [
        *("none", "none", "fp16", "fp16", "onebit", "onebit")
    ]
    assert repr(stages) == "Stages((0, 'none'), (5, 'fp16'), (7, 'onebit'))"


def test_parameters_of_no_elements_are_not_small_where_nothing_is() -> None:
    assert Rules("onebit").codec("empty", 0, 0) == "onebit"


class Unhashable(gradwire.codec.Codec):
    """A codec that no dict takes."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def encode(self, x: Any) -> bytes:
        return bytes(x)

    def decode(self, payload: memoryview, count: int) -> Any:
        return payload


def test_parameters_of_a_codec_travel_together() -> None:
    """Two codecs of a program's own are two, even if they are alike."""
    one, other = Unhashable(), Unhashable()
    rules = Rules("fp16", [("a*", one), ("b*", other)])
    gradients = [torch.zeros(3)] * 4
    names = ["a1", "c", "b", "a2"]
    found = rules.groups(names, gradients, 0)
    assert [(id(codec), indices) for codec, indices in found] == [
        *((id(one), [0, 3]), (id("fp16"), [1]), (id(other), [2]))
    ]
    assert rules.groups(names, gradients, 1) is found  # found once
    changing = Rules(Stages((0, "none"), (1, "fp16")))
    assert [changing.groups(["a"], gradients[:1], step)[0][0] for step in (0, 1, 0)] == [
        *("none", "fp16", "none")
    ]


def test_rules_know_what_they_may_lose() -> None:
    asked: list[int] = []
    plain, rounded, biased = (Rules(each) for each in ("none", "fp16", "onebit"))
    changing = Rules(lambda step: asked.append(step) or "none")  # type: ignore[func-returns-value]
    assert asked == [0]  # checked
    rules = (plain, rounded, biased, changing)
    assert [each.compresses for each in rules] == [False, True, True, True]
    assert [each.needs_feedback for each in rules] == [False, False, True, True]
    assert [each.lossy for each in rules] == [None, "fp16", "onebit", None]
    assert [each.biased(0) for each in rules] == [None, None, "onebit", None]
    staged = Rules("fp16", [("a", Stages((0, "none"), (5, "int8")))])
    assert staged.codecs(0) == staged.codecs(9) == ["none", "int8", "fp16"]


@pytest.mark.parametrize(
    ("codec", "sparse", "wide"),
    [
        ("none", False, True),
        ("fp16", False, True),
        ("bf16", False, True),
        ("int8", False, False),
        ("topk:density=0.1", True, False),
        ("threshold", True, False),
        (Unhashable(), False, False),
    ],
)
def test_codecs_are_sparse_or_wide_by_their_kind(codec: Any, sparse: bool, wide: bool) -> None:
    assert (is_sparse(codec), is_at_least_16_bits(codec)) == (sparse, wide)


def test_a_function_is_asked_once_a_step() -> None:
    rules = Rules(lambda step: OneBit(block=64 + 64 * step))
    asked = [("a", 0), ("b", 0), ("a", 1)]
    one, other, later = (rules.codec(name, 10**6, step) for name, step in asked)
    assert one is other
    assert later == OneBit(block=128)


@pytest.mark.parametrize("starts", [[], [1], [0, 5, 5], [0, 7, 5]])
def test_stages_ascend_from_0(starts: list[int]) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="ascend from 0"):
        Stages(*((start, "fp16") for start in starts))


def test_warm_up_thins_out_by_quarters() -> None:
    ramp = Stages.sparse(0.001, every=10, start=4)
    found = [ramp(step) for step in (0, 3, 4, 13, 14, 24, 34, 44, 1000)]
    densities = ["0.25", "0.25", "0.0625", "0.015625", "0.00390625", "0.001", "0.001"]
    assert found == ["none", "none", *(f"topk:density={each}" for each in densities)]
    for density in (0.5, 0.25, 1):
        assert Stages.sparse(density, every=1)(0) == f"topk:density={density}"
    assert repr(Stages.sparse(every=1)) == repr(Stages.sparse(0.001, every=1))


NAN = float("nan")
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (Stages.sparse, {"density": 0.0, "every": 1}, "density=0.0 is not from above 0 to 1"),
    (Stages.sparse, {"density": NAN, "every": 1}, "density=nan is not from"),
    (Stages.sparse, {"density": 1.5, "every": 1}, "density=1.5 is not from"),
    (Rules, {"codec": "none", "min_elements": 1 << 64}, "min_elements="),
    (lambda: Stages((0, "none"), (1 << 64, "int8")), {}, "step="),
    (lambda: Stages((0, "none"), (5, "fp17")), {}, "fp17"),
    (Rules, {"codec": OneBit}, "codec="),
    (Rules, {"codec": 5}, "codec=5"),
    (Stages.sparse, {"density": "0.1", "every": 1}, "density='0.1' is of type str"),
    (Stages.sparse, {"every": 0}, "every=0 is less than 1"),
    (Stages.sparse, {"every": 1.5}, "every=1.5 is of type float"),
    (Stages.sparse, {"every": 1, "start": -1}, "start=-1 is less than 0"),
    (Stages.sparse, {"every": 1, "start": NAN}, "start=nan is of type float"),
    (Compression, {"codec": "none", "min_elements": -1}, "min_elements=-1 is less than 0"),
    (Compression, {"codec": "none", "min_elements": NAN}, "min_elements=nan is of type float"),
    (Compression, {"codec": "none", "min_elements": None}, "min_elements=None: give an integer"),
]


@pytest.mark.parametrize(("what", "options", "says"), WRONG)
def test_options_out_of_range_or_of_a_wrong_type_are_refused(
    what: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(gradwire.InvalidArgument) as raised:
        what(**options)
    assert says in str(raised.value)


@pytest.mark.parametrize("stage", [5, "8", (5,), (1.5, "int8"), (NAN, "int8"), (True, "int8")])
def test_stages_of_wrong_types_are_refused(stage: Any) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=r"a stage=|step="):
        Stages((0, "none"), stage)


@pytest.mark.parametrize(
    "codec", ["fp17", Stages((0, "none")), lambda step: "fp17", lambda step: step]
)
def test_a_codec_that_does_not_exist_is_refused(codec: Any) -> None:
    with pytest.raises(gradwire.InvalidArgument):
        Rules("none", [("*", codec), ("*", "fp17")])


def by_codec(codec: str) -> tuple[dict[str, tuple[int, int]], str, list[float]]:
    ddp, _ = wrapped(mlp(), **SMALL_BUCKETS)
    rules = [("*.bias", "none"), ("4.*", "int8:block=32")]
    state = register(ddp, Compression(codec, rules=rules, min_elements=0, feedback=True, warm_up=0))
    before = state.communicator.traffic.bytes_sent  # in register()
    ratios = []
    for step in range(3):
        backward(ddp, step)
        ratios.append(state.stats().last.ratio)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = stats(ddp)
        assert str(stats(state)) == str(stats(torch.compile(ddp))) == str(found)
    assert printed.getvalue() == ""
    assert found.total.steps == found.total.kept == state.steps == 3
    assert found.total.dense_bytes == state.bytes
    assert found.last.waited > 0
    assert 0 < found.last.encode_seconds < found.total.encode_seconds
    assert 0 < found.last.decode_seconds < found.total.decode_seconds
    parameters = {name: (each.parameters, each.elements) for name, each in found.codecs.items()}
    assert found.codecs["none"].residual_norm == 0
    assert found.codecs[codec].residual_norm > 0
    assert state.communicator.traffic.bytes_sent - before == found.total.sent_bytes
    assert same_everywhere(each.grad for each in ddp.parameters())
    return parameters, str(found), ratios


def test_parameters_have_codecs_of_their_own_and_a_table_of_them() -> None:
    for by in torch_ranks.run(2, with_each, LOSSY, by_codec):
        for codec, (found, table, ratios) in by.items():
            assert found == {codec: (2, 12000), "none": (3, 210), "int8:block=32": (1, 1000)}
            assert re.search(rf"^{codec} +2 +12,000 +\d", table, re.M)
            assert re.search(r"^total +3 +3 +0\.159 ", table, re.M)
            assert ratios[-1] > 1.8
        assert by["fp16"][2][-1] < 2.2


def first_gradients(**hook: Any) -> dict[str, torch.Tensor]:
    ddp, _ = wrapped(mlp())
    if hook:
        register(ddp, **grouped(**hook))
    backward(ddp, 0)
    return {name: each.grad for name, each in ddp.module.named_parameters()}


@torch_ranks.on_ranks(2)
def test_parameters_of_less_than_1024_elements_equal_plain_ddp_by_default() -> None:
    plain, hooked = first_gradients(), first_gradients(codec="onebit", warm_up=0)
    assert {name for name, each in plain.items() if not each.equal(hooked[name])} == {
        "0.weight",
        "2.weight",
    }


@torch_ranks.on_ranks(3)
def test_all_ranks_change_the_codec_at_the_same_step() -> None:
    """Ranks that are slower than others change the codec at the same step."""
    ddp, _ = wrapped(mlp())
    state = register(ddp, Stages((0, "none"), (2, LOSSY[0])))
    changed = []
    for step in range(4):
        backward(ddp, step)
        changed.append(bool(state.feedback.keys()) and state.feedback.residual("0.weight").any())
    assert [bool(each) for each in changed] == [False, False, True, True]


@torch_ranks.on_ranks(2)
def test_ranks_that_change_it_at_different_steps_are_told() -> None:
    ddp, _ = wrapped(mlp())
    register(ddp, Compression(Stages((0, "none"), (1 + dist.get_rank(), "fp16")), feedback=False))
    backward(ddp, 0)
    with pytest.raises(gradwire.InvalidArgument) as raised:
        backward(ddp, 1)
    assert "fp16" in str(raised.value)


def without_a_hook() -> str:
    with pytest.raises(gradwire.InvalidArgument) as raised:
        stats(DistributedDataParallel(nn.Linear(1, 1)))
    with pytest.raises(
        gradwire.InvalidArgument, match=r"Linear: give .* what register\(\) returned"
    ):
        stats(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(
        gradwire.InvalidArgument, match=r"state=.*: give what register\(\) returned"
    ):
        gradwire.torch.gather_state_dict(nn.Linear(1, 1))  # type: ignore[arg-type]
    return str(raised.value)


def test_a_model_without_the_hook_has_no_stats() -> None:
    assert "call register() first" in torch_ranks.run(1, without_a_hook)[0]


def unnamed() -> list[str]:
    state = register(DistributedDataParallel(mlp()))
    messages = []
    wanted: list[dict[str, Any]] = [
        {"codec": "onebit"},
        {"momentum": 0.9},
        {"rules": [("*.bias", "fp16")]},
    ]
    for each in wanted:
        with pytest.raises(gradwire.InvalidArgument) as raised:
            gradwire.torch.State(state.communicator, **grouped(**each))
        messages.append(str(raised.value))
    return messages


def test_what_is_kept_by_parameter_needs_their_names() -> None:
    (messages,) = torch_ranks.run(1, unnamed)
    assert all("named_parameters()" in each for each in messages)


@torch_ranks.on_ranks(2)
def test_feedback_is_there_where_it_is_needed_or_asked_for() -> None:
    """Feedback off, on by need, and given."""
    feedback = gradwire.ErrorFeedback()
    off = register(DistributedDataParallel(mlp()), Compression("onebit", feedback=False))
    needed = register(DistributedDataParallel(mlp()), "onebit")
    given = register(DistributedDataParallel(mlp()), Compression("fp16", feedback=feedback))
    unneeded = register(DistributedDataParallel(mlp()), "fp16")
    assert off.feedback is None
    assert unneeded.feedback is None
    assert needed.feedback is not None
    assert given.feedback is feedback
