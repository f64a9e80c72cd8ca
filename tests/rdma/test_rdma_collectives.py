"""Every collective and codec over a real RDMA device has the bits that it has in shared memory."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import gradwire
import numpy as np
import pytest
from device import PATIENCE, TRANSPORT, on_a_device
from gradwire import Communicator, ErrorFeedback

pytestmark = on_a_device

ROWS = (1, 77, 1_001)  # of 100 columns: sent inline, in one frame, in several
DENSE_TYPES = ("float64", "float16", "int32", "uint8")
Results = dict[str, str]


@functools.cache
def values(rank: int) -> np.ndarray:
    """Numbers of both signs."""
    return ((np.arange(ROWS[-1] * 100) * (7919 + 104_729 * rank)) % 1999 - 999) / 8


def matrix(rank: int, rows: int, dtype: str = "float32") -> np.ndarray:
    """Rank's input."""
    return values(rank)[: rows * 100].astype(dtype).reshape(rows, 100)


def digest(*arrays: Any) -> str:
    """Of the bits, and of the shapes. None is what a rank gets that is not the root."""
    return "; ".join(
        "None" if each is None else f"{each.dtype}{each.shape} {zlib.crc32(each.tobytes()):08x}"
        for each in arrays
    )


MOVED: dict[str, Callable[..., Any]] = {
    "all_gather": lambda comm, x, how: comm.all_gather(x, algorithm=how),
    "broadcast": lambda comm, x, how: comm.broadcast(x, root=1, algorithm=how),
    "gather": lambda comm, x, how: comm.gather(x, root=1, algorithm=how),
    "scatter": lambda comm, x, how: comm.scatter(
        np.concatenate([x] * comm.size) if comm.rank == 1 else None,
        root=1,
        out=np.empty_like(x),
        algorithm=how,
    ),
    "all_to_all": lambda comm, x, how: comm.all_to_all(
        np.concatenate([x + i for i in range(comm.size)]), algorithm=how
    ),
}
SUMMED: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda comm, x, **how: comm.all_reduce(x, **how),
    "reduce_scatter": lambda comm, x, **how: comm.reduce_scatter(
        np.concatenate([x] * comm.size), **how
    ),
    "reduce": lambda comm, x, **how: comm.reduce(x, root=1, **how),
}
CODED = [
    (name, algorithm, codec)
    for name, algorithms in {
        "all_reduce": ("ring", "binary_tree", "gather"),
        "reduce_scatter": ("ring",),
        "reduce": ("binary_tree",),
    }.items()
    for algorithm in algorithms
    for codec in gradwire.codecs()
    if codec != "none" and (codec != "lowrank" or (name, algorithm) == ("all_reduce", "ring"))
]


def moved(comm: Communicator) -> Iterator[tuple[str, str]]:
    for name, call in MOVED.items():
        for algorithm in gradwire.algorithms(name):
            for rows in ROWS:
                result = call(comm, matrix(comm.rank, rows), algorithm)
                yield f"{name} {algorithm}, {rows} rows", digest(result)


def summed(comm: Communicator) -> Iterator[tuple[str, str]]:
    for name, call in SUMMED.items():
        for algorithm in gradwire.algorithms(name):
            for rows in ROWS:
                result = call(comm, matrix(comm.rank, rows), algorithm=algorithm)
                yield f"{name} {algorithm}, {rows} rows", digest(result)
    for dtype in DENSE_TYPES:
        x = matrix(comm.rank, 500, dtype)
        yield f"max of {dtype}", digest(comm.all_reduce(x, op="max", algorithm="ring"))


def coded(comm: Communicator) -> Iterator[tuple[str, str]]:
    """Twice each, so that what the first call did not deliver goes with the second."""
    for name, algorithm, codec in CODED:
        for rows in ROWS[1:]:
            feedback = ErrorFeedback()
            how = {"codec": codec, "algorithm": algorithm, "feedback": feedback, "key": "x"}
            given = [SUMMED[name](comm, matrix(comm.rank, rows), **how) for _ in range(2)]
            bits = digest(*given, feedback.residual("x"))
            yield f"{name} {algorithm}, {codec}, {rows} rows", bits


def passed_on(comm: Communicator) -> Iterator[tuple[str, str]]:
    """From rank to rank, while calls in flight and parts of the communicator have the links too."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrays = [matrix(comm.rank, 500 + i) for i in range(6)]
    works = [comm.all_reduce(each, algorithm="ring", async_op=True) for each in arrays]
    got = matrix(0, 1_001)
    sent = comm.send(matrix(comm.rank, 1_001), after, async_op=True)
    comm.recv(got, before)
    for each in (*works, sent):
        each.wait()
    yield "point to point beside six calls", digest(got, *arrays)
    with comm.split(comm.rank % 2) as half:
        yield "half", digest(half.all_reduce(matrix(comm.rank, 77), algorithm="ring"))


def results(comm: Communicator) -> tuple[set[str], Results]:
    """What links this rank has, and the bits of all it was given."""
    found = dict[str, str]()
    for part in (moved, summed, coded, passed_on):
        found |= dict(part(comm))
    return set(comm.transports.values()), found


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_bits_are_those_of_shared_memory(p: int) -> None:
    for rank in range(p):
        values(rank)  # before the fork: this takes long
    expected = gradwire.spawn(results, p, transports=["shm"], timeout=PATIENCE)
    found = gradwire.spawn(results, p, transports=[TRANSPORT], timeout=PATIENCE)
    for rank in range(p):
        assert expected[rank][0] == {"shm"}
        assert found[rank][0] == {TRANSPORT}
        wanted, got = expected[rank][1], found[rank][1]
        assert [name for name in wanted | got if wanted.get(name) != got.get(name)] == [], rank
