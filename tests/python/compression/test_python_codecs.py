"""Codecs written in Python: transactions, failures, and what such a codec may do wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import (
    Communicator,
    ErrorFeedback,
    InvalidArgument,
    ScheduleError,
    TransportError,
    _core,
)
from gradwire._arrays.operands import operand
from numpy.typing import NDArray
from ranks import eventually, on_ranks, run

Floats = NDArray[np.float32]
P, N = 3, 300
BLOCK = N // P


class Halves(gradwire.codec.Codec):
    """Half of each element; NaN and Inf become numbers."""

    def encode(self, x: Floats) -> NDArray[Any]:
        return np.nan_to_num(x, posinf=1e30, neginf=-1e30) * np.float32(0.5)

    def decode(self, payload: memoryview, count: int) -> Floats:
        return np.frombuffer(payload, np.float32)


class Exact(gradwire.codec.Codec):
    biased = False

    def encode(self, x: Floats) -> bytes:
        return x.tobytes()

    def decode(self, payload: memoryview, count: int) -> Floats:
        return np.frombuffer(payload, np.float32)


def inputs(rank: int, count: int = N) -> Floats:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def all_reduce(comm: Communicator, x: Floats, **options: Any) -> Floats:
    return comm.all_reduce(x, out=np.empty_like(x), **options)


def reduce_scatter(comm: Communicator, x: Floats, **options: Any) -> Floats:
    return comm.reduce_scatter(x, **options)


def reduce(comm: Communicator, x: Floats, **options: Any) -> Floats | None:
    return comm.reduce(x.copy(), root=1, **options)


COLLECTIVES = (all_reduce, reduce_scatter, reduce)


# ---- Transactions ------------------------------------------------------------------------------


def nan(rank: int, x: Floats, feedback: ErrorFeedback) -> None:
    x[5] = np.nan if rank == 2 else x[5]


def inf(rank: int, x: Floats, feedback: ErrorFeedback) -> None:
    x[5] = -np.inf if rank == 1 else x[5]


def large_sum(rank: int, x: Floats, feedback: ErrorFeedback) -> None:
    x[5] = 3e38


def large_with_residual(rank: int, x: Floats, feedback: ErrorFeedback) -> None:
    if rank == 2:
        feedback.add("w", np.where(np.arange(N) == 5, np.float32(3e38), np.float32(0)))
        x[5] = 3e38


@pytest.mark.parametrize("codec", [Halves(), Exact()], ids=str)
@pytest.mark.parametrize("spoil", [nan, inf, large_sum, large_with_residual])
@pytest.mark.parametrize("collective", COLLECTIVES)
@on_ranks(P)
def test_what_is_not_finite_is_nan_for_all_and_moves_no_residual(
    comm: Communicator, collective: Callable[..., Any], spoil: Callable[..., None], codec: Any
) -> None:
    feedback, x = ErrorFeedback(), inputs(comm.rank)
    collective(comm, x, codec=codec, feedback=feedback, key="w")
    spoil(comm.rank, x, feedback)
    before = feedback.residual("w")
    y = collective(comm, x, codec=codec, feedback=feedback, key="w")
    same = np.array_equal(before, feedback.residual("w"))
    assert y is None or bool(np.isnan(y).all())
    assert same


@on_ranks(P)
def test_nan_in_is_nan_out_without_feedback_too(comm: Communicator) -> None:
    x = inputs(comm.rank)
    nan(comm.rank, x, ErrorFeedback())
    assert bool(np.isnan(comm.all_reduce(x, codec=Halves(), feedback=False)).all())


class Opposite(Exact):
    """Loses more than it is given."""

    def decode(self, payload: memoryview, count: int) -> Floats:
        return -np.frombuffer(payload, np.float32)


@on_ranks(2)
def test_a_loss_that_overflows_moves_no_residual(comm: Communicator) -> None:
    feedback, x = ErrorFeedback(), inputs(comm.rank)
    x[0] = 3e38 if comm.rank == 0 else 0
    comm.all_reduce(x, codec=Opposite(), feedback=feedback, key="w")
    assert bool(np.isnan(x).all())
    assert feedback.residual("w").size == 0


@on_ranks(P)
def test_a_block_may_hold_several_keys(comm: Communicator) -> None:
    keys = [("a", BLOCK - 7), ("b", 14), ("c", N - BLOCK - 7)]

    feedback, x = ErrorFeedback(), inputs(comm.rank)
    y = comm.reduce_scatter(x, codec=Halves(), feedback=feedback, keys=keys)
    found = comm.all_gather_object((y, np.concatenate([feedback.residual(key) for key, _ in keys])))
    given = sum(inputs(rank) for rank in range(P))
    delivered = np.concatenate([y for y, _ in found])
    np.testing.assert_allclose(delivered + sum(kept for _, kept in found), given, atol=1e-5)


@pytest.mark.parametrize("p", range(1, 10))
def test_ranks_agree_and_nothing_is_lost(p: int) -> None:
    counts = sorted({0, 1, p - 1, 1001})
    algorithms = ("auto", "gather", "gather(ring)")

    def body(comm: Communicator) -> tuple[list[bytes], Floats]:
        feedback, delivered, got = ErrorFeedback(), [], []
        for n in counts:
            key: dict[str, Any] = {"feedback": feedback, "key": str(n)}
            ys = [
                all_reduce(comm, inputs(comm.rank, n), codec=Halves(), algorithm=each, **key)
                for each in algorithms
            ]
            got += [y.tobytes() for y in ys]
            delivered.append(sum(ys) / p + feedback.residual(str(n)))
        return got, np.concatenate(delivered)

    found = run(p, body, transport=("inproc", "shm", "tcp")[p % 3])
    assert all(each[0] == found[0][0] for each in found)
    given = sum(np.concatenate([inputs(rank, n) for n in counts]) for rank in range(p))
    np.testing.assert_allclose(sum(each[1] for each in found), 3 * given, atol=1e-5 * p)


def test_neither_transport_nor_algorithm_changes_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_LINK", "1gbit,10us")
    algorithms = [
        "auto",
        "gather",
        *(f"gather({each})" for each in gradwire.algorithms("all_gather")),
    ]

    def results(comm: Communicator, algorithm: str) -> list[bytes]:
        feedback, found = ErrorFeedback(), []
        options: dict[str, Any] = {"codec": Halves(), "algorithm": algorithm, "feedback": feedback}
        for collective in (*COLLECTIVES, *COLLECTIVES):
            y = collective(comm, inputs(comm.rank), key=collective.__name__, **options)
            found.append(b"" if y is None else y.tobytes())
        return found + [feedback.residual(each.__name__).tobytes() for each in COLLECTIVES]

    def body(comm: Communicator) -> list[bytes]:
        first, *others = (results(comm, each) for each in algorithms)
        assert all(each == first for each in others)
        return first

    expected = run(P, body)
    for transport in ("shm", "tcp", "emulated"):
        assert run(P, body, transport=transport) == expected


# ---- Works that are dropped --------------------------------------------------------------------


def dropped_by_rank_0(comm: Communicator, feedback: ErrorFeedback) -> None:
    work = comm.all_reduce(
        inputs(comm.rank), codec=Halves(), feedback=feedback, key="w", async_op=True
    )
    if comm.rank == 1:
        work.wait()


@on_ranks(2)
def test_a_dropped_work_moves_the_residual_as_on_other_ranks(comm: Communicator) -> None:
    feedback, moved = ErrorFeedback(), []
    for _ in range(2):
        before = feedback.residual("w")
        dropped_by_rank_0(comm, feedback)
        comm.barrier()
        moved.append(not np.array_equal(before, feedback.residual("w")))
    assert moved == [True, True]


def test_close_moves_it_at_the_latest() -> None:
    kept = [ErrorFeedback(), ErrorFeedback()]
    run(2, lambda comm: dropped_by_rank_0(comm, kept[comm.rank]))
    for rank, feedback in enumerate(kept):
        np.testing.assert_array_equal(feedback.residual("w"), inputs(rank) / 2)


@on_ranks(2, transport="shm")
def test_survivors_keep_what_was_dropped_before_the_failure(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    work = comm.all_reduce(
        inputs(comm.rank), codec=Halves(), feedback=feedback, key="w", async_op=True
    )
    if comm.rank == 0:
        eventually(work.done)
        del work
        with pytest.raises(gradwire.Aborted):
            comm.recv(np.empty(1), 1)
    else:
        work.wait()
        comm.abort("on purpose")
    comm.shrink().close()
    assert feedback.residual("w").size == N


# ---- Failures ----------------------------------------------------------------------------------


class Undecodable(Exact):
    """Decodes its own rank's payload only, and that at submission."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, payload: memoryview, count: int) -> Floats:
        self.decoded += 1
        if self.decoded > 1:
            raise OSError("lost the table")
        return super().decode(payload, count)


