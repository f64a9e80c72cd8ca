"""resize and join: ranks leave and others come, in the same processes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import signal
from dataclasses import replace
from typing import Any

import gradwire
import numpy as np
import pytest
from census import held
from elastic_job import SECRET, State, elastic_job, has, train
from gradwire import Communicator
from gradwire._bootstrap.survivor_links import SurvivorLinks
from ranks import eventually, nightly, reserved_store

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
        joiner = job.join(ends(has(3)))
        found = [each.value() for each in (*members, joiner)]
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


def has_again(size: int) -> Any:
    """Whether there are so many ranks, after a change."""
    return lambda comm, _: comm.size == size and comm.epoch > 0


@over_transports
@pytest.mark.parametrize("victim", [0, 1])
def test_a_replacement_joins_after_a_death(transports: tuple[str, ...], victim: int) -> None:
    """Also when it is the rank with the listener that dies."""
    both = has_again(3)

    def body(comm: Communicator) -> Any:
        return (dies_at(5, has(99)) if comm.rank == victim else ends(both))(comm)

    with elastic_job(transports) as job:
        members = job.start(3, body)
        assert members[victim].outcome().status == -signal.SIGKILL
        joiner = job.join(ends(both))
        rest = [each for rank, each in enumerate(members) if rank != victim]
        size, epoch = agree([each.value() for each in (*rest, joiner)])
    assert size == 3
    assert epoch in (1, 2)  # the survivors may have gone on alone before


def test_several_processes_join_at_once() -> None:
    with elastic_job() as job:
        members = job.start(1, ends(has(4)))
        joiners = [job.join(ends(has(4))) for _ in range(3)]
        found = [each.value() for each in (*members, *joiners)]
    agree(sorted(found))


def test_survivors_wait_for_enough_ranks() -> None:
    def body(comm: Communicator) -> Any:
        if comm.rank == 0:
            return dies_at(3, has(99))(comm)
        return ends(has_again(3), min_ranks=3, wait=60)(comm)

    with elastic_job() as job:
        members = job.start(3, body)
        assert members[0].outcome().died
        joiner = job.join(ends(has_again(3), min_ranks=3))
        size, epoch = agree([each.value() for each in (*members[1:], joiner)])
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


def killed(victims: set[int], **options: Any) -> list[Any]:
    """The errors of four ranks, or the sizes in which they ended, where some are killed at once."""

    def body(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(gradwire.Error):
            comm.all_reduce(np.ones(10))
            comm.all_reduce(np.ones(10))
        with comm.resize(**options) as after:
            return after.size

    with elastic_job() as job:
        members = job.start(4, body)
        ended = [each.outcome() for each in members]
    for victim in victims:
        assert ended[victim].status == -signal.SIGKILL
    return [each.error or each.value for r, each in enumerate(ended) if r not in victims]


@pytest.mark.parametrize(
    ("victims", "words"),
    [
        ({0, 1, 2}, "rank 3: 1 of 4 ranks is no majority; pass min_ranks=1"),
        ({1, 2, 3}, "rank 0: 1 of 4 ranks is no majority; pass min_ranks=1"),
        ({0, 1}, " of 4 ranks"),
    ],
    ids=str,
)
def test_a_minority_ends(victims: set[int], words: str) -> None:
    for error in killed(victims):
        assert isinstance(error, gradwire.RendezvousError), error
        assert "no majority; pass min_ranks=" in str(error)
        assert words in str(error)


@pytest.mark.parametrize("victims", [{1, 3}, {0}], ids=str)
def test_a_majority_goes_on_and_so_does_the_half_with_rank_0(victims: set[int]) -> None:
    left = 4 - len(victims)
    assert killed(victims) == [left] * left


def test_a_given_number_of_ranks_alone_decides() -> None:
    assert killed({0, 1, 2}, min_ranks=1) == [1]
    assert killed({0, 1}, min_ranks=2) == [2, 2]


def test_the_environment_gives_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_MIN_RANKS", "1")
    assert killed({0, 1, 2}) == [1]


def test_ranks_keep_their_numbers_in_the_job() -> None:
    """A replacement has the number that its launcher gave it, if nobody else has it."""

    def body(comm: Communicator) -> tuple[int, ...]:
        if comm.rank == 1 and not comm.joined:
            return dies_at(3, has(99))(comm)
        comm, _ = train(comm, has_again(3))
        with comm:
            return comm._mesh.job_ranks

    def replacement() -> Any:
        os.environ |= {"RANK": "1", "WORLD_SIZE": "3"}
        return body(gradwire.join(secret=SECRET))

    with elastic_job() as job:
        members = job.start(3, body)
        assert members[1].outcome().died
        joiner = job.process(replacement)
        assert {each.value() for each in (members[0], members[2], joiner)} == {(0, 2, 1)}


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


def dying(point: int) -> Any:
    """Has this process die when it has sent so many messages of the resize."""
    send, sent = SurvivorLinks.send, itertools.count()

    def send_or_die(self: SurvivorLinks, *message: Any) -> None:
        if next(sent) == point:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, *message)

    return lambda: setattr(SurvivorLinks, "send", send_or_die)


@pytest.mark.parametrize("point", [0, 1, 2, 3])
def test_a_process_that_dies_while_it_joins_is_left_out(point: int) -> None:
    """Of its ADDRESS, VIEW, READY and DONE; another one joins meanwhile."""
    gone = mmap.mmap(-1, 1)  # shared with all processes

    def is_gone(comm: Communicator, _: State) -> bool:
        seen = np.array([gone[0]])
        comm.broadcast(seen)
        return bool(seen[0]) and comm.size == 3

    with elastic_job() as job:
        members = job.start(2, ends(is_gone))
        die = dying(point)

        def doomed() -> None:
            die()
            train(gradwire.join(secret=SECRET), has(99))

        lost = job.process(doomed)
        joiner = job.join(ends(is_gone))
        assert lost.outcome().status == -signal.SIGKILL
        gone[0] = 1
        agree([each.value() for each in (*members, joiner)])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", [0, 3, 5, *nightly(1, 2, 4, 6, 7, 8, 9)])
def test_a_member_may_die_while_a_process_joins(victim: int, point: int) -> None:
    """The others agree without it, and the process is in, at once or with the next request."""

    def body(comm: Communicator) -> Any:
        if comm.rank == victim and not comm.joined:
            dying(point)()
            return ends(has(99))(comm)
        return ends(has_again(3))(comm)

    with elastic_job() as job:
        members = job.start(3, body)
        joiner = job.join(ends(has_again(3)))
        assert members[victim].outcome().status == -signal.SIGKILL
        rest = [each for rank, each in enumerate(members) if rank != victim]
        agree([each.value() for each in (*rest, joiner)])


def test_ranks_go_on_without_their_store_and_move_it() -> None:
    """The launcher's store is gone with its host: a joiner finds the listener in the new one."""

    def body(comm: Communicator) -> Any:
        comm.barrier()
        store = f"unix://moved-{comm._mesh.job.name}"
        os.environ["GRADWIRE_STORE"] = "unix://lost"
        comm._mesh.membership = replace(comm._mesh.membership, store="unix://lost")
        comm = comm.resize(store=store)
        return ends(has(3))(comm)

    with elastic_job() as job:
        members = job.start(2, body)
        joiner = job.join(ends(has(3)), store=f"unix://moved-{job.name}")
        agree([each.value() for each in (*members, joiner)])


