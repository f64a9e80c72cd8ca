"""The listener in torch's store, as under torchrun, whose agent serves it."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import gradwire
import pytest
from agent import agent, agents_store, rank_of_agent
from elastic_job import SECRET, elastic_job, has, train
from gradwire import Communicator
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import joining
from gradwire._bootstrap.joining import reader_of
from gradwire._errors import JobOver, RendezvousError
from ranks import LIMIT, eventually, state_of

KNOWN = SECRET.encode()

pytest.importorskip("torch.distributed")


def test_a_process_joins_by_torchs_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns there where the listener is, and that the job is over."""
    monkeypatch.setattr(joining, "_STORED_OVER_SECONDS", 0.5)

    def body(comm: Communicator) -> Any:
        comm, state = train(comm, has(3))
        with comm:
            return state

    def member(rank: int, port: int) -> Any:
        os.environ |= rank_of_agent(rank, port)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(3 * rank)
        del os.environ["GRADWIRE_STORE"], os.environ["GRADWIRE_JOB"]
        return body(gradwire.init(secret=SECRET, timeout=30))

    def joiner(port: int) -> Any:
        os.environ |= {"GRADWIRE_JOB": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        store = f"torch://127.0.0.1:{port}"
        return body(gradwire.join(store=store, secret=SECRET, timeout=30))

    with agents_store() as port, elastic_job() as job:
        processes = [job.process(lambda rank=rank: member(rank, port)) for rank in range(2)]
        processes.append(job.process(lambda: joiner(port)))
        assert len({each.value() for each in processes}) == 1
        late = job.process(lambda: joiner(port))
        assert isinstance(late.outcome().error, JobOver)


def test_waiting_for_a_key_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        agents_store() as port,
        reader_of(f"torch://127.0.0.1:{port}", "run", KNOWN, Deadline(LIMIT), LIMIT) as read,
        pytest.raises(TimeoutError, match=r"nobody set key within 0\.15 s"),
    ):
        read("key", 0.15)
    assert capfd.readouterr().err == ""


def test_a_store_that_is_stopped_does_not_answer() -> None:
    with (
        agent() as (pid, port),
        reader_of(f"torch://127.0.0.1:{port}", "run", KNOWN, Deadline(LIMIT), 0.1) as read,
    ):
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state_of(pid) == "T")
        with pytest.raises(RendezvousError, match=r"has not answered for 0\.1 s"):
            read("key", 0)
        os.kill(pid, signal.SIGCONT)


def test_a_store_that_is_stopped_first_is_not_reached_in_time() -> None:
    """Attempts end by their deadlines, on one thread in sum, whose client the next one gets."""

    def threads() -> int:
        return sum(each.name == "gradwire-torch-store" for each in threading.enumerate())

    eventually(lambda: threads() == 0)
    with agent() as (pid, port):
        store = f"torch://127.0.0.1:{port}"
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state_of(pid) == "T")
        for _ in range(3):
            with (
                pytest.raises(RendezvousError, match=r"could not reach .* within 0\.5 s"),
                reader_of(store, "run", KNOWN, Deadline(0.5), LIMIT),
            ):
                pass
            assert threads() <= 1
        with pytest.raises(RendezvousError, match=r"within 0\.5 s"):
            gradwire.join(store=store, secret=SECRET, timeout=0.5)
        os.kill(pid, signal.SIGCONT)
        with (
            reader_of(store, "run", KNOWN, Deadline(LIMIT), LIMIT) as read,
            pytest.raises(TimeoutError, match="nobody set key"),
        ):
            read("key", 0)
    eventually(lambda: threads() == 0)
