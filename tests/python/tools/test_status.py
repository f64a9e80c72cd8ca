"""`gradwire doctor --job`: the ranks of a live job, seen from outside."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import Aborted, Communicator, _core
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._tools.status import LocalRanks, communicators
from ranks import LIMIT, Outcome, eventually, outcomes, state_of

Seen = dict[str, Any]
SHARED: Any = multiprocessing.get_context("fork")


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


class Job:
    """Ranks in processes that run a body in the background."""

    def __init__(self, p: int, body: Callable[[Communicator], Any]) -> None:
        self.name = f"test-{secrets.token_hex(4)}"
        self.ended: list[Outcome] = []
        self._thread = threading.Thread(target=self._run, args=(p, body))
        self._thread.start()

    def _run(self, p: int, body: Callable[[Communicator], Any]) -> None:
        self.ended = outcomes(p, body, transport="shm", processes=True, job=self.name)

    def ranks(self) -> dict[int, Seen]:
        found = [each for each in _core.ranks_on_this_host() if each["job"] == self.name]
        assert len({each["rank"] for each in found}) == len(found)
        return {each["rank"]: each for each in found}

    def join(self) -> list[Outcome]:
        self._thread.join()
        return self.ended


@pytest.fixture
def gate() -> Iterator[Any]:
    """An event that the ranks may wait for; set at the latest when the test is over."""
    event = SHARED.Event()
    yield event
    event.set()


def test_the_one_who_is_stopped_is_at_the_end_of_every_chain(gate: Any) -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(np.ones(1000, np.float32), algorithm="ring")
        if comm.rank == 2:
            gate.wait(60)
        comm.all_reduce(np.ones(1000, np.float32), algorithm="ring")

    job = Job(4, body)
    eventually(lambda: waits(job) == {3: (2, "round 0"), 0: (3, "round 1"), 1: (0, "round 2")})
    stopped = job.ranks()[2]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        eventually(lambda: state_of(stopped) == "T")
        shown = doctor("--job", job.name)
        told = json.loads(doctor("--job", job.name, "--json").stdout)
    finally:
        os.kill(stopped, signal.SIGCONT)
        gate.set()
    assert all(each.error is None for each in job.join())
    call = "all_reduce(float32[1000], op=sum, algorithm=ring, codec=none), call 1"
    lines = shown.stdout.splitlines()
    assert lines[0] == f"job {job.name}, communicator 7: 4 ranks, 4 of them found on this host"
    (own,) = [line.split() for line in lines if line.split()[:1] == ["2"]]
    assert own[1:3] == [str(stopped), "STOPPED"]
    assert own[5:] == ["outside", "gradwire,", "last", "call", "0"]
    assert sum(call in line for line in lines) == 3
    for rank, (peer, round) in {3: (2, "round 0"), 0: (3, "round 1"), 1: (0, "round 2")}.items():
        (row,) = [line for line in lines if line.split()[:1] == [str(rank)]]
        assert f" rank {peer} " in row
        assert row.endswith(f"{call}, {round}, segment 0")
    assert lines[-1] == (
        f"Ranks 0, 1 and 3 wait in the end for one: rank 2 (process {stopped}) is stopped "
        f"(kill -CONT {stopped} lets it go on)."
    )
    (found,) = told["communicators"]
    assert found["conclusions"] == [lines[-1]]
    assert [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
    assert doctor("--job", job.name).returncode == 1  # it is over


def waits(job: Job) -> dict[int, tuple[int, str]]:
    """The peer that each rank waits for, and the round of its call."""
    return {
        rank: (each["peer"], each["operation"].split(", ")[-2])
        for rank, each in job.ranks().items()
        if each["peer"] >= 0
    }


def test_a_fork_of_a_rank_is_no_rank(gate: Any) -> None:
    forked = SHARED.Event()

    def body(comm: Communicator) -> int:
        child = os.fork()
        if child == 0:
            forked.set()
            gate.wait(60)
            os._exit(0)
        assert forked.wait(60)
        comm.barrier()
        gate.wait(60)
        os.waitpid(child, 0)
        return os.getpid()

    job = Job(2, body)
    assert forked.wait(60)
    eventually(lambda: len(job.ranks()) == 2 and job.ranks()[0]["calls"] == 1)
    pids = {rank: each["pid"] for rank, each in job.ranks().items()}
    gate.set()
    assert [each.value for each in job.join()] == [pids[0], pids[1]]


def test_what_failed_says_why_until_it_is_closed(gate: Any) -> None:
    closed = SHARED.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort("no more")
        with pytest.raises(Aborted):
            comm.barrier()
        gate.wait(60)
        comm.close()
        closed.wait(60)

    job = Job(2, body)
    eventually(lambda: [each["activity"] for each in job.ranks().values()] == ["failed"] * 2)
    assert [each["spec"] for each in job.ranks().values()] == ["rank 0: no more"] * 2
    gate.set()
    eventually(lambda: job.ranks() == {})
    closed.set()
    job.join()


@pytest.mark.parametrize("secret", [None, secrets.token_hex(8)], ids=["open", "secret"])
def test_how_it_was_joined_is_shown(secret: str | None) -> None:
    """The secret is this job's alone: jobs of one name and secret are shown as one."""
    name = f"gradwire-test-{secrets.token_hex(4)}"

    def about(rank: int) -> list[str]:
        with gradwire.init(rank=rank, ranks=2, store=f"unix://{name}", secret=secret) as comm:
            found = _core.ranks_on_this_host()
            comm.barrier()
            return [each["about"] for each in found if each["tag"] == comm._mesh.job.tag]

    server = StoreServer(Address("unix", name), "gradwire", (secret or "").encode())
    with server, ThreadPoolExecutor(2) as pool:
        shown = {each for found in pool.map(about, range(2)) for each in found}
    joins = "no GRADWIRE_SECRET, so this user's processes on this host may join"
    if secret is not None:
        joins = "who joins needs the job's secret"
    assert shown == {f"listens on lo (127.0.0.1): all ranks are on this host; {joins}"}


