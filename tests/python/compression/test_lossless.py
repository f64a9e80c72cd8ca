"""The codec lossless: the bits of none, by all collectives and messages, in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument, algorithms, codec
from ranks import on_ranks, over_all, over_processes

DTYPES = ("float32", "float16", "bfloat16", "float64", "int32")
PACKED = DTYPES[:3]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(name: str, n: int, rank: int) -> np.ndarray:
    """Values of a normal distribution; where there is room some that are NaN, Inf, 0 or tiny."""
    random = np.random.default_rng([rank, n])
    if name == "int32":
        return random.integers(-(2**30), 2**30, n, np.int32)
    x = random.standard_normal(n).astype(dtype_of(name))
    if n > 200 and rank == 1:
        odd = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-7]
        x[17 : 17 + len(odd)] = odd
    return x


def with_payload(name: str) -> np.ndarray:
    """NaNs of every sign and payload, as a copy must keep them."""
    kind, exponent = (np.uint32, 0x7F800001) if name == "float32" else (np.uint16, 0x7F81)
    if name == "float16":
        exponent = 0x7C01
    sign = 1 << (8 * kind().itemsize - 1)
    bits = [exponent, exponent + 6, exponent | sign, exponent - 1, sign, 1]
    return np.array(bits * 50, kind).view(dtype_of(name))


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
@on_ranks()
def test_reductions_have_the_bits_of_none(comm: Communicator, p: int, transport: str) -> None:
    assert transport in comm.transports.values()
    for name in DTYPES:
        for n in (0, 1, 5, 300, 6000):
            x = values(name, n, comm.rank)
            for algorithm in ("auto", "gather", *algorithms()):
                results = [
                    comm.all_reduce(x.copy(), algorithm=algorithm, codec=each)
                    for each in ("none", "lossless")
                ]
                assert bits(results[0]) == bits(results[1]), (name, n, algorithm, p)
        blocks = values(name, 600 * p, comm.rank)
        for call in (comm.reduce_scatter, comm.reduce):
            plain, packed = (call(blocks.copy(), codec=each) for each in ("none", "lossless"))
            assert (plain is None) == (packed is None)
            assert plain is None or bits(plain) == bits(packed), name


def moves(comm: Communicator, x: np.ndarray, codec: str) -> list[np.ndarray | None]:
    """What comes of each collective that moves arrays."""
    root = comm.size - 1
    out = x[: len(x) // comm.size].copy()
    scattered = comm.scatter(*([x] if comm.rank == root else []), root=root, out=out, codec=codec)
    return [
        comm.broadcast(x.copy(), root=root, codec=codec),
        comm.all_gather(x, codec=codec),
        comm.gather(x, root=root, codec=codec),
        comm.all_to_all(x, codec=codec),
        scattered,
    ]


@over_all
@on_ranks(3)
def test_collectives_that_move_arrays_keep_every_bit(comm: Communicator, transport: str) -> None:
    for name in DTYPES:
        for x in [values(name, 900, comm.rank)] + [with_payload(name)] * (name in PACKED):
            plain, packed = (moves(comm, x, each) for each in ("none", "lossless"))
            for one, other in zip(plain, packed, strict=True):
                assert (one is None) == (other is None)
                assert one is None or bits(one) == bits(other), (name, transport)


@over_processes
@on_ranks(2)
def test_messages_keep_every_bit(comm: Communicator, transport: str) -> None:
    for name in PACKED:
        for x in (with_payload(name), values(name, 100_000, 1), values(name, 0, 1)):
            if comm.rank == 0:
                comm.send(x, 1, codec="lossless")
            else:
                got = np.empty_like(x)
                comm.recv(got, 0)
                assert bits(got) == bits(x), (name, transport)


def sent(comm: Communicator, call: Callable[..., Any], *given: Any) -> list[int]:
    """The bytes of a call without codec and with it."""
    found = []
    for each in ("none", "lossless"):
        before = comm.traffic.bytes_sent
        call(*given, codec=each)
        comm.barrier()
        found.append(comm.traffic.bytes_sent - before)
    return found


@pytest.mark.parametrize(
    ("name", "ratio"), [("bfloat16", 1.35), ("float16", 1.1), ("float32", 1.13)]
)
@on_ranks(2, transport="tcp")
def test_fewer_bytes_go_over_sockets(comm: Communicator, name: str, ratio: float) -> None:
    x = values(name, 100_000, 0)
    plain, packed = sent(comm, comm.all_reduce, x.copy())
    assert plain > ratio * packed
    if comm.rank == 0:
        plain, packed = sent(comm, comm.send, x, 1)
        assert plain > ratio * packed
    else:
        sent(comm, lambda codec: comm.recv(np.empty_like(x), 0))


@on_ranks(2, transport="tcp")
def test_what_cannot_shrink_takes_no_more_bytes(comm: Communicator) -> None:
    noise = np.random.default_rng(comm.rank).integers(0, 2**32, 50_000, np.uint32)
    plain, packed = sent(comm, comm.broadcast, noise.view(np.float32))
    assert packed <= plain


@on_ranks(2, transport="tcp")
def test_a_block_of_another_size_is_a_disagreement(comm: Communicator) -> None:
    counts = (1000, 900)
    x = values("float32", 2 * counts[comm.rank], 0)
    with pytest.raises(InvalidArgument, match=r"expects (3600|4000) bytes"):
        comm.all_to_all(x, codec="lossless")


@on_ranks(1)
def test_lossy_codecs_move_no_arrays(comm: Communicator) -> None:
    x = np.ones(4, np.float32)
    for call in (comm.broadcast, comm.all_gather, comm.gather, comm.all_to_all):
        with pytest.raises(InvalidArgument, match="lossless"):
            call(x, codec="int8")
    with pytest.raises(InvalidArgument, match="lossless"):
        comm.send(x, 0, codec=codec.OneBit())


def test_a_payload_is_exact() -> None:
    lossless = codec.get("lossless")
    for x in (with_payload("float32"), values("float32", 5000, 1)):
        payload = lossless.encode(x)
        assert len(payload) <= 1.01 * x.nbytes
        assert bits(lossless.decode(payload, x.shape)) == bits(x)