class Vandal(Exact):
    def encode(self, x: Floats) -> bytes:
        x[0] = 7
        return x.tobytes()


@on_ranks(2)
def test_an_error_of_decode_is_raised_at_every_wait_and_frees_the_key(comm: Communicator) -> None:
    feedback, x = ErrorFeedback(), inputs(comm.rank)
    work = comm.all_reduce(x, codec=Undecodable(), feedback=feedback, key="w", async_op=True)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"rank 0 sent .* lost the table") as raised:
            work.wait()
        assert raised.value.peer == 0
    assert feedback.residual("w").size == 0
    comm.all_reduce(x, codec=Exact(), feedback=feedback, key="w")
    assert feedback.residual("w").size == N


@on_ranks(2)
def test_a_failed_call_frees_its_keys_whoever_holds_it(comm: Communicator) -> None:
    feedback, x = ErrorFeedback(), inputs(comm.rank)
    if comm.rank == 1:  # rank 0's calls wait for it
        comm.recv(np.empty(1), 0)
        return
    options: dict[str, Any] = {"codec": Halves(), "feedback": feedback}
    work = comm.all_reduce(x, key="a", async_op=True, **options)
    comm.send(np.empty(1), 1)
    comm.abort("on purpose")
    with pytest.raises(gradwire.Aborted) as raised:
        comm.all_reduce(x, key="b", **options)
    feedback.clear()  # refused while a key is in an unfinished call
    assert not any((work is None, raised is None))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"codec": Exact(), "algorithm": "ring"}, True),  # refused at submission
        ({"codec": Vandal()}, True),  # refused by encode
        ({"codec": Undecodable()}, False),
    ],
)
@on_ranks(1)
def test_a_refused_call_does_not_spoil_its_step(
    comm: Communicator, options: dict[str, Any], kept: bool
) -> None:
    feedback, x = ErrorFeedback(), inputs(comm.rank)
    feedback.begin_step()
    comm.all_reduce(x, codec=Halves(), feedback=feedback, key="a")
    with pytest.raises((gradwire.Error, ValueError)):
        comm.all_reduce(x, feedback=feedback, key="b", **options)
    assert feedback.end_step() == kept


