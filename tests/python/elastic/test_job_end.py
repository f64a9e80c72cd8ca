"""The end of a job: a process that comes to join is told at once that nobody is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
import pytest
from elastic_job import SECRET, elastic_job, has, train
from gradwire import Communicator, JobOver
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import join_listener, joining
from gradwire._bootstrap.join_listener import entry_key, unpack_entry
from gradwire._bootstrap.store import StoreClient, parse_address
from ranks import LIMIT, eventually, reserved_store

NOBODY = "there is nobody left to join"


def let_one_ask(comm: Communicator) -> None:
    """Returns on all ranks once somebody has asked rank 0."""
    comm.accept_joins()
    if comm.rank == 0:
        eventually(lambda: comm._listener._joiners)  # type: ignore[union-attr]
    comm.barrier()


def test_who_waits_at_the_listener_is_told() -> None:
    def body(comm: Communicator) -> None:
        let_one_ask(comm)
        comm.close()

    with elastic_job() as job:
        members = job.start(2, body)
        joiner = job.join(lambda comm: None)
        assert isinstance(joiner.outcome().error, JobOver)
        for each in members:
            each.value()


def test_who_waits_where_rank_0_serves_the_store_is_told() -> None:
    """The store ends with rank 0, as under mpirun or srun."""
    with reserved_store() as store:

        def member(rank: int) -> None:
            with gradwire.init(rank=rank, ranks=2, store=store, secret=SECRET, timeout=30) as comm:
                let_one_ask(comm)

        with elastic_job() as job:
            members = [job.process(lambda rank=rank: member(rank)) for rank in range(2)]
            joiner = job.join(lambda comm: None, store=store, timeout=LIMIT)
            assert isinstance(joiner.outcome().error, JobOver)
            for each in members:
                each.value()


def test_who_comes_after_the_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's store is still there; the members have ended their programs."""
    monkeypatch.setattr(joining, "_STORED_OVER_SECONDS", 0.5)

    def body(comm: Communicator) -> None:
        with comm:
            comm.barrier()
            comm.accept_joins()

    with elastic_job() as job:
        for each in job.start(2, body):
            each.value()
        error = job.join(lambda comm: None).outcome().error
    assert isinstance(error, gradwire.RendezvousError)
    assert NOBODY in str(error)


def test_the_end_that_an_earlier_start_has_left_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody has kept it, and writes it over the listener's entry; that writes its own again."""
    assert joining._STORED_OVER_SECONDS > join_listener.RENEW_SECONDS
    monkeypatch.setattr(
        join_listener, "RENEW_SECONDS", 4.0
    )  # more than the listener's own word takes

    def body(comm: Communicator) -> Any:
        comm, state = train(comm, has(3))
        with comm:
            return state

    with elastic_job() as job:
        members = job.start(2, body)
        known, key = SECRET.encode(), entry_key(job.name)
        stranger = StoreClient(parse_address(job.store), job.name, known, Deadline(LIMIT))
        with contextlib.closing(stranger):
            entry = unpack_entry(stranger.get(key, LIMIT), job.name, known)
            stranger.set(key, replace(entry, epoch=entry.epoch ^ 1, over=True).pack())
        joiner = job.join(body, timeout=LIMIT)
        assert len({each.value() for each in (joiner, *members)}) == 1


def test_who_waits_is_let_in_by_those_that_go_on_without_rank_0() -> None:
    """Rank 0 leaves by itself, and regularly, but it is not the end."""

    def body(comm: Communicator) -> Any:
        if not comm.joined:
            let_one_ask(comm)
            if comm.rank == 0:
                return comm.close()
        comm, state = train(comm, has(2), min_ranks=1)
        with comm:
            return state

    with elastic_job() as job:
        members = job.start(2, body)
        joiner = job.join(body)
        assert members[0].value() is None
        assert members[1].value() == joiner.value()


def test_a_failed_job_is_not_taken_for_one_at_its_end() -> None:
    def body(comm: Communicator) -> Any:
        comm.accept_joins()
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(gradwire.TransportError):
            while True:
                comm.barrier()
        comm.close()

    with elastic_job() as job:
        members = job.start(2, body)
        members[0].value()
        assert members[1].outcome().died
        error = job.join(lambda comm: None, timeout=3).outcome().error
    assert type(error) is gradwire.RendezvousError  # not JobOver
    assert "its ranks have ended" not in str(error)


PROGRAM = """
import os, pathlib, time
import gradwire

mark = pathlib.Path(__file__).with_name("mark")
if "GRADWIRE_JOIN" in os.environ:
    mark.touch()
    comm = HOW_IT_JOINS
comm = gradwire.init(elastic=True)
comm.barrier()
assert not comm.should_resize()
if comm.rank == 1:
    os.kill(os.getpid(), 9)
try:
    while True:
        comm.barrier()
except gradwire.Error:
    comm = comm.resize()
while not mark.exists():
    time.sleep(0.01)
comm.close()
"""


@pytest.mark.parametrize("join", ["gradwire.init(elastic=True)", "gradwire.join()"])
def test_a_rank_that_is_started_anew_at_the_end_is_no_failure(
    bare_environment: None, join: str, tmp_path: Path
) -> None:
    """It is not started again, either."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.replace("HOW_IT_JOINS", join))
    command = [sys.executable, "-m", "gradwire", "run", "--min", "1", "-n", "3", "--restarts", "9"]
    ended = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert NOBODY in ended.stderr
    assert ended.stderr.count("starting it anew") == 1
    assert "exited with code" not in ended.stderr
    assert "gradwire._errors.JobOver: " in ended.stderr
