"""Every collective against NumPy: algorithms × ranks × lengths, and dtypes × ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gradwire import (
    Communicator,
    ErrorFeedback,
    InvalidArgument,
    Schedule,
    ScheduleError,
    algorithms,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run

RANKS = (1, 2, 3, 4, 5, 8)
FLOATS = ("float32", "float64", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, "bool")
OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor", "land", "lor", "lxor")
IN_TREE = [name for name in algorithms() if name != "recursive_doubling"]
TRANSPORTS: dict[str, Any] = {
    "shm": "shm",
    "tcp": "tcp",
    "mixed": lambda low, high: "shm" if low // 2 == high // 2 else "tcp",
}


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


def whole(n: int, rank: int) -> np.ndarray:
    """Small integers: float sums of them are exact, in whatever order."""
    return np.random.default_rng([rank, n]).integers(-99, 99, n).astype(np.float32)


def summed(n: int, p: int) -> np.ndarray:
    return np.sum([whole(n, rank) for rank in range(p)], axis=0, dtype=np.float32)


def is_defined(op: str, dtype: str) -> bool:
    if dtype in INTEGERS:
        return True
    if dtype == "bool":
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
        total = np.sum(stack, axis=0, dtype=stack.dtype)
        return truncated(total, len(inputs)) if stack.dtype.kind in "iu" else total / len(inputs)
    options = {"dtype": stack.dtype} if op in ("sum", "prod") else {}
    return kind[op](stack, axis=0, **options)


def eps_of(dtype: np.dtype) -> float:
    return float((np if dtype.kind == "c" else ml_dtypes).finfo(dtype).eps)


def truncated(total: np.ndarray, by: int) -> np.ndarray:
    """The quotient, as Python's integers give it: no type of NumPy's holds all of them."""
    quotients = [abs(int(x)) // by * (1 if x > 0 else -1) for x in total.flat]
    return np.array(quotients, dtype=total.dtype).reshape(total.shape)


def check_all_reduce(comm: Communicator, algorithm: str, n: int) -> None:
    x = whole(n, comm.rank)
    comm.all_reduce(x, algorithm=algorithm)
    np.testing.assert_array_equal(x, summed(n, comm.size))


def check_reduce_scatter(comm: Communicator, algorithm: str, n: int) -> None:
    x = whole(n * comm.size, comm.rank)
    block = comm.reduce_scatter(x, algorithm=algorithm)
    expected = summed(n * comm.size, comm.size).reshape(comm.size, n)[comm.rank]
    np.testing.assert_array_equal(block, expected)
    np.testing.assert_array_equal(x, whole(n * comm.size, comm.rank))


def check_all_gather(comm: Communicator, algorithm: str, n: int) -> None:
    got = comm.all_gather(whole(n, comm.rank), algorithm=algorithm)
    np.testing.assert_array_equal(got, np.concatenate([whole(n, r) for r in range(comm.size)]))


def check_reduce(comm: Communicator, algorithm: str, n: int) -> None:
    for root in range(comm.size):
        x = whole(n, comm.rank)
        got = comm.reduce(x, root=root, algorithm=algorithm)
        if comm.rank == root:
            assert got is x
            np.testing.assert_array_equal(x, summed(n, comm.size))
        else:
            assert got is None
            np.testing.assert_array_equal(x, whole(n, comm.rank))


def check_broadcast(comm: Communicator, algorithm: str, n: int) -> None:
    for root in range(comm.size):
        x = whole(n, comm.rank)
        assert comm.broadcast(x, root=root, algorithm=algorithm) is x
        np.testing.assert_array_equal(x, whole(n, root))


def check_gather(comm: Communicator, algorithm: str, n: int) -> None:
    for root in range(comm.size):
        got = comm.gather(whole(n, comm.rank), root=root, algorithm=algorithm)
        if comm.rank == root:
            expected = np.concatenate([whole(n, r) for r in range(comm.size)])
            np.testing.assert_array_equal(got, expected)
        else:
            assert got is None


def check_scatter(comm: Communicator, algorithm: str, n: int) -> None:
    for root in range(comm.size):
        x = whole(n * comm.size, root) if comm.rank == root else None
        out = np.empty(n, np.float32)
        assert comm.scatter(x, root=root, out=out, algorithm=algorithm) is out
        expected = whole(n * comm.size, root).reshape(comm.size, n)[comm.rank]
        np.testing.assert_array_equal(out, expected)


def check_all_to_all(comm: Communicator, algorithm: str, n: int) -> None:
    got = comm.all_to_all(whole(n * comm.size, comm.rank), algorithm=algorithm)
    blocks = [whole(n * comm.size, r).reshape(comm.size, n)[comm.rank] for r in range(comm.size)]
    np.testing.assert_array_equal(got, np.concatenate(blocks))


CHECKS = {
    "all_reduce": check_all_reduce,
    "reduce_scatter": check_reduce_scatter,
    "all_gather": check_all_gather,
    "reduce": check_reduce,
    "broadcast": check_broadcast,
    "gather": check_gather,
    "scatter": check_scatter,
    "all_to_all": check_all_to_all,
}
CASES = [(name, how) for name in CHECKS for how in [*algorithms(name), "auto"]]


def lengths(p: int) -> list[int]:
    return sorted({0, 1, p - 1, p, 2 * p + 1, 1001, 65_537})


def check_lengths(comm: Communicator, collective: str, algorithm: str) -> None:
    for n in lengths(comm.size):
        CHECKS[collective](comm, algorithm, n)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_equals_numpy(collective: str, algorithm: str, p: int) -> None:
    run(p, check_lengths, collective, algorithm)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("p", [2, 5])
def test_equals_numpy_between_processes(p: int, transport: str) -> None:
    def body(comm: Communicator) -> None:
        for collective, algorithm in CASES:
            check_lengths(comm, collective, algorithm)

    run(p, body, transport=TRANSPORTS[transport], processes=True)


@pytest.mark.parametrize("transport", ["inproc", *TRANSPORTS])
def test_large_arrays(transport: str) -> None:
    def body(comm: Communicator) -> None:
        for algorithm in algorithms():
            check_all_reduce(comm, algorithm, 1_500_001)
        check_all_to_all(comm, "auto", 400_003)

    run(5, body, transport=TRANSPORTS.get(transport, "inproc"))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_ops(dtype: str, p: int) -> None:
    def body(comm: Communicator) -> None:
        for op in OPS:
            for algorithm in algorithms():
                check_op(comm, dtype, op, algorithm)

    run(p, body)


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
def test_bools_are_added_as_numpy_and_torch_add_them(algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        rows = np.array([[False, True, True], [False, False, True], [False, False, True]])
        for op, expected in (("sum", [0, 1, 1]), ("prod", [0, 0, 1]), ("bxor", [0, 1, 1])):
            x = comm.all_reduce(rows[comm.rank].copy(), op=op, algorithm=algorithm)
            assert x.dtype == bool
            np.testing.assert_array_equal(x, np.array(expected, bool))
            np.testing.assert_array_equal(x.view(np.uint8), expected)

    run(3, body)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_complex_numbers_are_added_and_averaged(collective: str) -> None:
    def body(comm: Communicator) -> None:
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

    run(3, body)


def test_complex_numbers_are_refused_where_they_have_no_order_and_by_codecs() -> None:
    def body(comm: Communicator) -> None:
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

    run(2, body)


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
def test_sums_of_float16_may_pass_its_range_on_the_way(algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        x = np.full(9, [65504, 65504, -65504][comm.rank], np.float16)
        np.testing.assert_array_equal(comm.all_reduce(x.copy(), algorithm=algorithm), 65504)
        x = np.full(9, 65504, np.float16)
        comm.all_reduce(x, op="avg", algorithm=algorithm)
        np.testing.assert_array_equal(x, 65504)

    run(3, body)


@pytest.mark.parametrize("algorithm", [*algorithms(), "gather"])
def test_averages_of_integers_truncate(algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        x = np.array([5, -5, 7, -1], np.int32) + (comm.rank == 1)
        comm.all_reduce(x, op="avg", algorithm=algorithm)
        np.testing.assert_array_equal(x, [5, -4, 7, 0])

    run(3, body)


def test_types_of_one_size_are_not_mixed() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(4, np.int16 if comm.rank == 0 else np.uint16)
        with pytest.raises(InvalidArgument, match=r"u?int16\[4\]"):
            comm.all_reduce(x)

    run(2, body)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", algorithms())
def test_min_and_max_are_ieee_754_2019(dtype: str, algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        kind = dtype_of(dtype)
        rows = np.array([[0.0, -0.0, np.nan, 1], [-0.0, 0.0, 2, np.nan], [1, 1, 3, np.inf]], kind)
        low = comm.all_reduce(rows[comm.rank].copy(), op="min", algorithm=algorithm)
        assert np.array_equal(low.astype(float), [0, 0, np.nan, np.nan], equal_nan=True)
        assert np.signbit(low[:2].astype(float)).all()
        zeros = np.array([[0.0, -0.0], [-0.0, 0.0], [-0.0, -0.0]], kind)
        high = comm.all_reduce(zeros[comm.rank].copy(), op="max", algorithm=algorithm)
        assert not np.signbit(high.astype(float)).any()

    run(3, body)


def test_out_leaves_the_input_alone() -> None:
    def body(comm: Communicator) -> None:
        x, out = whole(100, comm.rank), np.empty(100, np.float32)
        assert comm.all_reduce(x, out=out) is out
        np.testing.assert_array_equal(out, summed(100, 3))
        np.testing.assert_array_equal(x, whole(100, comm.rank))
        got = comm.reduce(x, root=1, out=out if comm.rank == 1 else None)
        assert (got is out) == (comm.rank == 1)
        np.testing.assert_array_equal(x, whole(100, comm.rank))

    run(3, body)


def test_blocks_keep_the_other_dimensions() -> None:
    def body(comm: Communicator) -> None:
        assert comm.all_gather(np.zeros((2, 3), np.int8)).shape == (6, 3)
        assert comm.all_gather(np.array(comm.rank)).tolist() == [0, 1, 2]
        assert comm.reduce_scatter(np.zeros((6, 4))).shape == (2, 4)
        assert comm.all_to_all(np.zeros((3, 5))).shape == (3, 5)
        assert comm.scatter(np.zeros((6, 2)), out=np.zeros((2, 2))).shape == (2, 2)

    run(3, body)


@pytest.mark.parametrize("p", [2, 3, 5])
def test_uneven_blocks(p: int) -> None:
    """Rank r's block has r² elements, so the first has none."""

    def body(comm: Communicator) -> None:
        me = comm.rank
        own = np.full(me * me, me, np.int32)
        outs = [np.empty(r * r, np.int32) for r in range(p)]
        assert comm.all_gather(own, out=outs) is outs
        for r, each in enumerate(outs):
            np.testing.assert_array_equal(each, np.full(r * r, r))

        blocks = [np.full(r * r, me + 1, np.int32) for r in range(p)]
        got = comm.reduce_scatter(blocks)
        np.testing.assert_array_equal(got, np.full(me * me, p * (p + 1) // 2))

        for each in outs:
            each[:] = -1
        assert comm.gather(own, root=p - 1, out=outs if me == p - 1 else None) in (None, outs)
        if me == p - 1:
            np.testing.assert_array_equal(
                np.concatenate(outs), np.repeat(*[range(p)], [r * r for r in range(p)])
            )

        out = np.empty(me * me, np.int32)
        comm.scatter([np.full(r * r, r, np.int32) for r in range(p)] if me == 0 else None, out=out)
        np.testing.assert_array_equal(out, own)

        sent = [np.full(me + r, 10 * me + r, np.int32) for r in range(p)]
        received = [np.empty(me + r, np.int32) for r in range(p)]
        comm.all_to_all(sent, out=received)
        for r, each in enumerate(received):
            np.testing.assert_array_equal(each, np.full(me + r, 10 * r + me))

    run(p, body)


def test_lists_without_out_are_refused_where_sizes_are_unknown() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="out="):
            comm.all_to_all([np.zeros(1), np.zeros(1)])
        if comm.rank == 1:
            with pytest.raises(InvalidArgument, match="rank 1 is not the root"):
                comm.scatter()

    run(2, body)


def test_coalesced_arrays_of_any_lengths() -> None:
    def body(comm: Communicator) -> None:
        for algorithm in algorithms():
            xs = [whole(n, comm.rank) for n in (7, 0, 1, 5000, 3)]
            comm.all_reduce(xs, algorithm=algorithm)
            for x in xs:
                np.testing.assert_array_equal(x, summed(len(x), 3))
            outs = tuple(np.empty(n, np.float32) for n in (4, 9))
            assert comm.all_reduce([whole(4, comm.rank), whole(9, comm.rank)], out=outs) is outs
            for x in outs:
                np.testing.assert_array_equal(x, summed(len(x), 3))
        pair = [whole(4, comm.rank), whole(6, comm.rank)]
        comm.broadcast(pair, root=2)
        np.testing.assert_array_equal(
            np.concatenate(pair), np.concatenate([whole(4, 2), whole(6, 2)])
        )

    run(3, body)


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 3], [1], [2]], [[3, 1, 0, 2]]])
@pytest.mark.parametrize("algorithm", ["hierarchical(ring,direct)", "hierarchical(star,ring)"])
def test_hierarchical(algorithm: str, hosts: list[list[int]]) -> None:
    def body(comm: Communicator) -> None:
        assert comm.hosts == tuple(map(tuple, hosts))
        for n in lengths(4):
            check_all_reduce(comm, algorithm, n)

    run(4, body, hosts=hosts)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("algorithm", [*IN_TREE, "auto"])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_codecs_stay_close(codec: str, algorithm: str, p: int) -> None:
    bits = {"fp16": 11, "bf16": 8}[codec]

    def body(comm: Communicator) -> None:
        for n in (0, 1, p + 1, 5000):
            inputs = [values("float32", n, rank) for rank in range(p)]
            for op in ("sum", "avg"):
                x = inputs[comm.rank].copy()
                comm.all_reduce(x, op=op, algorithm=algorithm, codec=codec)
                bound = (p + 1) * 2.0**-bits * np.sum(np.abs(inputs), axis=0)
                assert np.all(np.abs(x - reduced(op, inputs)) <= bound)

    run(p, body)


