"""split: smaller communicators out of a larger one."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire import Communicator, InvalidArgument
from ranks import on_ranks, run


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_colors_part_the_ranks(transport: str) -> None:
    def body(comm: Communicator) -> tuple[int, list[int]]:
        with comm.split(comm.rank % 2) as part:
            gathered = part.all_gather(np.array([comm.rank])).tolist()
            assert set(part.transports.values()) == {transport}
            return part.rank, gathered

    evens, odds = [0, 2, 4], [1, 3]
    expected = [(0, evens), (0, odds), (1, evens), (1, odds), (2, evens)]
    assert run(5, body, transport=transport) == expected


@on_ranks(4)
def test_keys_order_the_ranks(comm: Communicator) -> None:
    key = [5, -1, 5, 0][comm.rank]
    with comm.split(7, key) as part:
        assert part.all_gather(np.array([comm.rank])).tolist() == [1, 3, 0, 2]


def test_no_color_no_communicator() -> None:
    def body(comm: Communicator) -> int | None:
        part = comm.split(None if comm.rank == 1 else 0)
        if part is None:
            return None
        with part:
            return part.size

    assert run(3, body) == [2, None, 2]


@pytest.mark.parametrize("p", [1, 3])
@on_ranks()
def test_a_rank_of_its_own(comm: Communicator, p: int) -> None:
    with comm.split(comm.rank) as part:
        assert (part.rank, part.size) == (0, 1)
        assert part.all_reduce(np.ones(2)).tolist() == [1, 1]


@on_ranks(4)
def test_parts_and_whole_work_beside_each_other(comm: Communicator) -> None:
    with comm.split(comm.rank // 2) as rows, comm.split(comm.rank % 2) as columns:
        for _ in range(3):
            x = np.array([1.0])
            work = comm.all_reduce(x, async_op=True)
            assert rows.all_reduce(np.array([comm.rank])) == 4 * (comm.rank // 2) + 1
            assert columns.all_reduce(np.array([comm.rank])) == 2 * (comm.rank % 2) + 2
            assert work.wait() == 4


def test_a_part_can_be_split_again() -> None:
    def body(comm: Communicator) -> list[int]:
        with comm.split(comm.rank // 4) as half, half.split(half.rank // 2) as quarter:
            return quarter.all_gather(np.array([comm.rank])).tolist()

    assert run(8, body) == [[0, 1]] * 2 + [[2, 3]] * 2 + [[4, 5]] * 2 + [[6, 7]] * 2


@on_ranks(3)
def test_the_parent_may_close_first(comm: Communicator) -> None:
    part = comm.split(0)
    comm.close()
    with part:
        assert part.all_reduce(np.ones(1)) == 3


def test_between_processes_on_two_transports() -> None:
    def body(comm: Communicator) -> list[str]:
        with comm.split(0, key=-comm.rank) as part:
            assert part.all_reduce(np.ones(1)) == 3
            return sorted(part.transports.values())

    def transport(low: int, high: int) -> str:
        return "shm" if (low, high) == (0, 1) else "tcp"

    assert run(3, body, transport=transport, processes=True)[2] == ["tcp", "tcp"]


@on_ranks(1)
def test_a_negative_color_is_refused(comm: Communicator) -> None:
    with pytest.raises(InvalidArgument, match="None"):
        comm.split(-1)
