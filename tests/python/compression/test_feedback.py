"""Error feedback from Python: keys, steps, what is refused, what is saved."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Communicator, ErrorFeedback, InvalidArgument
from numpy.typing import NDArray
from ranks import on_ranks, run

LOSSY = [name for name in gradwire.codecs() if name not in ("none", "lossless", "lowrank")]
N = 3000


def inputs(rank: int, call: int, count: int = N) -> NDArray[np.float32]:
    return np.random.default_rng([rank, call]).standard_normal(count).astype(np.float32)


class Signs(gradwire.codec.Codec):
    """The sign of each element times the mean magnitude."""

    def encode(self, x: NDArray[np.float32]) -> bytes:
        mean = np.abs(x, dtype=np.float32).mean(dtype=np.float32) if x.size else np.float32(0)
        return np.float32(mean).tobytes() + np.packbits(x >= 0).tobytes()

    def decode(self, payload: memoryview, count: int) -> NDArray[np.float32]:
        mean = np.frombuffer(payload[:4], np.float32)[0]
        signs = np.unpackbits(np.frombuffer(payload[4:], np.uint8), count=count)
        return np.where(signs == 1, mean, -mean).astype(np.float32)


CODECS: dict[str, Any] = {name: name for name in LOSSY} | {"Python": Signs()}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Any:
    return CODECS[request.param]


def conserved(comm: Communicator, calls: Callable[[ErrorFeedback, int], Any]) -> tuple[Any, ...]:
    """The sum of inputs, the delivered sum, and the residuals, after some calls."""
    feedback = ErrorFeedback()
    given, delivered = np.zeros(N), np.zeros(N)
    for call in range(5):
        given += inputs(comm.rank, call)
        delivered += calls(feedback, call)
    residual = np.concatenate([feedback.residual(key) for key in sorted(feedback.keys())])
    return given, delivered, residual


def expect_conserved(found: list[tuple[Any, ...]], delivered: Any = None) -> None:
    given = sum(each[0] for each in found)
    kept = sum(each[2].astype(np.float64) for each in found)
    if delivered is None:
        delivered = found[0][1]
        assert all(np.array_equal(each[1], delivered) for each in found)
    np.testing.assert_allclose(delivered + kept, given, atol=2e-4)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("p", [1, 2, 3])
@on_ranks()
def test_what_is_delivered_and_kept_adds_up(
    comm: Communicator, p: int, transport: str, codec: Any
) -> None:
    def call(feedback: ErrorFeedback, number: int) -> Any:
        x = inputs(comm.rank, number)
        return comm.all_reduce(x, codec=codec, feedback=feedback, key="w")

    expect_conserved(comm.all_gather_object(conserved(comm, call)))


@on_ranks(3)
def test_several_keys_in_one_call(comm: Communicator, codec: Any) -> None:
    keys = [("a", 1000), ("b", 0), ("c", 1999), ("d", 1)]

    def call(feedback: ErrorFeedback, number: int) -> Any:
        x = inputs(comm.rank, number)
        if number % 2:
            comm.all_reduce(x, codec=codec, feedback=feedback, keys=keys)
        else:
            parts = np.split(x, np.cumsum([count for _, count in keys])[:-1])
            comm.all_reduce(list(parts), codec=codec, feedback=feedback, keys=keys)
        return x

    expect_conserved(comm.all_gather_object(conserved(comm, call)))


@on_ranks(2)
def test_asynchronous_calls(comm: Communicator, codec: Any) -> None:
    def call(feedback: ErrorFeedback, number: int) -> Any:
        parts = np.split(inputs(comm.rank, number), 3)
        works = [
            comm.all_reduce(part, codec=codec, feedback=feedback, key=str(i), async_op=True)
            for i, part in enumerate(parts)
        ]
        return np.concatenate([work.wait() for work in works])

    expect_conserved(comm.all_gather_object(conserved(comm, call)))


@on_ranks(2)
def test_a_key_is_in_one_unfinished_call_only(comm: Communicator, codec: Any) -> None:
    feedback, token = ErrorFeedback(), np.empty(1)
    x, y = inputs(comm.rank, 0), inputs(comm.rank, 1)
    if comm.rank == 1:  # joins in when rank 0 has seen what it was to see
        comm.recv(token, 0)
    work = comm.all_reduce(x, codec=codec, feedback=feedback, key="w", async_op=True)
    if comm.rank == 0:
        with pytest.raises(InvalidArgument, match="'w' is in an unfinished call"):
            comm.all_reduce(y, codec=codec, feedback=feedback, key="w")
        with pytest.raises(InvalidArgument, match="'w' is in an unfinished call"):
            feedback.clear()
        comm.send(token, 1)
    work.wait()
    comm.all_reduce(y, codec=codec, feedback=feedback, key="w")


@on_ranks(3)
def test_reduce_scatter(comm: Communicator, codec: Any) -> None:
    def call(feedback: ErrorFeedback, number: int) -> Any:
        x = inputs(comm.rank, number)
        y = np.zeros(N, np.float32)
        block = comm.reduce_scatter(x, codec=codec, feedback=feedback, key="w")
        y.reshape(3, -1)[comm.rank] = block
        return y

    found = comm.all_gather_object(conserved(comm, call))
    expect_conserved(found, sum(each[1] for each in found))


@pytest.mark.parametrize("algorithm", ["auto", "gather"])
@on_ranks(3)
def test_keys_of_reduce_scatter_may_end_anywhere(
    comm: Communicator, algorithm: str, codec: Any
) -> None:
    keys = [("a", 700), ("b", 0), ("c", 1), ("d", 2299)]

    def call(feedback: ErrorFeedback, number: int) -> Any:
        y = np.zeros(N, np.float32)
        blocks, results = (np.split(each, [100, 2000]) for each in (inputs(comm.rank, number), y))
        results[comm.rank][:] = comm.reduce_scatter(
            blocks, codec=codec, algorithm=algorithm, feedback=feedback, keys=keys
        )
        return y

    found = comm.all_gather_object(conserved(comm, call))
    expect_conserved(found, sum(each[1] for each in found))


@pytest.mark.parametrize("algorithm", ["ring", "gather"])
@on_ranks(2)
def test_ranks_whose_keys_end_elsewhere_are_told(comm: Communicator, algorithm: str) -> None:
    keys = [("a", 1000 + comm.rank), ("b", 2000 - comm.rank)]
    with pytest.raises(InvalidArgument, match=r"rank 0 .*reduce_scatter"):
        comm.reduce_scatter(
            np.ones(N, np.float32),
            codec="onebit",
            algorithm=algorithm,
            feedback=ErrorFeedback(),
            keys=keys,
        )


def test_it_goes_on_in_parts_and_with_the_survivors(codec: Any) -> None:
    met, left = threading.Barrier(3), []

    def body(comm: Communicator) -> tuple[Any, ...]:
        feedback, given, delivered = ErrorFeedback(), np.zeros(N), np.zeros(N)

        def reduce(members: Communicator, call: int) -> None:
            x = inputs(comm.rank, call)
            y = members.all_reduce(x.copy(), codec=codec, feedback=feedback, key="w")
            given[:] += x
            delivered[:] += y / members.size  # of each rank its share

        reduce(comm, 0)
        with comm.split(comm.rank % 2) as part:
            reduce(part, 1)
        reduce(comm, 2)
        met.wait()
        if comm.rank == 2:
            left.append(feedback.residual("w"))
            comm.abort("leaves")
            return given, delivered, np.zeros(N)
        with pytest.raises(gradwire.Aborted):
            reduce(comm, 3)
        with comm.shrink() as rest:
            assert rest.size == 2
            if rest.rank == 0:
                feedback.add("w", left[0])
            reduce(rest, 4)
        return given, delivered, feedback.residual("w")

    found = run(3, body, transport="tcp")
    expect_conserved(found, sum(each[1] for each in found))


@on_ranks(3)
def test_reduce(comm: Communicator, codec: Any) -> None:
    def call(feedback: ErrorFeedback, number: int) -> Any:
        x = inputs(comm.rank, number)
        y = comm.reduce(x, root=1, codec=codec, feedback=feedback, key="w")
        return np.zeros(N) if y is None else y

    found = comm.all_gather_object(conserved(comm, call))
    expect_conserved(found, sum(each[1] for each in found))


@on_ranks(3)
def test_nan_anywhere_moves_no_residual(comm: Communicator, codec: Any) -> None:
    feedback = ErrorFeedback()
    comm.all_reduce(inputs(comm.rank, 0), codec=codec, feedback=feedback, key="w")
    before = feedback.residual("w")
    x = inputs(comm.rank, 1)
    if comm.rank == 1:
        x[-1] = np.nan
    comm.all_reduce(x, codec=codec, feedback=feedback, key="w")
    assert not bool(np.isfinite(x).all())
    assert np.array_equal(before, feedback.residual("w"))


@on_ranks(2)
def test_a_step_stands_or_falls_as_a_whole(comm: Communicator, codec: Any) -> None:
    feedback, moved = ErrorFeedback(), []
    for poison in (False, True):
        before = feedback.state_dict()
        feedback.begin_step()
        for key in "ab":
            x = inputs(comm.rank, 0)
            if poison and key == "b" and comm.rank == 0:
                x[0] = np.inf
            comm.all_reduce(x, codec=codec, feedback=feedback, key=key)
        moved.append(feedback.end_step())
        after = feedback.state_dict()
        moved.append(
            not all(np.array_equal(before[k]["residual"], after[k]["residual"]) for k in before)
        )
    assert moved == [True, False, False, False]


@on_ranks(2)
def test_saved_and_loaded_it_goes_on_with_the_same_bits(comm: Communicator, codec: Any) -> None:
    straight, saved = ErrorFeedback(), ErrorFeedback()
    for call in range(4):
        x, y = inputs(comm.rank, call), inputs(comm.rank, call)
        comm.all_reduce(x, codec=codec, feedback=straight, key="w")
        loaded = ErrorFeedback()
        loaded.load_state_dict(saved.state_dict())
        saved = loaded
        comm.all_reduce(y, codec=codec, feedback=saved, key="w")
        np.testing.assert_array_equal(x, y)
    assert np.array_equal(straight.residual("w"), saved.residual("w"))


@on_ranks(1)
def test_what_does_not_go_together_is_refused_with_the_reason(comm: Communicator) -> None:
    feedback, x = ErrorFeedback(), np.ones(4, np.float32)
    comm.all_reduce(x, codec="bf16", feedback=feedback, key="w")
    texts = []
    for options in (
        {"feedback": feedback},
        {"feedback": feedback, "key": "v", "keys": [("v", 4)]},
        {"feedback": feedback, "keys": [("v", 3)]},
        {"feedback": feedback, "keys": [("v", 2), ("v", 2)]},
        {"feedback": feedback, "keys": [("w", 2), ("u", 2)]},
        {"feedback": "yes", "key": "v"},
        {"feedback": feedback, "key": "v", "op": "max"},
        {"codec": Signs()},
        {"codec": Signs(), "feedback": False, "op": "min"},
        {"codec": "bf16", "op": "max"},
    ):
        with pytest.raises((InvalidArgument, gradwire.ScheduleError)) as raised:
            comm.all_reduce(x, **{"codec": "bf16", **options})
        texts.append(str(raised.value))
    with pytest.raises(InvalidArgument) as raised:
        comm.all_reduce(np.ones(4), feedback=feedback, key="v")
    texts.append(str(raised.value))
    with pytest.raises(gradwire.ScheduleError) as refused:
        comm.reduce(x, algorithm="gather")
    texts.append(str(refused.value))
    with pytest.raises(gradwire.ScheduleError) as refused:
        comm.broadcast(x, algorithm="gather")
    texts.append(str(refused.value))
    expected = [
        "needs key=",
        "not both",
        "3 elements, the arrays 4",
        "twice",
        "'w' has a residual of 4 elements, this call has 2",
        "no gradwire.ErrorFeedback",
        "sums and averages of float32",
        "feedback=False",
        "for op 'sum' or 'avg'",
        "for op 'sum' or 'avg'",
        "float32",
        "reduce by 'gather': without codec only all_reduce gathers; use auto, or a codec",
        "broadcast by 'gather': without codec only all_reduce gathers; use auto",
    ]
    for text, words in zip(texts, expected, strict=True):
        assert words in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": None}, "codec=None is no codec"),
        ({"codec": 8}, "codec=8 is no codec"),
        ({"codec": gradwire.codec.OneBit}, r"OneBit is a class: give an object of it, OneBit\(\)"),
        ({"codec": Signs}, "Signs is a class"),
        ({"feedback": ErrorFeedback(), "keys": ["a"]}, r"no list of \(name, count\)"),
        ({"feedback": ErrorFeedback(), "keys": ["ab"]}, r"no list of \(name, count\)"),
        ({"feedback": ErrorFeedback(), "keys": [("a", 4.0)]}, r"no list of \(name, count\)"),
        ({"feedback": ErrorFeedback(), "keys": 4}, r"no list of \(name, count\)"),
        ({"feedback": ErrorFeedback(), "keys": [("a", 5), ("b", -1)]}, "'b' -1 elements"),
        ({"codec": "fp16", "key": "a"}, "give feedback="),
        ({"codec": "none", "keys": [("a", 4)]}, "give feedback="),
        ({"codec": Signs(), "key": "a"}, "give feedback="),
    ],
)
@on_ranks(2)
def test_what_is_no_codec_or_key_is_refused(
    comm: Communicator, options: dict[str, Any], words: str
) -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(InvalidArgument, match=words):
        comm.all_reduce(x, **{"codec": "bf16", **options})
    comm.all_reduce(x)


@pytest.mark.parametrize("kind", gradwire.codec.NativeCodec.__subclasses__())
def test_every_parameter_of_a_codec_is_a_field_of_its_class(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match="it takes ") as raised:
        gradwire._core.Codec(f"{kind._name}:no_such_parameter=1")
    known = str(raised.value).rsplit("it takes ", 1)[1]
    fields = [each.name for each in dataclasses.fields(kind)]
    assert known == (", ".join(fields) or "none")


def test_every_class_is_of_a_codec_that_there_is() -> None:
    classes = {kind._name for kind in gradwire.codec.NativeCodec.__subclasses__()}
    assert classes <= set(gradwire.codecs())
    assert gradwire.codec.TopK(density=0.01, values="fp16").spec == "topk:density=0.01,values=fp16"


def test_residuals_can_be_added_and_scaled() -> None:
    feedback = ErrorFeedback()
    feedback.add("w", [1.0, 2.0])
    feedback.add("w", np.array([1.0, 0.0]))
    feedback.scale(0.5)
    assert feedback.residual("w").tolist() == [1.0, 1.0]
    assert feedback.keys() == {"w": 2}
    for change in (feedback.add, feedback.set, feedback.multiply):
        with pytest.raises(InvalidArgument, match="2 elements, this call has 3"):
            change("w", [1.0, 2.0, 3.0])
    feedback.multiply("w", [3.0, -1.0])
    assert feedback.residual("w").tolist() == [3.0, -1.0]
    feedback.set("w", np.array([4.0, 0.5]))
    assert feedback.residual("w").tolist() == [4.0, 0.5]
    feedback.clear()
    assert feedback.keys() == {}
    assert feedback.residual("w").size == 0