def test_a_codec_halves_the_bytes() -> None:
    def body(comm: Communicator) -> tuple[int, ...]:
        sent = []
        for codec in ("none", "fp16"):
            before = comm.traffic.bytes_sent
            comm.all_reduce(np.ones(100_000, np.float32), codec=codec, algorithm="ring")
            sent.append(comm.traffic.bytes_sent - before)
        return tuple(sent)

    for none, fp16 in run(4, body):
        assert none == pytest.approx(2 * 3 / 4 * 400_000, rel=0.01)
        assert fp16 == pytest.approx(none / 2, rel=0.01)


HEADER = 32
AUTO_AND_BOTH = ("auto", "gather", "direct")
GATHERED = {  # by auto, of up to so many ranks
    "topk": 16,
    "topk:density=0.01": 7,
    "topk:density=0.5": 2,
    "threshold": 16,
    "threshold:density=0.1": 2,
    "threshold:tau=90": 2,
}


def sends(
    comm: Communicator, codec: str, algorithm: str, n: int, collective: str = "all_reduce"
) -> int:
    """Payload bytes of one call, by this rank."""
    before = comm.traffic
    call = getattr(comm, collective)
    call(whole(n, comm.rank), codec=codec, algorithm=algorithm, feedback=False)
    frames = comm.traffic.frames_sent - before.frames_sent
    return comm.traffic.bytes_sent - before.bytes_sent - HEADER * frames


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_repeated_calls_send_what_the_closed_form_says(p: int) -> None:
    n = 16 * 2 * 3 * 8  # elements, cut evenly in cache lines

    def body(comm: Communicator, algorithm: str) -> tuple[float, float]:
        x, sent = np.zeros(n, np.float32), []
        for _ in range(4):
            before = comm.traffic
            comm.all_reduce(x, algorithm=algorithm)
            after = comm.traffic
            frames = after.frames_sent - before.frames_sent
            sent.append((after.bytes_sent - before.bytes_sent - HEADER * frames) / x.nbytes)
        return min(sent), max(sent)

    for algorithm in algorithms():
        form = Schedule.generate(algorithm, p).closed_form()
        least, most = zip(*run(p, body, algorithm, transport="shm"), strict=True)
        assert least == most
        assert form is not None
        assert max(most) == pytest.approx(form.max_sent), algorithm


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_auto_sends_little_whatever_the_density(p: int) -> None:
    n = 1 << 17

    def body(comm: Communicator) -> None:
        dense = sends(comm, "none", "direct", n)
        for codec, most in GATHERED.items():
            auto, gather, direct = (sends(comm, codec, each, n) for each in AUTO_AND_BOTH)
            assert auto == gather if p <= most else auto < gather, codec
            assert auto <= max(1.04 * direct, dense / 12), codec  # lengths are rounded up

    run(p, body)


