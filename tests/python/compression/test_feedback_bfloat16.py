"""Residuals in bfloat16: half the memory, and no loss in expectation."""

from __future__ import annotations

from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator, ErrorFeedback, InvalidArgument
from numpy.typing import NDArray
from ranks import on_ranks

N, CALLS = 20_000, 5
STEP = 2.0**-7  # of bfloat16 values between 1 and 2


class Halves(gradwire.codec.Codec):
    """The mean of each half, as float16."""

    def encode(self, x: NDArray[np.float32]) -> bytes:
        return np.array([half.mean() for half in np.array_split(x, 2)], np.float16).tobytes()

    def decode(self, payload: memoryview, count: int) -> NDArray[np.float32]:
        means = np.frombuffer(payload, np.float16).astype(np.float32)
        return np.repeat(means, [count - count // 2, count // 2])


CODECS: dict[str, Any] = {name: name for name in gradwire.codecs()} | {"Python": Halves()}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Any:
    return CODECS[request.param]


def inputs(rank: int, call: int) -> NDArray[np.float32]:
    return np.random.default_rng([rank, call]).standard_normal((N // 100, 100)).astype(np.float32)


def steps(residual: NDArray[np.float32]) -> NDArray[np.float64]:
    """The distance to the next bfloat16, or more."""
    return np.abs(residual).astype(np.float64) * STEP


@pytest.mark.parametrize("p", [1, 3])
@on_ranks()
def test_what_is_lost_is_rounding_without_a_bias(comm: Communicator, p: int, codec: Any) -> None:
    """The sum of inputs, the delivered sum, the residuals, and the limit of their rounding."""
    feedback = ErrorFeedback("bfloat16")
    given, delivered, rounding = np.zeros(N), np.zeros(N), np.zeros(N)
    for call in range(CALLS):
        x = inputs(comm.rank, call)
        given += x.ravel()
        delivered += comm.all_reduce(x, codec=codec, feedback=feedback, key="w").ravel()
        rounding += steps(feedback.residual("w"))
    found = comm.all_gather_object((given, delivered, feedback.residual("w"), rounding))
    assert all(np.array_equal(each[1], found[0][1]) for each in found)
    lost = sum(each[0] - each[2].astype(np.float64) for each in found) - found[0][1]
    assert (np.abs(lost) <= sum(each[3] for each in found) + 2e-4).all()
    assert abs(lost.mean()) < 5 * lost.std() / np.sqrt(N) + 1e-6


@on_ranks(2)
def test_a_call_that_is_not_finite_leaves_the_residual(comm: Communicator, codec: Any) -> None:
    feedback = ErrorFeedback("bfloat16")
    for poison in (0, np.nan):
        before = feedback.residual("w")
        x = inputs(comm.rank, 0)
        x[0, 0] += poison if comm.rank == 1 else 0
        comm.all_reduce(x, codec=codec, feedback=feedback, key="w")
    assert np.array_equal(before, feedback.residual("w"))


@on_ranks(2)
def test_a_step_that_fails_leaves_all_of_its_residuals(comm: Communicator) -> None:
    feedback = ErrorFeedback("bfloat16")
    for keep in (True, False):
        before = {key: feedback.residual(key) for key in "ab"}
        feedback.begin_step()
        for key in "ab":
            x = inputs(comm.rank, 0)
            comm.all_reduce(x, codec="onebit", feedback=feedback, key=key)
        feedback.end_step(keep)
    assert all(np.array_equal(before[key], feedback.residual(key)) for key in "ab")


@on_ranks(2)
def test_saved_and_loaded_it_goes_on_with_the_same_bits(comm: Communicator, codec: Any) -> None:
    straight, saved = ErrorFeedback("bfloat16"), ErrorFeedback("bfloat16")
    for call in range(4):
        x, y = inputs(comm.rank, call), inputs(comm.rank, call)
        comm.all_reduce(x, codec=codec, feedback=straight, key="w")
        loaded = ErrorFeedback("bfloat16")
        loaded.load_state_dict(saved.state_dict())
        saved = loaded
        comm.all_reduce(y, codec=codec, feedback=saved, key="w")
        np.testing.assert_array_equal(x, y)
    assert np.array_equal(straight.residual("w"), saved.residual("w"))


def test_states_of_either_type_can_be_loaded_into_the_other() -> None:
    between = np.full(N, 1 + STEP / 2, np.float32)  # half way from one bfloat16 to the next
    whole, narrow, back = ErrorFeedback(), ErrorFeedback("bfloat16"), ErrorFeedback()
    whole.add("w", between)
    narrow.load_state_dict(whole.state_dict())
    values = narrow.residual("w")
    assert set(values.tolist()) == {1.0, 1 + STEP}
    assert values.mean(dtype=np.float64) == pytest.approx(between[0], abs=5 * STEP / 2 / N**0.5)
    back.load_state_dict(narrow.state_dict())
    assert np.array_equal(back.residual("w"), values)


def test_residuals_can_be_added_scaled_and_read() -> None:
    feedback = ErrorFeedback("bfloat16")
    feedback.add("w", [1.0, 2.0])
    feedback.add("w", np.array([1.0, 0.0]))
    feedback.scale(0.5)
    assert feedback.residual("w").tolist() == [1.0, 1.0]
    assert feedback.residual("w").dtype == np.float32
    assert feedback.keys() == {"w": 2}
    assert repr(feedback) == "ErrorFeedback(1 keys, 2 elements, bfloat16)"
    assert repr(ErrorFeedback()) == "ErrorFeedback(0 keys, 0 elements)"


def test_types_of_numpy_and_torch_are_understood() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("bfloat16", torch.bfloat16):
        assert ErrorFeedback(dtype).dtype == "bfloat16"
    for dtype in ("float32", torch.float32, np.float32, np.dtype("float32")):
        assert ErrorFeedback(dtype).dtype == "float32"
    with pytest.raises(InvalidArgument, match=r"dtype='float16': .* 'float32' or 'bfloat16'"):
        ErrorFeedback("float16")
