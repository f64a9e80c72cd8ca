"""all_gather_v and all_to_all_v: blocks of sizes that only their senders know."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gradwire import Communicator, InvalidArgument
from ranks import on_ranks


def block(src: int, dst: int, dtype: Any = np.float32) -> np.ndarray:
    """A block of another shape for each pair; some are empty, one has no dimensions."""
    shape = ((src + dst) % 3 * 1000, 1 + src) if src != 1 or dst != 1 else ()
    return np.random.default_rng([src, dst]).integers(0, 99, shape).astype(dtype)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, bool, "U3", "datetime64[s]", ">i4"])
@on_ranks()
def test_every_rank_gets_all_blocks(comm: Communicator, p: int, dtype: Any) -> None:
    found = comm.all_gather_v(block(comm.rank, 1, dtype))
    for rank, each in enumerate(found):
        assert each.dtype == np.dtype(dtype)
        assert each.shape == block(rank, 1).shape
        np.testing.assert_array_equal(each, block(rank, 1, dtype))


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("transport", ["inproc", "tcp"])
@on_ranks()
def test_every_rank_gets_its_blocks(comm: Communicator, p: int, transport: str) -> None:
    found = comm.all_to_all_v([block(comm.rank, dst) for dst in range(p)])
    for src, each in enumerate(found):
        assert each.shape == block(src, comm.rank).shape
        np.testing.assert_array_equal(each, block(src, comm.rank))


@on_ranks(3)
def test_of_tensors_come_tensors(comm: Communicator) -> None:
    n = comm.rank
    for x in (torch.full((n, 2), n, dtype=torch.bfloat16), torch.tensor(n)):
        for rank, each in enumerate(comm.all_gather_v(x)):
            assert isinstance(each, torch.Tensor)
            assert each.dtype == x.dtype
            assert each.tolist() == ([[rank] * 2] * rank if x.ndim else rank)
    found = comm.all_to_all_v([torch.full((dst,), n) for dst in range(3)])
    assert [each.tolist() for each in found] == [[src] * n for src in range(3)]
    (first, *_) = comm.all_gather_v(np.zeros(n, ml_dtypes.bfloat16))
    assert first.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", ["all_gather_v", "all_to_all_v"])
@on_ranks(3)
def test_ranks_with_other_dtypes_are_named_on_all_ranks(comm: Communicator, name: str) -> None:
    x = np.ones(comm.rank, np.uint16 if comm.rank == 2 else np.int16)
    words = f"{name}: rank 0 gives int16 and rank 2 uint16"
    with pytest.raises(InvalidArgument, match=words):
        getattr(comm, name)(x if name == "all_gather_v" else [x] * 3)
    comm.barrier()


@pytest.mark.parametrize("given", [None, 3, np.ones(2), [np.ones(1)], [np.ones(1)] * 3, ["a", "b"]])
@on_ranks(2)
def test_all_to_all_v_takes_one_array_for_each_rank(comm: Communicator, given: Any) -> None:
    with pytest.raises(InvalidArgument, match="x"):
        comm.all_to_all_v(given)
    with pytest.raises(InvalidArgument, match="one dtype"):
        comm.all_to_all_v([np.ones(1), np.ones(1, np.int8)])
    comm.barrier()


@on_ranks(2)
def test_many_dimensions_travel_and_too_many_are_refused(comm: Communicator) -> None:
    found = comm.all_gather_v(np.ones((1,) * 32))
    assert [each.shape for each in found] == [(1,) * 32] * 2
    with pytest.raises(InvalidArgument, match="dimensions"):
        comm.all_gather_v(torch.ones((1,) * 40))
