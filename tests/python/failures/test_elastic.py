"""torchrun's elastic restart: the same job meets again in the same store, whatever died there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import gradwire
import numpy as np
import pytest
from agent import agents_store
from gradwire import Aborted, Communicator, RendezvousError, TransportError
from ranks import Outcome, outcomes

distributed = pytest.importorskip("torch.distributed")

P = 2


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store and the environment that torchrun's agent gives its workers, without the rank."""
    with agents_store() as port:
        set_environment(monkeypatch, port)
        yield distributed.TCPStore("127.0.0.1", port, wait_for_workers=False)


def set_environment(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {
        "WORLD_SIZE": P,
        "LOCAL_WORLD_SIZE": P,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RUN_ID": "elastic",
    }.items():
        monkeypatch.setenv(name, str(value))


def workers(restart: int, body: Callable[[int], Any]) -> list[Outcome]:
    """Processes with torchrun's environment after so many restarts."""

    def worker(comm: Communicator) -> Any:
        rank = comm.rank
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart)
        return body(rank)

    return outcomes(P, worker, transport="shm", processes=True)


def train(_: int) -> list[int]:
    with gradwire.init(timeout=20) as comm:
        return comm.all_gather(np.array([comm.rank])).tolist()


def test_a_restart_meets_nothing_of_what_was_before(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies when all have published their addresses."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_half_way(rank: int) -> None:
        if rank == 1:  # which connects to rank 0
            monkeypatch.setattr("gradwire._bootstrap.connect.client_handshake", die)
        with pytest.raises(TransportError, match="rank 1"):
            gradwire.init(timeout=20)

    first = workers(0, die_half_way)
    assert first[0].error is None, first[0].error
    assert first[1].died
    assert agent.check(["gradwire/elastic/any/0/ask/1"])
    second = workers(1, train)
    assert [each.value for each in second] == [[0, 1]] * P, second


def test_a_restart_after_a_death_in_training(agent: Any) -> None:
    def die_in_training(rank: int) -> None:
        with gradwire.init(timeout=20) as comm:
            if rank == 1:
                comm.recv(np.empty(1), 0)
                os.kill(os.getpid(), signal.SIGKILL)
            comm.send(np.ones(1), 1, async_op=True)
            with pytest.raises(TransportError) as raised:
                comm.recv(np.empty(1), 1)
            assert raised.value.peer == 1

    first = workers(0, die_in_training)
    assert first[0].error is None, first[0].error
    assert first[1].died
    for restart in (1, 2):
        assert [each.value for each in workers(restart, train)] == [[0, 1]] * P


def test_the_same_processes_meet_again_after_a_failure(agent: Any) -> None:
    """Processes use the same store and restart count; each rendezvous has a number."""

    def body(rank: int) -> list[list[int]]:
        found = [train(rank)]
        with gradwire.init(timeout=20) as comm:
            if rank == 1:
                comm.abort("enough")
            with pytest.raises(Aborted, match="rank 1: enough"):
                comm.barrier()
        return [*found, train(rank)]

    assert [each.value for each in workers(0, body)] == [[[0, 1]] * 2] * P


def test_agents_that_count_restarts_differently_have_their_ranks_meet(agent: Any) -> None:
    """Each counts the failures on its own host; hosts that come or go count nowhere."""

    def body(rank: int) -> tuple[list[int], int]:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(3 * rank)
        with gradwire.init(timeout=20) as comm:
            found = comm.all_gather(np.array([comm.rank])).tolist()
            return found, comm._mesh.job.epoch

    starts = set()
    for _ in range(2):  # the second time with the same counts as what is left of the first
        ended = [each.value for each in workers(0, body)]
        assert [ranks for ranks, _ in ended] == [[0, 1]] * P
        found = {start for _, start in ended}
        assert len(found) == 1
        starts |= found
    assert len(starts) == 2  # rank 0 makes a number for each


def test_the_others_hear_at_once_why_rank_0_gives_up(agent: Any) -> None:
    """What an earlier rank 0 has said is not taken for its word."""

    def fails(rank: int) -> str:
        os.environ |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}  # rank 2 never comes
        with pytest.raises(RendezvousError) as raised:
            gradwire.init(timeout=5 if rank == 0 else 300)
        return str(raised.value)

    for each in workers(0, fails):
        assert each.error is None, each.error
        assert "rank 2 of 3 did not appear" in each.value
    assert [each.value for each in workers(0, train)] == [[0, 1]] * P
