"""Replicas that differ by one bit drift apart: all ranks get the same bits, and in every run."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from gradwire import Communicator, algorithms, codecs
from ranks import nightly, on_ranks, run, some

P = 5
COUNTS = (1, 3, 1000, 70_001)
ALGORITHMS = [*algorithms(), "hierarchical(ring,direct)", "auto"]
LOSSY_ALGORITHMS = [each for each in ALGORITHMS if each != "recursive_doubling"]


def chosen(algorithm: str, codec: str) -> bool:
    """Every algorithm without a codec and with one, and every codec with an algorithm."""
    turn = codecs().index(codec) % len(LOSSY_ALGORITHMS)
    return codec == "none" or algorithm == LOSSY_ALGORITHMS[turn]


CASES = some(
    [
        (algorithm, codec)
        for algorithm in ALGORITHMS
        for codec in codecs()
        if codec == "none" or algorithm in LOSSY_ALGORITHMS
    ],
    chosen,
)


def noise(n: int, rank: int) -> np.ndarray:
    """Noise of many magnitudes, so that every order of additions has its own bits."""
    rng = np.random.default_rng([rank, n])
    return (rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 3, n)).astype(np.float32)


def array(codec: str, n: int, rank: int) -> np.ndarray:
    """An array of about n elements; a matrix for the codec that factors them."""
    x = noise(n, rank)
    rows = math.isqrt(n) if codec == "lowrank" else 1
    return x if rows == 1 else x[: n // rows * rows].reshape(rows, -1)


def digests(comm: Communicator, algorithm: str, codec: str) -> list[str]:
    found = []
    for op in ("sum", "avg"):
        for n in COUNTS:
            x = array(codec, n, comm.rank)
            comm.all_reduce(x, op=op, algorithm=algorithm, codec=codec, feedback=False)
            found.append(hashlib.sha256(x.tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("p", [4, *nightly(2, 3, P, 8)])
@pytest.mark.parametrize(("algorithm", "codec"), CASES)
def test_all_ranks_and_runs_get_the_same_bits(algorithm: str, codec: str, p: int) -> None:
    hosts = [list(range(p // 2)), list(range(p // 2, p))]
    first = run(p, digests, algorithm, codec, hosts=hosts)
    assert all(each == first[0] for each in first)
    assert run(p, digests, algorithm, codec, hosts=hosts) == first


@pytest.mark.parametrize(("algorithm", "codec"), CASES)
def test_transports_and_messages_do_not_change_the_bits(algorithm: str, codec: str) -> None:
    setting: dict[str, Any] = {"hosts": [[0, 1, 2], [3, 4]]}
    expected = run(P, digests, algorithm, codec, **setting)
    assert all(each == expected[0] for each in expected)
    for transport in ("shm", "tcp"):
        assert run(P, digests, algorithm, codec, transport=transport, **setting) == expected
    small = run(P, digests, algorithm, codec, segment_bytes=4096, max_message=65536, **setting)
    assert small == expected


def test_the_noise_tells_orders_apart() -> None:
    """The tests above could not fail otherwise."""
    found = {algorithm: run(P, digests, algorithm, "none")[0] for algorithm in ("ring", "star")}
    assert found["ring"] != found["star"]


@pytest.mark.parametrize("codec", codecs())
@on_ranks(P)
def test_lists_of_arrays_agree_too(comm: Communicator, codec: str) -> None:
    xs = [array(codec, n, comm.rank) for n in COUNTS]
    comm.all_reduce(xs, codec=codec, feedback=False)
    found = comm.all_gather_object([x.tobytes() for x in xs])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("collective", ["all_gather", "broadcast"])
def test_moved_bits_are_not_changed(collective: str) -> None:
    """NaNs with payloads, denormals and all."""
    bits = np.random.default_rng(0).integers(0, 2**32, (P, 1000), np.uint32)

    def body(comm: Communicator) -> bytes:
        x = bits[comm.rank].view(np.float32).copy()
        return getattr(comm, collective)(x).tobytes()

    expected = bits.tobytes() if collective == "all_gather" else bits[0].tobytes()
    assert run(P, body) == [expected] * P
