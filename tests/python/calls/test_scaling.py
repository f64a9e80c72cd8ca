"""prescale= and postscale=: products before a reduction and after it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gradwire import Communicator, ErrorFeedback, InvalidArgument, codec
from ranks import on_ranks, outcomes, run

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64, np.complex128]


def numbers(rank: int, n: int, dtype: Any) -> np.ndarray:
    values = np.random.default_rng([rank, n]).standard_normal((2, n))
    complex_ = np.dtype(dtype).kind == "c"
    return (values[0] + 1j * values[1] if complex_ else values[0]).astype(dtype)


def times(x: np.ndarray, factor: float) -> np.ndarray:
    """The product, rounded once."""
    if x.dtype in (np.float64, np.complex128):
        return x * factor
    wide = np.complex64 if x.dtype.kind == "c" else np.float32
    by = np.float32(factor)
    return (x.astype(wide) * by).astype(x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("p", [1, 3])
@on_ranks()
def test_it_is_as_if_the_caller_had_multiplied(
    comm: Communicator, p: int, op: str, dtype: Any
) -> None:
    pre, post = 0.3 + comm.rank, 1 / 7
    x = numbers(comm.rank, 999, dtype)
    scaled, options = times(x, pre), {"op": op, "algorithm": "ring"}
    wanted = times(comm.all_reduce(scaled.copy(), **options), post)
    given, out = x.copy(), np.empty_like(x)
    factors = {"prescale": pre, "postscale": post}
    comm.all_reduce(given, out=out, **options, **factors)
    np.testing.assert_array_equal(given, x)
    assert comm.all_reduce(given, **options, **factors) is given
    work = comm.all_reduce(x.copy(), **options, **factors, async_op=True)
    for found in (given, out, work.wait(), work.wait()):
        assert found.tobytes() == wanted.tobytes()
    assert len(set(comm.all_gather_object(given.tobytes()))) == 1


@on_ranks(3)
def test_reduce_and_reduce_scatter_scale_too(comm: Communicator) -> None:
    x = numbers(comm.rank, 30, np.float32)
    before = x.copy()
    scaled = times(x, 0.3)
    for name in ("reduce", "reduce_scatter"):
        wanted = getattr(comm, name)(scaled.copy())
        given = x.copy() if name == "reduce" else x
        found = getattr(comm, name)(given, prescale=0.3, postscale=3)
        if wanted is not None:
            np.testing.assert_array_equal(found, times(wanted, 3))
        if name == "reduce_scatter" or comm.rank != 0:
            np.testing.assert_array_equal(given, before)


@on_ranks(2)
def test_lists_and_torch_tensors_are_scaled(comm: Communicator) -> None:
    arrays = [torch.ones(3), torch.ones(2, 2), torch.ones(0)]
    comm.all_reduce(arrays, prescale=0.5, postscale=4)
    assert [each.tolist() for each in arrays] == [[4.0] * 3, [[4.0] * 2] * 2, []]
    assert arrays[0]._version > 0


@on_ranks(2)
def test_a_dropped_work_is_scaled_all_the_same(comm: Communicator) -> None:
    x = np.ones(4)
    work = comm.all_reduce(x, postscale=0.25, async_op=True)
    while not work.done():
        pass
    del work
    comm.barrier()
    assert x.tolist() == [0.5] * 4


class Plain(codec.Codec):
    def encode(self, x: np.ndarray) -> bytes:
        return x.tobytes()

    def decode(self, payload: memoryview, count: int) -> np.ndarray:
        return np.frombuffer(payload, np.float32, count)


@pytest.mark.parametrize("how", ["fp16", "int8", "onebit", "topk:density=0.1", "lowrank", Plain()])
def test_error_feedback_loses_nothing_of_what_was_prescaled(how: Any) -> None:
    """Delivered and left behind add up to what went in."""
    p, n, calls = 3, (12, 20), 5

    def body(comm: Communicator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        feedback = ErrorFeedback()
        went_in, delivered = np.zeros(n), np.zeros(n)
        for call in range(calls):
            x = numbers(10 * call + comm.rank, n[0] * n[1], np.float32).reshape(n)
            went_in += times(x, 0.25)
            comm.all_reduce(x, codec=how, feedback=feedback, key="x", prescale=0.25, postscale=8)
            delivered += x / 8.0
        return went_in, delivered, feedback.residual("x").reshape(n).astype(float)

    found = run(p, body)
    for _, delivered, _ in found:
        np.testing.assert_array_equal(delivered, found[0][1])
    went_in = sum(each[0] for each in found)
    left = sum(each[2] for each in found)
    np.testing.assert_allclose(found[0][1] + left, went_in, atol=1e-4)


def test_another_postscale_on_a_rank_is_an_error_that_shows_it() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(100_000, np.float32), postscale=1 + comm.rank / 2)

    for each in outcomes(2, body):
        assert isinstance(each.error, InvalidArgument)
        assert "postscale 1.5" in str(each.error)


@pytest.mark.parametrize("what", ["prescale", "postscale"])
@pytest.mark.parametrize(
    ("value", "options", "dtype", "words"),
    [
        (2.0, {}, np.int32, "x is int32"),
        (2.0, {}, np.bool_, "x is bool"),
        (2.0, {"op": "max"}, np.float32, "not 'max'"),
        (1e300, {}, np.float32, "beyond float32"),
        (math.nan, {}, np.float32, "not finite"),
        (math.inf, {}, np.float64, "not finite"),
        ("2", {}, np.float32, "is of type str"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_scaled_is_refused(
    comm: Communicator, what: str, value: Any, options: dict[str, Any], dtype: Any, words: str
) -> None:
    x = np.ones(4, dtype)
    with pytest.raises(InvalidArgument, match=f"{what}=.*{words}"):
        comm.all_reduce(x, **options, **{what: value})
    assert x.tolist() == [1] * 4
    comm.barrier()


@on_ranks(2)
def test_a_refused_call_leaves_its_array_alone(comm: Communicator) -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="zigzag"):
        comm.all_reduce(x, prescale=2, algorithm="zigzag")
    assert x.tolist() == [1] * 4
