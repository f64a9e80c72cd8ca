"""Payloads of native codecs: what collectives and pushes deliver, and bytes that nobody encoded."""

from __future__ import annotations

import contextlib
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire import Communicator, ErrorFeedback, InvalidArgument, serve
from numpy.typing import NDArray
from ranks import on_ranks, run

SPECS = [
    *("none", "fp16:scale=1024", "bf16", "int8:block=64", "int8:rounding=stochastic,seed=7"),
    *("int4", "int4:block=64,rounding=stochastic,seed=7"),
    *("onebit", "onebit:block=96", "threshold", "threshold:tau=0.75", "topk:density=0.01"),
    *("topk:density=0.2,values=fp16", "topk:density=0.2,values=2bit", "lowrank", "lowrank:rank=2"),
]
SHAPE = (150, 131)  # of fewer elements than a frame of a push has
each_codec = pytest.mark.parametrize("spec", SPECS)


def draw(shape: Any = SHAPE, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def delivered(spec: str, inputs: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """What goes through payloads, with error feedback."""
    codec, feedback = gradwire.codec.get(spec), ErrorFeedback()
    return [codec.decode(codec.encode(x, feedback=feedback, key="x"), x.shape) for x in inputs]


@pytest.mark.parametrize("shape", [(12, 3, 5, 7), (12, 105), (12, 1, 105, 1), (1260,)])
@on_ranks(2)
def test_lowrank_factors_the_first_dimension_and_all_others(
    comm: Communicator, shape: tuple[int, ...]
) -> None:
    """So the weights of a convolution whose filters are multiples of one are kept whole."""
    x = np.outer(draw(12, seed=1), draw(105, seed=2)).reshape(shape)

    (y,) = [comm.all_reduce(x.copy(), op="avg", codec="lowrank:rank=1", feedback=False)]
    np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)


@each_codec
def test_an_all_reduce_delivers_the_same(spec: str) -> None:
    def body(comm: Communicator) -> list[NDArray[np.float32]]:
        sums, feedback = [], ErrorFeedback()
        for x in inputs:
            y = x.copy() if comm.rank == 0 else np.zeros_like(x)
            how = "auto" if spec.startswith(("lowrank", "none")) else "gather"
            comm.all_reduce(y, codec=spec, algorithm=how, feedback=feedback, key="x")
            sums.append(y)
        return sums

    inputs = [draw(seed=i) for i in range(3)]
    for found, wanted in zip(run(2, body)[1], delivered(spec, inputs), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_push_delivers_the_same(bare_environment: None) -> None:
    specs = [each for each in SPECS if not each.startswith("lowrank")]
    inputs = [draw(seed=i) for i in range(2)]
    x = {"x": np.zeros(SHAPE, np.float32)}
    with (
        serve.Server() as server,
        serve.connect(x, serve.SGD(lr=1.0), codecs=specs, store=server.store) as ps,
    ):
        for spec in specs:
            feedback = ErrorFeedback()
            for gradient, wanted in zip(inputs, delivered(spec, inputs), strict=True):
                ps.pull(x)
                before = x["x"].copy()
                ps.push({"x": gradient}, codec=spec, feedback=feedback)
                ps.pull(x)
                np.testing.assert_array_equal(x["x"], before - wanted)


@each_codec
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_payloads_and_the_residual_add_up(spec: str, dtype: str) -> None:
    codec, feedback = gradwire.codec.get(spec), ErrorFeedback(dtype)
    inputs = [draw(seed=i) for i in range(6)]
    total = np.zeros(SHAPE)
    for x in inputs:
        payload = codec.encode(x, feedback=feedback, key="x")
        assert payload.size <= codec.max_bytes(x.shape)
        total += codec.decode(payload, x.shape)
    total += feedback.residual("x").reshape(SHAPE)
    lost = np.abs(total - np.sum(inputs, axis=0, dtype=np.float64)).max()
    assert lost < (1e-4 if dtype == "float32" else 0.5)
    assert feedback.state_dict()["x"]["calls"] == 6


@each_codec
def test_values_that_are_not_finite_leave_the_residual(spec: str) -> None:
    codec, feedback, x = gradwire.codec.get(spec), ErrorFeedback(), draw()
    codec.encode(x, feedback=feedback, key="x")
    before = feedback.residual("x")
    x[3, 5] = np.nan
    y = codec.decode(codec.encode(x, feedback=feedback, key="x"), x.shape)
    assert np.isnan(y).any()
    np.testing.assert_array_equal(feedback.residual("x"), before)


@each_codec
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (5,), (2, 3, 40), 7])
def test_any_shape(spec: str, shape: Any) -> None:
    codec = gradwire.codec.get(spec)
    x = draw(shape)
    y = codec.decode(codec.encode(x), shape)
    assert y.shape == x.shape
    assert y.dtype == np.float32