def test_no_such_job() -> None:
    ended = doctor("--job", "there-is-none")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no job there-is-none… of user" in ended.stderr


def seen(rank: int, size: int = 4, **others: Any) -> Seen:
    known = {
        "pid": 100 + rank,
        "state": "S",
        "job": "train",
        "tag": 5,
        "communicator": 0,
        "rank": rank,
        "size": size,
        "local_size": size,
        "about": "",
        "activity": "call",
        "seconds": 2.0,
        "calls": 3,
        "operation": "all_reduce(float32[1]), call 2, round 0, segment 0",
        "spec": "all_reduce(float32[1])",
        "peer": -1,
        "sentence": f"rank {rank} does something",
    }
    return known | others


def conclusions(*ranks: Seen) -> list[str]:
    (group,) = communicators(ranks)
    return list(group.conclusions())


def test_chains_end_at_whoever_does_not_wait() -> None:
    assert conclusions(seen(0, peer=1), seen(1, peer=3), seen(2), seen(3)) == [
        "Ranks 0 and 1 wait in the end for one: rank 3 does something."
    ]
    assert conclusions(seen(0, peer=2), seen(1, peer=3), seen(2), seen(3)) == [
        "Rank 0 waits in the end for one: rank 2 does something.",
        "Rank 1 waits in the end for one: rank 3 does something.",
    ]


def test_a_stopped_rank_ends_a_chain_though_it_was_waiting() -> None:
    ranks = (seen(0, 2, peer=1), seen(1, 2, peer=0, state="T"))
    assert conclusions(*ranks) == ["Rank 0 waits in the end for one: rank 1 does something."]
    assert conclusions(seen(0, 2), seen(1, 2, state="T")) == [
        "Nobody waits for it yet: rank 1 does something.",
        "Nobody has waited for another rank for longer than a second.",
    ]


def test_a_circle_is_called_one() -> None:
    circle = (seen(0, peer=1), seen(1, peer=2), seen(2, peer=1), seen(3, peer=0))
    assert conclusions(*circle) == [
        "Ranks 1 and 2 wait for each other: do they make the same calls in the same order?"
    ]


def test_a_rank_that_is_not_here_is_gone_or_elsewhere() -> None:
    (group,) = communicators([seen(0, 2, peer=1)])
    assert group.missing() == [1]
    assert "1     -        not found" in group.as_table()
    assert "rank 1 is gone" in conclusions(seen(0, 2, peer=1))[0]
    elsewhere = conclusions(seen(0, 2, peer=1, local_size=1))
    assert "rank 1 is not on this host, or is gone" in elsewhere[0]


def test_jobs_are_told_apart() -> None:
    ranks = [seen(0, 2), seen(1, 2), seen(0, 2, tag=6), seen(0, 2, job="other")]
    ranks += [seen(0, 1), seen(0, 1, pid=7)]  # alone: each is a job of its own
    sizes = [len(group.ranks) for group in communicators(ranks)]
    assert sorted(sizes) == [1, 1, 1, 1, 2]
    assert [len(group.ranks) for group in communicators(ranks, "oth")] == [1]


def test_the_table_has_columns() -> None:
    idle = seen(1, 2, activity="outside", seconds=3725.0, calls=0)
    lines = LocalRanks((seen(0, 2, peer=1), idle)).as_table().splitlines()
    first, *others = map(str.index, lines[1:], ("does", "all_", "outside"))
    assert others == [first, first]
    assert "62 min 5 s" in lines[3]
    assert "no call yet" in lines[3]
