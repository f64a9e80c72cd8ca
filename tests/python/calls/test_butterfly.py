"""algorithm="butterfly", and the names of MPI."""

from __future__ import annotations

import gradwire
import numpy as np
import pytest
import ranks
from gradwire import Communicator

SMALL, LARGE = 4, 4_000_000  # elements


@ranks.on_ranks(8)
def test_small_arrays_are_doubled_and_large_ones_halved(comm: Communicator) -> None:
    assert [comm._choices.butterfly(4 * elements) for elements in (SMALL, LARGE)] == [
        "recursive_doubling",
        "halving_doubling",
    ]


@pytest.mark.parametrize("elements", [SMALL, 100_000])
@pytest.mark.parametrize("codec", ["none", "int8"])
@ranks.on_ranks(4)
def test_a_butterfly_has_the_bits_of_what_it_stands_for(
    comm: Communicator, elements: int, codec: str
) -> None:
    x = np.random.default_rng(comm.rank).standard_normal(elements).astype(np.float32)
    stands_for = "halving_doubling"
    if codec == "none":
        stands_for = comm._choices.butterfly(x.nbytes)
    names = (*["butterfly"] * 4, stands_for)
    *found, expected = (
        comm.all_reduce(x, algorithm=each, codec=codec, out=np.empty_like(x)) for each in names
    )
    blocks = comm.all_gather(x[:4], algorithm="butterfly")
    same = all(np.array_equal(each, expected) for each in found)
    assert same
    assert len(blocks) == 4 * comm.size


def test_the_cost_model_predicts_the_faster_one() -> None:
    model = gradwire.init(rank=0, ranks=1, store="unix://none").cost_model
    both = [model.predict(each, 64, 8) for each in ("recursive_doubling", "halving_doubling")]
    assert model.predict("butterfly", 64, 8) == min(both)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("Get_rank", "MPI's Get_rank is rank here"),
        ("Get_size", "MPI's Get_size is size here"),
        ("Allreduce", "MPI's Allreduce is all_reduce() here"),
        ("bcast", "broadcast_object() for Python objects"),
        ("Iallreduce", "all_reduce() here, with async_op=True"),
        ("sort", "a Communicator has no 'sort'"),
    ],
)
def test_names_of_mpi_are_answered_with_ours(asked: str, told: str) -> None:
    with (
        gradwire.init(rank=0, ranks=1, store="unix://none") as comm,
        pytest.raises(AttributeError) as raised,
    ):
        getattr(comm, asked)
    assert told in str(raised.value)
