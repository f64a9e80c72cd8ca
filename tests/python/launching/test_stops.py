"""Stops that all ranks agree on: signals, the end of a time slot, requests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
import ranks
from gradwire import Communicator, InvalidArgument, TransportError
from gradwire._base import stops

STEPS = 6
KILLED_AT = 2


def _steps(comm: Communicator, asks: Callable[[int], None], steps: int = STEPS) -> list[bool]:
    """What should_stop() says after each step; `asks` is called within each."""
    found = []
    for step in range(steps):
        asks(step)
        comm.all_reduce(np.ones(10, np.float32))
        found.append(comm.should_stop())
    return found


def _killed(comm: Communicator, rank: int, number: int) -> list[bool]:
    gradwire.catch_stops()

    def asks(step: int) -> None:
        if comm.rank == rank and step == KILLED_AT:
            os.kill(os.getpid(), number)

    return _steps(comm, asks)


@ranks.over_processes
@pytest.mark.parametrize("p", [2, 3, 4])
def test_all_ranks_stop_at_the_same_step_whichever_is_signalled(p: int, transport: str) -> None:
    for rank in range(p):
        number = stops.SIGNALS[rank % 2]
        found = ranks.run(p, _killed, rank, number, transport=transport, processes=True)
        assert found == [[step >= KILLED_AT for step in range(STEPS)]] * p


def test_one_rank_alone_stops_at_once() -> None:
    (found,) = ranks.run(1, _killed, 0, signal.SIGTERM, transport="shm", processes=True)
    assert found == [step >= KILLED_AT for step in range(STEPS)]


@pytest.mark.parametrize("p", [2, 3])
@ranks.on_ranks()
def test_a_rank_may_ask_for_itself_and_from_any_thread(comm: Communicator, p: int) -> None:
    def asks(step: int) -> None:
        if comm.rank == p - 1 and step == KILLED_AT:
            comm.request_stop()

    assert _steps(comm, asks) == [step >= KILLED_AT for step in range(STEPS)]


CARRIERS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(5)),
    "empty": lambda comm: comm.all_reduce(np.ones(0)),
    "onebit": lambda comm: comm.all_reduce(
        np.ones(999, np.float32), codec="onebit", feedback=False
    ),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(6)),
    "all_gather": lambda comm: comm.all_gather(np.ones(2)),
    "barrier": lambda comm: comm.barrier(),
    "objects": lambda comm: comm.all_gather_object({"rank": comm.rank}),
}


@pytest.mark.parametrize("name", CARRIERS)
@ranks.on_ranks(3)
def test_every_call_that_joins_all_ranks_carries_it(comm: Communicator, name: str) -> None:
    found = []
    for step in range(2):
        if comm.rank == step == 1:
            comm.request_stop()
        CARRIERS[name](comm)
        found.append(comm.should_stop())
    assert found == [False, True]


@ranks.on_ranks(3)
def test_calls_that_do_not_join_all_ranks_leave_it_to_the_next_one(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.request_stop()
    comm.broadcast(np.ones(3), root=0)
    comm.reduce(np.ones(3), root=1)
    found = [comm.should_stop()]
    comm.barrier()
    assert [*found, comm.should_stop()] == [False, True]


@ranks.on_ranks(3)
def test_it_sends_nothing_of_its_own(comm: Communicator) -> None:
    before = comm.traffic.frames_sent
    for _ in range(20):
        comm.should_stop()
    assert comm.traffic.frames_sent - before == 0


@ranks.on_ranks(2, transport="tcp")
def test_it_waits_for_calls_under_way(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.request_stop()
    works = [comm.all_reduce(np.ones(100_000), async_op=True) for _ in range(3)]
    found = comm.should_stop()
    done = [each.done() for each in works]
    for each in works:
        each.wait()
    assert found
    assert done == [True] * 3


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets variables of a time slot, for ranks that are forked afterwards."""

    def use(**variables: str) -> None:
        for name in ("GRADWIRE_SLOT_ENDS", "GRADWIRE_SLOT_MARGIN", "SLURM_JOB_END_TIME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


def _until_stopped(comm: Communicator) -> int:
    step, stop = 0, False
    until = time.monotonic() + ranks.LIMIT
    while not stop and time.monotonic() < until:
        comm.barrier()
        step, stop = step + 1, comm.should_stop()
    return step


@pytest.mark.parametrize("name", ["GRADWIRE_SLOT_ENDS", "SLURM_JOB_END_TIME"])
def test_the_end_of_a_slot_stops_all_ranks(slot: Callable[..., None], name: str) -> None:
    slot(**{name: str(time.time() + 1000.5), "GRADWIRE_SLOT_MARGIN": "1000"})
    found = ranks.run(2, _until_stopped, transport="shm", processes=True)
    assert found[0] == found[1] >= 1


def test_a_slot_that_goes_on_stops_nobody(slot: Callable[..., None]) -> None:
    slot(GRADWIRE_SLOT_ENDS=str(time.time() + 1000), SLURM_JOB_END_TIME="9999999999")
    found = ranks.run(2, _steps, lambda step: None, transport="shm", processes=True)
    assert found == [[False] * STEPS] * 2


@pytest.mark.parametrize(
    "name", ["GRADWIRE_SLOT_ENDS", "SLURM_JOB_END_TIME", "GRADWIRE_SLOT_MARGIN"]
)
def test_a_variable_that_is_no_time_is_named(slot: Callable[..., None], name: str) -> None:
    slot(**{"GRADWIRE_SLOT_ENDS": "9999999999", name: "soon"})
    (found,) = ranks.outcomes(1, Communicator.should_stop)
    assert isinstance(found.error, InvalidArgument)
    assert f"rank 0: {name}='soon'" in str(found.error)


def test_a_stop_by_time_stays_when_the_time_is_moved() -> None:
    request = stops._core.StopRequest()
    request.make_at(1.0)
    assert request.made()
    request.make_at(9e9)
    assert request.made()


def test_a_slot_within_its_margin_is_told_of(
    slot: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "REQUEST", stops._core.StopRequest())
    slot(SLURM_JOB_END_TIME=str(time.time() + 30))
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert ranks.run(1, Communicator.should_stop) == [True]
    assert "no later than its margin of 60 s" in caplog.text


def test_a_rank_that_dies_is_an_error_and_no_answer() -> None:
    def body(comm: Communicator) -> bool:
        comm.barrier()
        comm.should_stop()
        if comm.rank == 1:
            os._exit(3)
        comm.request_stop()
        comm.all_reduce(np.ones(3))
        return comm.should_stop()

    found = ranks.outcomes(3, body, transport="tcp", processes=True)
    assert found[1].died
    for rank in (0, 2):
        error = found[rank].error
        assert isinstance(error, TransportError)
        assert error.peer == 1


def test_a_second_sigterm_ends_the_program() -> None:
    def body(comm: Communicator) -> None:
        gradwire.catch_stops()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(said, b"once")
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(said, b"twice")

    heard, said = os.pipe()
    (found,) = ranks.outcomes(1, body, transport="shm", processes=True)
    os.close(said)
    assert (found.died, found.status) == (True, -signal.SIGTERM)
    assert os.read(heard, 100) == b"once"
    os.close(heard)


def test_a_signal_that_is_not_caught_does_what_it_did() -> None:
    def body(comm: Communicator) -> None:
        comm.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)

    (found,) = ranks.outcomes(1, body, transport="shm", processes=True)
    assert (found.died, found.status) == (True, -signal.SIGTERM)