@pytest.mark.parametrize(("collective", "best"), [("reduce_scatter", "direct"), ("reduce", "star")])
def test_auto_gathers_nothing_for_those_who_do_not_want_it(collective: str, best: str) -> None:
    def body(comm: Communicator) -> None:
        for codec in ("topk", "threshold", "onebit"):
            auto, direct, gather = (
                sends(comm, codec, each, 1 << 16, collective) for each in ("auto", best, "gather")
            )
            assert auto == direct < gather

    run(2, body)
    run(4, body)


@pytest.mark.parametrize(("codec", "words"), [("onebit", 2 / 32), ("int8", 2 / 4)])
@pytest.mark.parametrize("p", [2, 3, 5, 9])
def test_direct_sends_no_more_words_of_more_ranks(p: int, codec: str, words: float) -> None:
    n = 1 << 17
    scales = 2 * (n / 1024) * 8

    def body(comm: Communicator) -> None:
        for algorithm in ("auto", "direct"):
            assert sends(comm, codec, algorithm, n) <= 4 * words * n + scales

    run(p, body)


def test_what_a_codec_cannot_do_is_refused() -> None:
    def body(comm: Communicator) -> None:
        x = np.ones(4, np.float32)
        with pytest.raises(ScheduleError, match="recursive_doubling"):
            comm.all_reduce(x, codec="fp16", algorithm="recursive_doubling")
        with pytest.raises(InvalidArgument, match="float32"):
            comm.all_reduce(np.ones(4), codec="fp16")
        with pytest.raises(InvalidArgument, match="sum"):
            comm.all_reduce(x, codec="bf16", op="max")
        with pytest.raises(InvalidArgument, match="none, fp16, bf16"):
            comm.all_reduce(x, codec="fp15")
        with pytest.raises(InvalidArgument, match="sum, avg"):
            comm.all_reduce(x, op="mean")
        with pytest.raises(ScheduleError, match="ring"):
            comm.all_reduce(x, algorithm="rign")
        for root in (-1, 2):
            with pytest.raises(InvalidArgument, match=f"root={root}"):
                comm.broadcast(x, root=root)
        assert not comm.closed
        comm.all_reduce(x)
        assert x.tolist() == [2] * 4

    run(2, body)