@on_ranks(1)
def test_a_call_on_a_dead_communicator_spoils_its_step(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    feedback.begin_step()
    comm.abort("on purpose")
    with pytest.raises(gradwire.Aborted):
        comm.all_reduce(inputs(comm.rank), codec=Halves(), feedback=feedback, key="a")
    assert not feedback.end_step()


def payload_of(comm: Communicator, x: Floats, spoil: Callable[[bytes], bytes]) -> None:
    """Calls all_reduce with Exact, but for the payload."""
    payloads = _core.ExchangePayloads(None, [])
    body = spoil(struct.pack("<Q", x.nbytes) + x.tobytes())
    payloads.seal(body, finite=True, limit=1 << 20)
    address = operand(x, "x").address, x.size
    request = _core.Request("all_reduce", "float32", "sum", 0, [address], [address])
    request.exchange(payloads)
    request.label("Exact")
    request.check_shape(str(x.shape), False)
    comm._core.run(request, 10)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda payload: payload + b"\0", "longer than its parts"),
        (lambda payload: payload[:-1], "ends too soon"),
        (lambda payload: payload[:5], "ends too soon"),
        (lambda payload: b"\xff" * 8 + payload[8:], "ends too soon"),
    ],
)
@on_ranks(2)
def test_foreign_payloads_are_checked(
    comm: Communicator, spoil: Callable[[bytes], bytes], why: str
) -> None:
    x = inputs(comm.rank)
    if comm.rank == 1:
        payload_of(comm, x, spoil)
        return
    with pytest.raises(TransportError, match=f"rank 1 sent .*{why}"):
        comm.all_reduce(x, codec=Exact())


# ---- What a codec may do wrong -----------------------------------------------------------------


class Small(Exact):
    def max_bytes(self, count: int) -> int:
        return 4 * 10


