"""broadcast_object, all_gather_object, gather_object, scatter_object."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from gradwire import Aborted, Communicator, InvalidArgument
from ranks import Outcome, on_ranks, outcomes, run

SIZES = pytest.mark.parametrize("p", [1, 2, 3, 5])


def thing(rank: int) -> dict[str, Any]:
    """An object of another size on every rank; some are larger than one frame."""
    return {"rank": rank, "array": np.arange(rank * 100_000), "text": "ü" * rank, "none": None}


def assert_is_thing(found: Any, rank: int) -> None:
    np.testing.assert_array_equal(found.pop("array"), np.arange(rank * 100_000))
    assert found == {"rank": rank, "text": "ü" * rank, "none": None}


@SIZES
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
@on_ranks()
def test_every_rank_gets_all_objects(comm: Communicator, p: int, transport: str) -> None:
    found = comm.all_gather_object(thing(comm.rank))
    assert len(found) == p
    for rank, each in enumerate(found):
        assert_is_thing(each, rank)


@SIZES
@on_ranks()
def test_every_rank_gets_the_roots_object(comm: Communicator, p: int) -> None:
    for root in range(p):
        mine = thing(root) if comm.rank == root else None
        found = comm.broadcast_object(mine, root=root)
        assert (found is mine) == (comm.rank == root)
        assert_is_thing(found, root)


@SIZES
@on_ranks()
def test_the_root_gets_all_objects(comm: Communicator, p: int) -> None:
    for root in range(p):
        found = comm.gather_object(thing(comm.rank), root=root)
        if comm.rank != root:
            assert found is None
            continue
        assert len(found) == p
        for rank, each in enumerate(found):
            assert_is_thing(each, rank)


@SIZES
@on_ranks()
def test_every_rank_gets_its_own_of_the_roots_objects(comm: Communicator, p: int) -> None:
    for root in range(p):
        mine = [thing(rank) for rank in range(p)] if comm.rank == root else None
        assert_is_thing(comm.scatter_object(mine, root=root), comm.rank)


def assert_all_refuse_and_go_on(ended: list[Outcome], words: str) -> None:
    for each in ended:
        assert each.error is None
        assert each.value.count(words) == 1, each.value


CALLS = {
    "broadcast": lambda comm, x: comm.broadcast_object(x, root=1),
    "all_gather": lambda comm, x: comm.all_gather_object(x),
    "gather": lambda comm, x: comm.gather_object(x, root=0),
    "scatter": lambda comm, x: comm.scatter_object([0, x, 0], root=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_pickled_is_an_error_on_all_ranks(name: str) -> None:
    def body(comm: Communicator) -> str:
        x = threading.Lock() if comm.rank == 1 else 3
        with pytest.raises(InvalidArgument) as raised:
            CALLS[name](comm, x)
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        return str(raised.value)

    words = f"{name}_object: rank 1 cannot pickle its object: TypeError: cannot pickle"
    assert_all_refuse_and_go_on(outcomes(3, body), words)


def test_rank_0_is_the_root_unless_another_is_given() -> None:
    def body(comm: Communicator) -> tuple[Any, ...]:
        mine = comm.rank + 5
        return (
            comm.broadcast_object(mine),
            comm.gather_object(mine),
            comm.scatter_object([mine, mine + 1]),
        )

    assert run(2, body) == [(5, [5, 6], 5), (5, None, 6)]


class Unspeakable:
    """Cannot be pickled, for a reason that UTF-8 has no bytes for."""

    def __reduce__(self) -> Any:
        raise ValueError("\udcff")


@on_ranks(2)
def test_a_reason_that_is_no_unicode_reaches_all_ranks(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="rank 1 cannot pickle its object: ValueError"):
        comm.all_gather_object(Unspeakable() if comm.rank == 1 else 3)
    assert comm.all_gather_object(comm.rank) == [0, 1]


@pytest.mark.parametrize("given", [None, [1, 2], [1, 2, 3, 4], "abc", {0: 1, 1: 2, 2: 3}])
def test_scatter_takes_one_object_for_each_rank(given: Any) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(InvalidArgument) as raised:
            comm.scatter_object(given if comm.rank == 2 else None, root=2)
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        return str(raised.value)

    words = "scatter_object: rank 2 gave objs="
    assert_all_refuse_and_go_on(outcomes(3, body), words)


class Unwelcome:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@on_ranks(2)
def test_what_cannot_be_unpickled_names_its_sender(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match=r"all_gather_object: what rank 1 sent cannot be"):
        comm.all_gather_object(Unwelcome() if comm.rank == 1 else 5)
    assert comm.all_gather_object(comm.rank) == [0, 1]


@on_ranks(2)
def test_objects_obey_the_timeout_and_the_communicators_end(comm: Communicator) -> None:
    for timeout in (0, "soon"):
        with pytest.raises(InvalidArgument, match="timeout="):
            comm.all_gather_object(1, timeout=timeout)
    with pytest.raises(InvalidArgument, match="root=2"):
        comm.broadcast_object(1, root=2)
    comm.close()
    with pytest.raises(Aborted):
        comm.all_gather_object(1)