def test_a_schedule_of_ones_own() -> None:
    gossip = (
        Schedule.builder("all_reduce", ranks=3, chunks=1, name="line")
        .reduce(0, src=2, dst=1, chunks=0)
        .reduce(1, src=1, dst=0, chunks=0)
        .copy(2, src=0, dst=1, chunks=0)
        .copy(3, src=1, dst=2, chunks=0)
        .build()
    )

    def body(comm: Communicator) -> None:
        for schedule in (gossip, Schedule.parse(gossip.dump())):
            x = whole(1000, comm.rank)
            comm.all_reduce(x, schedule=schedule)
            np.testing.assert_array_equal(x, summed(1000, 3))

    run(3, body)


def test_a_wrong_schedule_says_what_is_wrong() -> None:
    forgets = (
        Schedule.builder("all_reduce", ranks=3, chunks=1, name="forgets")
        .reduce(0, src=1, dst=0, chunks=0)
        .copy(1, src=0, dst=1, chunks=0)
        .build()
    )

    def body(comm: Communicator) -> None:
        x = np.ones(5, np.float32)
        with pytest.raises(ScheduleError, match="rank 2"):
            comm.all_reduce(x, schedule=forgets)
        with pytest.raises(ScheduleError, match="4 ranks"):
            comm.all_reduce(x, schedule=Schedule.generate("ring", 4))
        with pytest.raises(ScheduleError, match="reduce_scatter"):
            comm.all_reduce(x, schedule=Schedule.generate("ring", 3, collective="reduce_scatter"))
        assert not comm.closed

    run(3, body)


@pytest.mark.parametrize("p", [1, 2, 4, 17])  # in one round, and beyond
def test_barrier_waits_for_all(p: int) -> None:
    entered: list[int] = []

    def body(comm: Communicator) -> None:
        for turn in range(5 * comm.size):
            if comm.rank == turn % comm.size:
                entered.append(turn)
            assert comm.barrier() is None
            assert entered[-1] == turn
            comm.barrier()

    run(p, body)


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