@each_codec
def test_hostile_bytes_are_refused_or_decoded(spec: str) -> None:
    codec, rng = gradwire.codec.get(spec), np.random.default_rng(3)
    payload = codec.encode(draw())
    for wrong in (payload[:-1], payload[:1], b"", np.append(payload, np.uint8(0))):
        with pytest.raises(InvalidArgument, match=r"codec|payload"):
            codec.decode(wrong, SHAPE)
    for _ in range(40):  # either is right, and nothing else
        broken = payload.copy()
        broken[rng.integers(0, broken.size, 8)] = rng.integers(0, 256, 8)
        with contextlib.suppress(InvalidArgument):
            assert codec.decode(broken.tobytes(), SHAPE).shape == SHAPE


@each_codec
def test_a_payload_of_another_size_is_refused(spec: str) -> None:
    codec = gradwire.codec.get(spec)
    with pytest.raises(InvalidArgument, match=r"codec|payload"):
        codec.decode(codec.encode(draw()), (SHAPE[0] // 2, SHAPE[1]))


def test_random_rounding_differs_by_call() -> None:
    codec = gradwire.codec.Int8(rounding="stochastic")
    first, again, second = (codec.encode(draw(), call=call) for call in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != second.tobytes()


def test_arrays_of_torch_and_payloads_of_any_kind() -> None:
    codec, x = gradwire.codec.OneBit(), torch.arange(-50.0, 50.0)
    payload = codec.encode(x)
    for given in (payload, payload.tobytes(), bytearray(payload), memoryview(payload)):
        np.testing.assert_array_equal(codec.decode(given, 100), codec.decode(payload, [100]))


@pytest.mark.parametrize("spec", SPECS)
def test_get_is_the_codec_of_its_name(spec: str) -> None:
    codec = gradwire.codec.get(spec)
    assert gradwire.codec.get(codec.spec) == codec
    assert gradwire._core.Codec(spec).name == codec.spec


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ([np.ones(3)], {}, "float64 on the CPU: codecs encode float32"),
        ([np.ones((4, 4), np.float32).T[1:]], {}, "not C-contiguous"),
        ([[1.0, 2.0]], {}, "x is a list"),
        ([np.ones(3, np.float32)], {"key": "w"}, "feedback= and key= go together"),
        ([np.ones(3, np.float32)], {"feedback": ErrorFeedback()}, "go together"),
        ([np.ones(3, np.float32)], {"feedback": 1, "key": "w"}, "gradwire.ErrorFeedback"),
        ([np.ones(3, np.float32)], {"call": -1}, "call=-1"),
    ],
)
def test_what_cannot_be_encoded(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        gradwire.codec.get("onebit").encode(*arguments, **options)


@pytest.mark.parametrize(
    ("payload", "shape", "text"),
    [
        ("text", 3, "payload is a str"),
        (np.zeros(24, np.uint8)[::2], 3, "without gaps"),
        (np.zeros(3, "datetime64[s]"), 3, "payload is a ndarray"),
        (b"123", -1, "shape=-1"),
        (b"123", 1.5, "shape=1.5"),
        (b"123", (2**40, 2**40), "elements of the shape"),
        (b"", (2**40, 2**40, 0), "elements of the shape"),
    ],
)
def test_what_cannot_be_decoded(payload: Any, shape: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        gradwire.codec.get("onebit").decode(payload, shape)


def test_a_residual_of_another_length_is_refused() -> None:
    codec, feedback = gradwire.codec.get("onebit"), ErrorFeedback()
    codec.encode(draw(), feedback=feedback, key="x")
    with pytest.raises(InvalidArgument, match="key 'x' has a residual of"):
        codec.encode(draw(10), feedback=feedback, key="x")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="use one of: none, fp16"):
        gradwire.codec.get("twobit")