def test_who_joins_a_job_that_is_not_there_is_told() -> None:
    def late() -> None:
        gradwire.join(secret=SECRET, timeout=0.5)

    with elastic_job() as job:
        error = job.process(late).outcome().error
    assert isinstance(error, gradwire.RendezvousError)
    assert "nobody let this process into job" in str(error)


def test_who_asks_where_ranks_do_not_resize_is_told() -> None:
    is_over = mmap.mmap(-1, 1)

    def member(comm: Communicator) -> None:
        comm.accept_joins()
        eventually(lambda: is_over[0])

    def late() -> None:
        gradwire.join(secret=SECRET, timeout=1)

    with elastic_job() as job:
        (rank,) = job.start(1, member)
        error = job.process(late).outcome().error
        is_over[0] = 1
        rank.value()
    assert "it has asked to join, and the ranks have not resized since" in str(error)


def test_who_does_not_know_the_secret_is_kept_out() -> None:
    with elastic_job() as job:
        members = job.start(1, ends(has(2)))
        stranger = job.join(ends(has(2)), secret="fedcba9876543210", timeout=5)
        assert isinstance(stranger.outcome().error, gradwire.RendezvousError)
        joiner = job.join(ends(has(2)))
        agree([members[0].value(), joiner.value()])


@pytest.mark.parametrize("times", [10, *nightly(100)])
def test_resizes_leave_nothing_over(times: int) -> None:
    """Neither threads nor descriptors nor mappings, on members and on those who joined."""

    def body(comm: Communicator) -> list[Any]:
        counts = []
        comm.accept_joins()
        for turn in range(times):
            assert not comm.should_resize()
            comm.all_reduce(np.ones(1000, np.float32))
            comm = comm.resize()
            if turn in (times // 2, times - 1):
                gc.collect()
                eventually(
                    lambda listener=comm._listener: listener is None or not listener._renew.passed
                )
                found = held()
                counts.append((found.threads, found.descriptors.total(), len(found.shared)))
        comm.close()
        return counts

    def member(comm: Communicator) -> list[Any]:
        comm.accept_joins()
        while comm.size < 3:
            comm.barrier()
            if comm.should_resize():
                comm = comm.resize()
        return body(comm)

    with elastic_job() as job:
        members = job.start(2, member)
        joiner = job.join(body)
        for each in (*members, joiner):
            before, after = each.value()
            assert before == after


def test_a_forked_child_does_not_keep_joiners_of_a_listener_whose_rank_died() -> None:
    """Such as a data loader's: it has copies of the joiners' sockets, and closes them."""
    reads, writes = os.pipe()  # its end ends the child

    def body(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 1:
            return ends(has_again(2), min_ranks=1)(comm)
        comm.accept_joins()
        eventually(lambda: comm._listener._joiners)  # type: ignore[union-attr]
        if os.fork() == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
        return os.kill(os.getpid(), signal.SIGKILL)

    with elastic_job() as job:
        members = job.start(2, body)
        joiner = job.join(ends(has_again(2)))
        found = [each.value() for each in (members[1], joiner)]
        os.close(writes)
        os.close(reads)
        assert members[0].outcome().died
    agree(found)


def test_ranks_may_have_different_transports() -> None:
    """Each pair takes what both have."""

    def body(comm: Communicator) -> set[str]:
        comm, _ = train(comm, has(3))
        with comm:
            return set(comm.transports.values())

    with elastic_job() as job:
        members = job.start(2, body)
        joiner = job.join(body, transports=("tcp",))
        assert [each.value() for each in (*members, joiner)] == [{"shm", "tcp"}] * 2 + [{"tcp"}]


def test_rank_0_serves_the_store_again_for_those_who_join() -> None:
    """As under mpirun or srun, where no launcher does; whoever follows it does so, too."""
    with reserved_store() as store:

        def member(rank: int) -> Any:
            comm = gradwire.init(rank=rank, ranks=2, store=store, secret=SECRET, timeout=30)
            comm, _ = train(comm, has(3))
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return ends(lambda comm, _: comm.size == 3 and comm.epoch > 1)(comm)

        def second(comm: Communicator) -> Any:
            return ends(lambda comm, _: comm.size == 3 and comm.epoch > 1)(comm)

        with elastic_job() as job:
            members = [job.process(lambda rank=rank: member(rank)) for rank in range(2)]
            joiners = [job.join(second, store=store)]
            assert members[0].outcome().died
            joiners.append(job.join(second, store=store))
            agree([each.value() for each in (members[1], *joiners)])


def test_who_waits_at_a_stopped_rank_goes_to_the_next_listener() -> None:
    def body(comm: Communicator) -> Any:
        comm.barrier()
        if comm.rank == 1:
            comm._timeout = 2.0
            return ends(has_again(2), timeout=2, min_ranks=1)(comm)
        comm.accept_joins()
        eventually(lambda: comm._listener._joiners)  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGSTOP)
        return None

    with elastic_job() as job:
        members = job.start(2, body)
        joiner = job.join(ends(has_again(2)))
        agree([each.value() for each in (members[1], joiner)])
        members[0].kill()
        assert members[0].outcome().died
