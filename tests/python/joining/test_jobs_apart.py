"""Jobs never mix: ranks of two jobs, or of two starts of one, that share a store are told so."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import gradwire
import pytest
from elastic_job import Process
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import rendezvous as _rendezvous
from gradwire._bootstrap.launch_info import DEFAULT_JOB, LaunchInfo
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.store import StoreClient, parse_address
from gradwire._errors import RendezvousError
from ranks import LIMIT, reserved_store

SECRET = "0123456789abcdef"
REMEDY = "another job uses this store: set GRADWIRE_JOB"
pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    """Starts rank R of SIZE of a job at one store, which returns the names of all members."""
    monkeypatch.setattr(_rendezvous, "_OTHERS_SECONDS", LIMIT)  # rank 0 awaits the other job
    with reserved_store() as store:

        def begin(job: str, rank: int, size: int = 2, **options: Any) -> Process:
            def body() -> list[str]:
                place = {"rank": rank, "ranks": size, "store": store, "secret": SECRET}
                with gradwire.init(**place, timeout=LIMIT, **options) as comm:
                    return list(comm.all_gather_object(job))

            return Process(body, before=lambda: None)

        begin.store = store  # type: ignore[attr-defined]
        yield begin


def await_claim(store: str, rank: int) -> None:
    """Waits until a rank of a job without a name has come to the store."""
    address, secret = parse_address(store), SECRET.encode()
    client = StoreClient(address, DEFAULT_JOB, secret, Deadline(LIMIT))
    with contextlib.closing(client):
        client.get(f"gradwire/{DEFAULT_JOB}/0/claimant/{rank}", LIMIT)


def require_told(processes: Sequence[Process], what: str = "") -> None:
    """All of them raise the error that says what to do, and `what`."""
    errors = [each.outcome().error for each in processes]
    assert all(isinstance(each, RendezvousError) for each in errors), errors
    assert all(REMEDY in str(each) and what in str(each) for each in errors), errors


def test_two_jobs_with_one_store_and_one_secret_do_not_mix(start: Callable[..., Process]) -> None:
    """Rank 1 of both waits for a store when rank 0 of one of them opens it."""
    require_told([start("A", 1), start("B", 1), start("A", 0)])


def test_a_rank_given_twice_is_told_to_all(start: Callable[..., Process]) -> None:
    """In the place of rank 2, as where a number was mistyped."""
    require_told([start("A", rank, 3) for rank in (0, 1, 1)], "rank was given twice")


def test_a_second_rank_0_tells_the_job_that_serves_the_store(start: Callable[..., Process]) -> None:
    """All ranks that are there fail, and do not wait for those that may be the other job's."""
    first = [start("A", 1, 3), start("A", 0, 3)]
    await_claim(start.store, 1)  # type: ignore[attr-defined]
    require_told([*first, start("B", 0, 3)])


def test_jobs_of_other_sizes_are_told(start: Callable[..., Process], monkeypatch: Any) -> None:
    monkeypatch.setattr(_rendezvous, "_OTHERS_SECONDS", 0.0)
    require_told([start("A", 0, 2), start("B", 1, 3)])


def test_a_job_alone_meets(start: Callable[..., Process], monkeypatch: Any) -> None:
    monkeypatch.setattr(_rendezvous, "_OTHERS_SECONDS", 0.0)
    ranks = [start("A", rank, 3) for rank in range(3)]
    assert [each.value() for each in ranks] == [["A", "A", "A"]] * 3


def launches(size: int) -> list[LaunchInfo]:
    store = f"unix://gradwire-test-{secrets.token_hex(8)}"
    base = LaunchInfo(0, size, store=store, rank_0_hosts=True)
    return [replace(base, rank=rank) for rank in range(size)]


def meet(places: Sequence[LaunchInfo]) -> list[Future[Mesh]]:
    with ThreadPoolExecutor(len(places)) as pool:
        return [pool.submit(rendezvous, each, lambda mesh: mesh, timeout=LIMIT) for each in places]


def starts_of(found: Sequence[Future[Mesh]]) -> set[int]:
    """The numbers of their starts; closes all."""
    numbers = set()
    for each in found:
        numbers.add(each.result().job.epoch)
        each.result().close()
    return numbers


def test_all_ranks_have_the_number_of_the_start_that_rank_0_has_made() -> None:
    one, other = launches(3), launches(3)
    first, second, third = (starts_of(meet(each)) for each in (one, one, other))
    assert first == second
    assert len(first | third) == 2


def test_ranks_of_two_starts_are_told() -> None:
    """Rank 0 is another process than the one that rank 1 has met before."""
    places = launches(2)
    starts_of(meet(places))
    del _rendezvous._starts[_rendezvous._key_of(places[0])]
    for each in meet(places):
        error = each.exception()
        assert isinstance(error, RendezvousError), error
        assert "is not the process that rank 1 " in str(error)
        assert REMEDY in str(error)


def test_ranks_meet_that_have_tried_another_number_of_times() -> None:
    """Where rank 0 had not begun, another rank may have given up and tried again."""
    places = launches(2)
    with pytest.raises(RendezvousError, match="is rank 0 running"):
        rendezvous(places[1], lambda mesh: mesh, timeout=0.1)
    assert len(starts_of(meet(places))) == 1
