"""Every collective against NumPy: algorithms × ranks × lengths; what is sent and what refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import gradwire
import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, Schedule, ScheduleError, algorithms
from gradwire._calls.choices import Choices
from ranks import nightly, on_ranks, run

RANKS = (1, 2, 3, 4, *nightly(5, 8))
TRANSPORTS: dict[str, Any] = {
    "shm": "shm",
    "tcp": "tcp",
    "mixed": lambda low, high: "shm" if low // 2 == high // 2 else "tcp",
}


def whole(n: int, rank: int) -> np.ndarray:
    """Small integers: float sums of them are exact, in whatever order."""
    return np.random.default_rng([rank, n]).integers(-99, 99, n).astype(np.float32)


def summed(n: int, p: int) -> np.ndarray:
    return np.sum([whole(n, rank) for rank in range(p)], axis=0, dtype=np.float32)


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


@on_ranks(3)
def test_out_leaves_the_input_alone(comm: Communicator) -> None:
    x, out = whole(100, comm.rank), np.empty(100, np.float32)
    assert comm.all_reduce(x, out=out) is out
    np.testing.assert_array_equal(out, summed(100, 3))
    np.testing.assert_array_equal(x, whole(100, comm.rank))
    got = comm.reduce(x, root=1, out=out if comm.rank == 1 else None)
    assert (got is out) == (comm.rank == 1)
    np.testing.assert_array_equal(x, whole(100, comm.rank))


@on_ranks(3)
def test_blocks_keep_the_other_dimensions(comm: Communicator) -> None:
    assert comm.all_gather(np.zeros((2, 3), np.int8)).shape == (6, 3)
    assert comm.all_gather(np.array(comm.rank)).tolist() == [0, 1, 2]
    assert comm.reduce_scatter(np.zeros((6, 4))).shape == (2, 4)
    assert comm.all_to_all(np.zeros((3, 5))).shape == (3, 5)
    assert comm.scatter(np.zeros((6, 2)), out=np.zeros((2, 2))).shape == (2, 2)


@pytest.mark.parametrize("p", [2, 3, 5])
@on_ranks()
def test_uneven_blocks(comm: Communicator, p: int) -> None:
    """Rank r's block has r² elements, so the first has none."""
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


@on_ranks(2)
def test_lists_without_out_are_refused_where_sizes_are_unknown(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="out="):
        comm.all_to_all([np.zeros(1), np.zeros(1)])
    if comm.rank == 1:
        with pytest.raises(InvalidArgument, match="rank 1 is not the root"):
            comm.scatter()


@on_ranks(3)
def test_coalesced_arrays_of_any_lengths(comm: Communicator) -> None:
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
    np.testing.assert_array_equal(np.concatenate(pair), np.concatenate([whole(4, 2), whole(6, 2)]))


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 3], [1], [2]], [[3, 1, 0, 2]]])
@pytest.mark.parametrize("algorithm", ["hierarchical(ring,direct)", "hierarchical(star,ring)"])
def test_hierarchical(algorithm: str, hosts: list[list[int]]) -> None:
    def body(comm: Communicator) -> None:
        assert comm.hosts == tuple(map(tuple, hosts))
        for n in lengths(4):
            check_all_reduce(comm, algorithm, n)

    run(4, body, hosts=hosts)


@on_ranks(4)
def test_a_codec_halves_the_bytes(comm: Communicator) -> None:
    sent = []
    for codec in ("none", "fp16"):
        before = comm.traffic.bytes_sent
        comm.all_reduce(np.ones(100_000, np.float32), codec=codec, algorithm="ring")
        sent.append(comm.traffic.bytes_sent - before)
    none, fp16 = tuple(sent)
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
@on_ranks()
def test_auto_sends_little_whatever_the_density(comm: Communicator, p: int) -> None:
    n = 1 << 17

    dense = sends(comm, "none", "direct", n)
    for codec, most in GATHERED.items():
        auto, gather, direct = (sends(comm, codec, each, n) for each in AUTO_AND_BOTH)
        assert auto == gather if p <= most else auto < gather, codec
        assert auto <= max(1.04 * direct, dense / 12), codec  # lengths are rounded up


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
@on_ranks()
def test_direct_sends_no_more_words_of_more_ranks(
    comm: Communicator, p: int, codec: str, words: float
) -> None:
    n = 1 << 17
    scales = 2 * (n / 1024) * 8

    for algorithm in ("auto", "direct"):
        assert sends(comm, codec, algorithm, n) <= 4 * words * n + scales


@on_ranks(2)
def test_what_a_codec_cannot_do_is_refused(comm: Communicator) -> None:
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


@on_ranks(3)
def test_a_schedule_of_ones_own(comm: Communicator) -> None:
    gossip = (
        Schedule.builder("all_reduce", ranks=3, chunks=1, name="line")
        .reduce(0, src=2, dst=1, chunks=0)
        .reduce(1, src=1, dst=0, chunks=0)
        .copy(2, src=0, dst=1, chunks=0)
        .copy(3, src=1, dst=2, chunks=0)
        .build()
    )

    for schedule in (gossip, Schedule.parse(gossip.dump())):
        x = whole(1000, comm.rank)
        comm.all_reduce(x, schedule=schedule)
        np.testing.assert_array_equal(x, summed(1000, 3))


@on_ranks(3)
def test_a_wrong_schedule_says_what_is_wrong(comm: Communicator) -> None:
    forgets = (
        Schedule.builder("all_reduce", ranks=3, chunks=1, name="forgets")
        .reduce(0, src=1, dst=0, chunks=0)
        .copy(1, src=0, dst=1, chunks=0)
        .build()
    )

    x = np.ones(5, np.float32)
    with pytest.raises(ScheduleError, match="rank 2"):
        comm.all_reduce(x, schedule=forgets)
    with pytest.raises(ScheduleError, match="4 ranks"):
        comm.all_reduce(x, schedule=Schedule.generate("ring", 4))
    with pytest.raises(ScheduleError, match="reduce_scatter"):
        comm.all_reduce(x, schedule=Schedule.generate("ring", 3, collective="reduce_scatter"))
    assert not comm.closed


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


def test_a_barrier_takes_what_auto_takes_and_asks_for_few_ranks_alone() -> None:
    model = gradwire.CostModel()
    assert Choices([range(8)], model).barrier_algorithm == model.choose(0, 8)[0]
    unasked = mock.Mock()
    assert Choices([range(65)], unasked).barrier_algorithm == "recursive_doubling"
    unasked._core.choose.assert_not_called()