@on_ranks(2)
def test_a_payload_beyond_max_bytes_is_refused_before_it_is_sent(comm: Communicator) -> None:
    feedback = ErrorFeedback()
    if comm.rank == 0:
        with pytest.raises(InvalidArgument, match=r"44 bytes, .* is 40"):
            all_reduce(comm, np.ones(11, np.float32), codec=Small(), feedback=feedback, key="w")
    x = np.ones(10, np.float32)
    assert all_reduce(comm, x, codec=Small(), feedback=feedback, key="w").tolist() == [2.0] * 10


@pytest.mark.parametrize("options", [{}, {"feedback": ErrorFeedback(), "key": "w"}])
@on_ranks(1)
def test_encode_cannot_write_to_the_callers_array(
    comm: Communicator, options: dict[str, Any]
) -> None:
    x = np.ones(4, np.float32)
    for _ in range(2):  # the key is free again
        with pytest.raises(ValueError, match="read-only"):
            comm.all_reduce(x, codec=Vandal(), **options)
    assert x.tolist() == [1] * 4


def test_arrays_of_another_type_are_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(InvalidArgument, match="needs float32, x is float64"):
            comm.all_reduce(np.ones(4), codec=Exact())

    run(1, body)


class Text(Exact):
    def encode(self, x: Floats) -> Any:
        return str(x)


@on_ranks(1)
def test_a_payload_is_bytes(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="encoded into a str"):
        comm.all_reduce(np.ones(4, np.float32), codec=Text())


@on_ranks(2)
def test_empty_arrays_have_payloads_too(comm: Communicator) -> None:
    assert all_reduce(comm, np.empty(0, np.float32), codec=Halves(), feedback=False).size == 0


class Watching(Exact):
    def __init__(self) -> None:
        self.seen: list[memoryview] = []

    def decode(self, payload: memoryview, count: int) -> Floats:
        self.seen.append(payload)
        return super().decode(payload, count)


@on_ranks(P)
def test_payloads_are_decoded_where_they_lie(comm: Communicator) -> None:
    codec = Watching()
    comm.all_reduce([inputs(comm.rank), inputs(comm.rank)], codec=codec)
    assert len(codec.seen) == 2 * P
    assert len({id(each.obj) for each in codec.seen}) == 1
    assert all(each.readonly for each in codec.seen)


# ---- How they travel ---------------------------------------------------------------------------


def star() -> gradwire.Schedule:
    builder = gradwire.Schedule.builder("all_reduce", ranks=2, chunks=1, name="mine")
    builder.reduce(0, src=1, dst=0, chunks=0)
    builder.copy(1, src=0, dst=1, chunks=0)
    return builder.build()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": Exact(), "algorithm": "ring"}, "'Exact'.*algorithm 'ring'.*gather"),
        ({"codec": Exact(), "schedule": star()}, "'Exact'.*schedule 'mine'.*leave"),
        (
            {"codec": "fp16", "algorithm": "gather", "schedule": star()},
            "'fp16'.*schedule 'mine'.*the schedule or 'gather'",
        ),
        ({"codec": "fp16", "algorithm": "gather(pigeon)"}, "pigeon"),
        ({"codec": Exact(), "algorithm": "gather(pigeon)"}, "pigeon"),
        ({"codec": "fp16", "algorithm": "gather(gather)"}, "no algorithm 'gather'"),
        ({"codec": Exact(), "algorithm": "gather(gather)"}, "no algorithm 'gather'"),
        ({"codec": "none", "algorithm": "gather(gather)"}, "no algorithm 'gather'"),
    ],
)
@on_ranks(2)
def test_gathered_payloads_refuse_what_adds_on_the_way(
    comm: Communicator, options: dict[str, Any], words: str
) -> None:
    feedback, x = ErrorFeedback(), inputs(comm.rank)
    with pytest.raises(ScheduleError, match=words):
        comm.all_reduce(x, feedback=feedback, key="w", **options)
    comm.all_reduce(x, codec=options["codec"], feedback=feedback, key="w")


@pytest.mark.parametrize("algorithm", ["auto", "gather", "gather(ring)"])
@on_ranks(P)
def test_gathered_payloads_travel_as_asked(comm: Communicator, algorithm: str) -> None:
    expected = (inputs(0) + inputs(1)) + inputs(2)
    found = all_reduce(comm, inputs(comm.rank), codec=Exact(), algorithm=algorithm)
    np.testing.assert_array_equal(found, expected)