@ranks.on_ranks(1, transport="shm", processes=True)
def test_handlers_of_the_program_are_called_and_put_back(comm: Communicator) -> None:
    called: list[int] = []
    own = [signal.signal(each, lambda number, _: called.append(number)) for each in stops.SIGNALS]
    assert own
    set_by_program = [signal.getsignal(each) for each in stops.SIGNALS]
    gradwire.catch_stops()
    comm.should_stop()
    other = comm.split(0)
    assert other is not None
    other.should_stop()
    for each in (*stops.SIGNALS, signal.SIGTERM):
        os.kill(os.getpid(), each)
    asked = comm.should_stop()
    other.close()
    caught = [signal.getsignal(each) not in set_by_program for each in stops.SIGNALS]
    comm.close()
    put_back = [signal.getsignal(each) in set_by_program for each in stops.SIGNALS]
    assert called == [*stops.SIGNALS, signal.SIGTERM]
    assert asked
    assert all([*caught, *put_back])


@ranks.on_ranks(1, transport="shm", processes=True)
def test_a_communicator_that_is_dropped_puts_handlers_back(comm: Communicator) -> None:
    before = [signal.getsignal(each) for each in stops.SIGNALS]
    gradwire.catch_stops()
    other = comm.split(0)
    assert other is not None
    other.should_stop()
    caught = [signal.getsignal(each) not in before for each in stops.SIGNALS]
    del other
    gc.collect()
    assert all(caught)
    assert before == [signal.getsignal(each) for each in stops.SIGNALS]


@ranks.on_ranks(1, transport="shm", processes=True)
def test_a_handler_that_was_set_since_stays(comm: Communicator) -> None:
    gradwire.catch_stops()
    comm.should_stop()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    comm.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


@ranks.on_ranks(1, transport="shm", processes=True)
def test_a_forked_helper_ends_at_sigterm(comm: Communicator) -> None:
    gradwire.catch_stops()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not comm.should_stop()


@ranks.on_ranks(1, transport="shm", processes=True)
def test_ranks_forked_from_a_program_that_asks_catch_signals_of_their_own(
    comm: Communicator,
) -> None:
    gradwire.catch_stops()
    found = gradwire.spawn(_killed, 2, args=(1, signal.SIGTERM))
    assert not comm.should_stop()
    one, other = found
    assert one == other == [step >= KILLED_AT for step in range(STEPS)]


def test_off_the_main_thread_a_warning_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops, "_is_wanted", False)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert ranks.run(1, lambda _: gradwire.catch_stops()) == [None]
        assert ranks.run(1, _steps, lambda step: None) == [[False] * STEPS]
    assert caplog.text.count("call it on the main thread") == 1


def test_a_closed_communicator_has_no_answer() -> None:
    def body(comm: Communicator) -> None:
        comm.close()
        comm.should_stop()

    for each in ranks.outcomes(2, body):
        assert "closed" in str(each.error)
