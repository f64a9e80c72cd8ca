"""resize and join: ranks leave and others come, in the same processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import gradwire
import numpy as np
import pytest
from elastic_job import SECRET, State, elastic_job, has, train
from gradwire import Communicator

over_transports = pytest.mark.parametrize("transports", [("shm",), ("tcp",), ("shm", "tcp")])


def ends(until: Any, **options: Any) -> Any:
    """Trains, and says where this rank ended."""

    def body(comm: Communicator) -> tuple[int, int, int, State]:
        comm, state = train(comm, until, **options)
        with comm:
            return comm.rank, comm.size, comm.epoch, state

    return body


@over_transports
def test_a_process_joins_living_ranks(transports: tuple[str, ...]) -> None:
    with elastic_job(transports) as job:
        members = job.start(2, ends(has(3)))
        guest = job.join(ends(has(3)))
        found = [each.value() for each in (*members, guest)]
    assert [each[:3] for each in found] == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert len({state for *_, state in found}) == 1


def dies_at(step: int, until: Any) -> Any:
    """Trains, and dies after so many steps."""

    def body(comm: Communicator) -> None:
        def kill_or(comm: Communicator, state: State) -> bool:
            if state.steps == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return bool(until(comm, state))

        train(comm, kill_or)

    return body


def agree(found: list[Any]) -> tuple[int, int]:
    """The size and epoch in which all ended alike, with each rank once."""
    assert [each[0] for each in found] == list(range(len(found)))
    assert len({each[1:] for each in found}) == 1, found
    assert found[0][1] == len(found)
    return found[0][1], found[0][2]


@over_transports
@pytest.mark.parametrize("victim", [0, 1])
def test_a_replacement_joins_after_a_death(transports: tuple[str, ...], victim: int) -> None:
    """Also when it is the rank with the door that dies."""

    def both(comm: Communicator, state: State) -> bool:
        return comm.size == 3 and comm.epoch >= 2

    def body(comm: Communicator) -> Any:
        return (dies_at(5, has(99)) if comm.rank == victim else ends(both))(comm)

    with elastic_job(transports) as job:
        members = job.start(3, body)
        assert members[victim].outcome().status == -signal.SIGKILL
        guest = job.join(ends(both))
        rest = [each for rank, each in enumerate(members) if rank != victim]
        size, epoch = agree([each.value() for each in (*rest, guest)])
    assert (size, epoch) == (3, 2)


def test_several_processes_join_at_once() -> None:
    with elastic_job() as job:
        members = job.start(1, ends(has(4)))
        guests = [job.join(ends(has(4))) for _ in range(3)]
        found = [each.value() for each in (*members, *guests)]
    agree(sorted(found))


def test_survivors_wait_for_enough_ranks() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 0:
            return dies_at(3, has(99))(comm)
        return ends(has(3), min_ranks=3, wait=60)(comm)

    with elastic_job() as job:
        members = job.start(3, body)
        assert members[0].outcome().died
        guest = job.join(ends(has(3), min_ranks=3))
        size, epoch = agree([each.value() for each in (*members[1:], guest)])
    assert (size, epoch) == (3, 1)  # the two never went on alone


def test_too_few_ranks_give_up_together() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 1:
            return dies_at(3, has(99))(comm)
        return ends(has(99), min_ranks=3, wait=0.2)(comm)

    with elastic_job() as job:
        members = job.start(3, body)
        errors = [each.outcome().error for each in (members[0], members[2])]
    for error in errors:
        assert isinstance(error, gradwire.RendezvousError)
        assert "2 ranks are here after wait=0.2 s, and min_ranks=3" in str(error)


def test_ranks_keep_their_numbers_in_the_job() -> None:
    """A replacement has the number that its launcher gave it, if nobody else has it."""

    def body(comm: Communicator) -> tuple[int, ...]:
        if comm.rank == 1 and not comm.joined:
            return dies_at(3, has(99))(comm)
        comm, _ = train(comm, lambda comm, _: comm.size == 3 and comm.epoch >= 2)
        with comm:
            return comm._mesh.job_ranks

    def replacement() -> Any:
        os.environ |= {"RANK": "1", "WORLD_SIZE": "3"}
        return body(gradwire.join(secret=SECRET))

    with elastic_job() as job:
        members = job.start(3, body)
        assert members[1].outcome().died
        guest = job.process(replacement)
        assert {each.value() for each in (members[0], members[2], guest)} == {(0, 2, 1)}


def test_all_ranks_may_resize_without_news() -> None:
    def body(comm: Communicator) -> list[Any]:
        seen = []
        for _ in range(3):
            x = np.ones(10)
            comm.all_reduce(x)
            assert (x == comm.size).all()
            comm = comm.resize()
            seen.append((comm.epoch, comm.size, comm.joined, comm.should_resize()))
        comm.close()
        return seen

    with elastic_job() as job:
        for each in job.start(3, body):
            assert each.value() == [(n, 3, 0, False) for n in (1, 2, 3)]
