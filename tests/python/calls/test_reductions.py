"""Reductions against NumPy: dtypes × ops × algorithms, and how they round."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from gradwire import Communicator, ErrorFeedback, InvalidArgument, algorithms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import nightly, on_ranks, run

FLOATS = ("float32", "float64", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, "bool")
OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor", "land", "lor", "lxor")
IN_TREE = [name for name in algorithms() if name != "recursive_doubling"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(name: str, n: int, rank: int, seed: int = 0) -> np.ndarray:
    """Rank's input: integers of the whole range and some zeros, floats around 1 of either sign."""
    rng = np.random.default_rng([seed, rank, n])
    dtype = dtype_of(name)
    if dtype.kind == "b":
        return rng.integers(0, 2, n).astype(bool)
    if dtype.kind == "c":
        return rng.uniform(-2, 2, 2 * n).view(np.complex128).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, n, dtype, endpoint=True) * rng.integers(
            0, 2, n, dtype
        )
    return (rng.choice([-1, 1], n) * rng.uniform(0.5, 2, n)).astype(dtype)


def is_defined(op: str, dtype: str) -> bool:
    if dtype in (*INTEGERS, "bool"):
        return op != "avg"
    return op in (("sum", "avg") if dtype in COMPLEX else ("sum", "avg", "min", "max", "prod"))


def is_exact(op: str, dtype: np.dtype) -> bool:
    """Whether no op rounds."""
    return dtype.kind in "iub" or op in ("min", "max")


def reduced(op: str, inputs: list[np.ndarray]) -> np.ndarray:
    """Integers as they are, which wraps; floats in float64."""
    stack = np.stack(inputs)
    if len(inputs) == 1:  # which nothing is done to, as MPI has it: not even what is logical
        return stack[0]
    if stack.dtype.kind not in "iub":
        stack = stack.astype(np.complex128 if stack.dtype.kind == "c" else np.float64)
    kind: dict[str, Callable[..., np.ndarray]] = {
        "sum": np.sum, "min": np.min, "max": np.max, "prod": np.prod,
        "band": np.bitwise_and.reduce, "bor": np.bitwise_or.reduce, "bxor": np.bitwise_xor.reduce,
        "land": np.logical_and.reduce, "lor": np.logical_or.reduce, "lxor": np.logical_xor.reduce,
    }  # fmt: skip
    if op == "avg":
        return np.sum(stack, axis=0, dtype=stack.dtype) / len(inputs)
    options = {"dtype": stack.dtype} if op in ("sum", "prod") else {}
    return kind[op](stack, axis=0, **options)


def eps_of(dtype: np.dtype) -> float:
    return float((np if dtype.kind == "c" else ml_dtypes).finfo(dtype).eps)


