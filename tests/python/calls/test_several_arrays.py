"""reduce_scatter and all_gather of several arrays as one operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire import Communicator, ErrorFeedback, InvalidArgument, algorithms
from ranks import on_ranks

ROWS = [(1, 5), (3, 1), (0, 4), (2, 3000)]  # of each array's blocks


def arrays(seed: int, p: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 99, (p * n, m)).astype(np.float32) for n, m in ROWS]


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ["auto", *algorithms("reduce_scatter")])
@on_ranks()
def test_reduce_scatter(comm: Communicator, algorithm: str, p: int) -> None:
    mine = arrays(comm.rank, p)
    before = [each.copy() for each in mine]
    out = [np.empty((n, m), np.float32) for n, m in ROWS]
    assert comm.reduce_scatter(mine, out=out, algorithm=algorithm) is out
    for i, (n, _) in enumerate(ROWS):
        whole = sum(arrays(rank, p)[i] for rank in range(p))
        np.testing.assert_array_equal(out[i], whole[comm.rank * n : (comm.rank + 1) * n])
        np.testing.assert_array_equal(mine[i], before[i])


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ["auto", *algorithms("all_gather")])
@pytest.mark.parametrize("way", ["new", "out", "in place"])
@on_ranks()
def test_all_gather(comm: Communicator, way: str, algorithm: str, p: int) -> None:
    def block(each: np.ndarray, i: int, rank: int) -> np.ndarray:
        return each[rank * ROWS[i][0] : (rank + 1) * ROWS[i][0]]

    wanted = arrays(7, p)
    out = None if way == "new" else [np.zeros_like(each) for each in wanted]
    mine = [block(each, i, comm.rank) for i, each in enumerate(wanted)]
    if way == "in place":
        for i, each in enumerate(mine):
            block(out[i], i, comm.rank)[:] = each
        mine = [block(each, i, comm.rank) for i, each in enumerate(out)]
    found = comm.all_gather(mine, out=out, algorithm=algorithm)
    assert found is out or out is None
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@on_ranks(2)
def test_it_is_one_operation(comm: Communicator) -> None:
    before = comm.traffic.frames_sent
    comm.all_gather([np.ones(2), np.ones((3, 1))], algorithm="ring")
    comm.reduce_scatter([np.ones(2), np.ones((6, 1))], out=[np.ones(1), np.ones(3)])
    assert comm.traffic.frames_sent - before == 2


@on_ranks(2)
def test_tensors_in_the_background(comm: Communicator) -> None:
    x = [torch.ones(4), torch.full((2, 3), 2.0)]
    out = [torch.empty(2), torch.empty(1, 3)]
    work = comm.reduce_scatter(x, out=out, op="avg", async_op=True)
    assert [each.tolist() for each in work.wait()] == [[1, 1], [[2, 2, 2]]]
    found = comm.all_gather(out, async_op=True).wait()
    assert [each.tolist() for each in found] == [[1] * 4, [[2] * 3] * 2]
    assert all(isinstance(each, torch.Tensor) for each in found)


def refused(comm: Communicator, call: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call(comm)
    comm.barrier()


E = np.ones
WRONG: dict[str, tuple[Any, str]] = {
    "one x, two out": (lambda c: c.reduce_scatter([E(2)], out=[E(1), E(1)]), "x is 1 arrays"),
    "no list": (lambda c: c.reduce_scatter(E(2), out=[E(1)]), "x is a ndarray"),
    "lists in lists": (lambda c: c.reduce_scatter([[E(2)]], out=[E(1)]), r"x\[0\] is a list"),
    "uneven": (lambda c: c.reduce_scatter([E(3)], out=[E(1)]), r"x\[0\] has the shape"),
    "long": (lambda c: c.reduce_scatter([E(4)], out=[E(1)]), "has 2 elements and .*has 1"),
    "out twice": (lambda c: c.reduce_scatter([E(2)] * 2, out=[c.y, c.y]), "overlap"),
    "a codec": (
        lambda c: c.reduce_scatter([E(2)] * 2, out=[E(1), E(1)], codec="fp16"),
        "takes no codec",
    ),
    "feedback": (
        lambda c: c.reduce_scatter(
            [E(2, np.float32)] * 2,
            out=[E(1, np.float32), E(1, np.float32)],
            feedback=ErrorFeedback(),
            key="x",
        ),
        "no feedback",
    ),
    "one out": (lambda c: c.all_gather([E(2), E(1)], out=E(6)), "out is a ndarray"),
    "long out": (lambda c: c.all_gather([E(2), E(1)], out=[E(4), E(4)]), "has 2 elements"),
    "two dtypes": (lambda c: c.all_gather([E(2), E(1, np.int8)]), "one dtype"),
    "gather": (lambda c: c.gather([E(2), E(1)]), "x is a list"),
}


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2)
def test_what_does_not_fit_is_refused(comm: Communicator, name: str) -> None:
    comm.y = np.ones(1)
    refused(comm, *WRONG[name])