@pytest.mark.parametrize("p", [1, 2, 5, *nightly(3, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks()
def test_dtypes_and_ops(comm: Communicator, dtype: str, p: int) -> None:
    for op in OPS:
        for algorithm in algorithms():
            check_op(comm, dtype, op, algorithm)


def check_op(comm: Communicator, dtype: str, op: str, algorithm: str) -> None:
    inputs = [values(dtype, 777, rank) for rank in range(comm.size)]
    x = inputs[comm.rank].copy()
    if not is_defined(op, dtype):
        with pytest.raises(InvalidArgument, match=f"op '{op}' of {dtype} is not defined; use one"):
            comm.all_reduce(x, op=op, algorithm=algorithm)
        return
    comm.all_reduce(x, op=op, algorithm=algorithm)
    expected = reduced(op, inputs)
    if is_exact(op, x.dtype):
        np.testing.assert_array_equal(x, expected.astype(x.dtype))
        return
    error = np.abs(x.astype(expected.dtype) - expected)
    scale = np.sum(np.abs(np.stack(inputs).astype(expected.dtype)), axis=0)
    if op == "prod":
        scale = np.abs(expected)
    # p - 1 operations and a division, each rounded once relative to a partial result.
    assert np.all(error <= comm.size * eps_of(x.dtype) * scale), (op, algorithm)


@pytest.mark.parametrize("algorithm", [*algorithms(), "gather"])
@on_ranks(3)
def test_bools_are_added_as_numpy_and_torch_add_them(comm: Communicator, algorithm: str) -> None:
    rows = np.array([[False, True, True], [False, False, True], [False, False, True]])
    for op, expected in (("sum", [0, 1, 1]), ("prod", [0, 0, 1]), ("bxor", [0, 1, 1])):
        x = comm.all_reduce(rows[comm.rank].copy(), op=op, algorithm=algorithm)
        assert x.dtype == bool
        np.testing.assert_array_equal(x, np.array(expected, bool))
        np.testing.assert_array_equal(x.view(np.uint8), expected)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
@on_ranks(3)
def test_complex_numbers_are_added_and_averaged(comm: Communicator, collective: str) -> None:
    given = np.arange(12, dtype=np.complex64) * (1 + 2j) + comm.rank
    for op, expected in (("sum", 0), ("avg", 1)):
        x = given.copy()
        got = getattr(comm, collective)(x, op=op)
        whole = (3 * np.arange(12) * (1 + 2j) + 3) / (3 if expected else 1)
        if collective == "reduce_scatter":
            whole = whole.reshape(3, 4)[comm.rank]
        if collective != "reduce" or comm.rank == 0:
            assert got.dtype == np.complex64
            np.testing.assert_allclose(got, whole, rtol=1e-6)


@on_ranks(2)
def test_complex_numbers_are_refused_where_they_have_no_order_and_by_codecs(
    comm: Communicator,
) -> None:
    x = np.ones(8, np.complex64)
    for op in ("min", "max", "prod"):
        with pytest.raises(InvalidArgument, match=f"op '{op}' of complex64 is not defined"):
            comm.all_reduce(x, op=op)
    for codec in ("fp16", "onebit", "lowrank"):
        with pytest.raises(InvalidArgument, match="needs float32, not complex64; pass its"):
            comm.all_reduce(x, codec=codec, feedback=False)
    feedback = ErrorFeedback()
    with pytest.raises(InvalidArgument, match="not for all_reduce of complex64"):
        comm.all_reduce(x, feedback=feedback, key="x")
    pairs = x.view(np.float32)  # as they travel: a key of 16 elements
    comm.all_reduce(pairs, codec="fp16", feedback=feedback, key="x")
    assert feedback.residual("x").size == 16
    np.testing.assert_array_equal(x, np.full(8, 2, np.complex64))


def rounded_once(inputs: list[np.ndarray], op: str, got: np.ndarray) -> bool:
    """Whether it is the exact result rounded to float32 on the way, and then once to its type."""
    wide = np.stack(inputs).astype(np.float64)
    exact = np.prod(wide, 0) if op == "prod" else np.sum(wide, 0) / (len(wide) * (op == "avg") or 1)
    size = np.abs(exact) if op == "prod" else np.sum(np.abs(wide), 0)
    info = ml_dtypes.finfo(got.dtype)
    exponents = np.floor(np.log2(np.maximum(np.abs(exact), float(info.smallest_normal))))
    half_ulp = 2.0 ** (exponents - 1) * float(info.eps)
    on_the_way = len(wide) * 2.0**-23 * size
    return bool(np.all(np.abs(got.astype(np.float64) - exact) <= half_ulp + on_the_way))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["direct", "star", "gather", "gather(ring)"])
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_sums_of_16_bit_floats_are_rounded_once(p: int, algorithm: str, dtype: str) -> None:
    counts = (1, 2000, 77)
    inputs = [[values(dtype, n, rank) for n in counts] for rank in range(p)]

    def body(comm: Communicator) -> dict[str, list[np.ndarray]]:
        found = {}
        for op in ("sum", "avg", "prod"):
            found[op] = [x.copy() for x in inputs[comm.rank]]
            comm.all_reduce(found[op], op=op, algorithm=algorithm)
        return found

    for segment in (0, 64):
        results = run(p, body, segment_bytes=segment)
        for op in ("sum", "avg", "prod"):
            for i in range(len(counts)):
                assert len({found[op][i].tobytes() for found in results}) == 1
                given = [inputs[rank][i] for rank in range(p)]
                assert rounded_once(given, op, results[0][op][i]), (op, counts[i], segment)


@pytest.mark.parametrize("collective", ["reduce_scatter", "reduce"])
def test_other_sums_of_16_bit_floats_are_rounded_once(collective: str) -> None:
    p, n = 5, 2000
    inputs = [values("float16", n, rank) for rank in range(p)]

    def body(comm: Communicator) -> None:
        for op in ("sum", "avg"):
            for algorithm in {"direct", "star"} & set(algorithms(collective)):
                got = getattr(comm, collective)(
                    inputs[comm.rank].copy(), op=op, algorithm=algorithm
                )
                own = slice(None)
                if collective == "reduce_scatter":
                    own = slice(comm.rank * n // p, (comm.rank + 1) * n // p)
                if got is not None:
                    assert rounded_once([x[own] for x in inputs], op, got)

    run(p, body)


@pytest.mark.parametrize("algorithm", ["direct", "star", "gather"])
@on_ranks(3)
def test_sums_of_float16_may_pass_its_range_on_the_way(comm: Communicator, algorithm: str) -> None:
    x = np.full(9, [65504, 65504, -65504][comm.rank], np.float16)
    np.testing.assert_array_equal(comm.all_reduce(x.copy(), algorithm=algorithm), 65504)
    x = np.full(9, 65504, np.float16)
    comm.all_reduce(x, op="avg", algorithm=algorithm)
    np.testing.assert_array_equal(x, 65504)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
@on_ranks(2)
def test_averages_of_integers_are_refused_and_not_cut_off(
    comm: Communicator, collective: str
) -> None:
    x = np.full(2, comm.rank, np.int64)  # whose average is 0.5
    with pytest.raises(InvalidArgument, match=r"'avg' of int64 .*; divide the sum, or average f"):
        getattr(comm, collective)(x, op="avg")
    np.testing.assert_array_equal(comm.all_reduce(x) / comm.size, 0.5)


@on_ranks(2)
def test_types_of_one_size_are_not_mixed(comm: Communicator) -> None:
    x = np.zeros(4, np.int16 if comm.rank == 0 else np.uint16)
    with pytest.raises(InvalidArgument, match=r"u?int16\[4\]"):
        comm.all_reduce(x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", algorithms())
@on_ranks(3)
def test_min_and_max_are_ieee_754_2019(comm: Communicator, dtype: str, algorithm: str) -> None:
    kind = dtype_of(dtype)
    rows = np.array([[0.0, -0.0, np.nan, 1], [-0.0, 0.0, 2, np.nan], [1, 1, 3, np.inf]], kind)
    low = comm.all_reduce(rows[comm.rank].copy(), op="min", algorithm=algorithm)
    assert np.array_equal(low.astype(float), [0, 0, np.nan, np.nan], equal_nan=True)
    assert np.signbit(low[:2].astype(float)).all()
    zeros = np.array([[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]], kind)
    high = comm.all_reduce(zeros[comm.rank].copy(), op="max", algorithm=algorithm)
    assert not np.signbit(high.astype(float)).any()


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("algorithm", [*IN_TREE, "auto"])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
@on_ranks()
def test_codecs_stay_close(comm: Communicator, codec: str, algorithm: str, p: int) -> None:
    bits = {"fp16": 11, "bf16": 8}[codec]

    for n in (0, 1, p + 1, 5000):
        inputs = [values("float32", n, rank) for rank in range(p)]
        for op in ("sum", "avg"):
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, op=op, algorithm=algorithm, codec=codec)
            bound = (p + 1) * 2.0**-bits * np.sum(np.abs(inputs), axis=0)
            assert np.all(np.abs(x - reduced(op, inputs)) <= bound)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    p=st.integers(1, 8),
    algorithm=st.sampled_from([*algorithms(), "auto", "hierarchical(ring,star)"]),
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    segment=st.sampled_from([0, 64, 4096]),
    seed=st.integers(0, 999),
)
def test_any_all_reduce_agrees_with_numpy(
    p: int, algorithm: str, counts: list[int], dtype: str, op: str, segment: int, seed: int
) -> None:
    if not is_defined(op, dtype):
        op = "sum"
    hosts = [[r for r in range(p) if r % 3 == k] for k in range(min(p, 3))]
    inputs = [[values(dtype, n, rank, seed) for n in counts] for rank in range(p)]

    def body(comm: Communicator) -> list[np.ndarray]:
        xs = [x.copy() for x in inputs[comm.rank]]
        return comm.all_reduce(xs, op=op, algorithm=algorithm)

    results = run(p, body, hosts=hosts, segment_bytes=segment)
    for i in range(len(counts)):
        assert len({result[i].tobytes() for result in results}) == 1
        given = [inputs[rank][i] for rank in range(p)]
        got, expected = results[0][i], reduced(op, given)
        if is_exact(op, got.dtype):
            np.testing.assert_array_equal(got, expected.astype(got.dtype))
            continue
        wide = np.stack(given).astype(expected.dtype)
        scale = np.abs(expected) if op == "prod" else np.sum(np.abs(wide), 0)
        bound = p * eps_of(got.dtype) * scale
        assert np.all(np.abs(got.astype(expected.dtype) - expected) <= bound)
