"""Elastic sessions under torchrun: its agents restart ranks, which go on from the last checkpoint.

Two agents on loopback stand for two hosts. Each test starts torch several times: nightly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import LIMIT, eventually
from torch.distributed import TCPStore

pytestmark = pytest.mark.nightly
SECRET = "0123456789abcdef"  # without which nobody joins over torchrun's store

PROGRAM = """
import hashlib, os, pathlib, signal, sys, time
import torch
from gradwire.torch import Ranks, elastic

folder, victim, steps = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
saved, killed = folder / "saved", folder / "killed"
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
sampler = elastic.Sampler(1 << 20, batch=4)
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    sampler.position = state["position"]
began = sampler.position
ranks = Ranks(timeout=60)
with elastic.session(model, optimizer, sampler, min_ranks=1, wait=0, ranks=ranks) as s:
    for batch in s:
        x = (batch[:, None] * torch.arange(1, 9)) % 17 / 8 - 1
        s.backward(torch.nn.functional.mse_loss(model(x), x[:, :4].sin()))
        if s.commit():
            optimizer.step()
        if s.communicator.rank == 0:
            torch.save({
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "position": sampler.position,
            }, folder / "next")
            (folder / "next").rename(saved)
        if s.steps == 10 and os.environ[victim.split("=")[0]] == victim.split("=")[1]:
            if not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if (folder / "end").exists() and s.communicator.size == 2 and s.steps >= steps:
            s.communicator.request_stop()
        if s.should_stop():
            break
        time.sleep(0.01)
values = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
digest = hashlib.sha256(values).hexdigest()[:12]
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
(folder / f"ended-{os.environ['RANK']}").write_text(f"{began} {sampler.position} {digest} {count}")
"""


class Agents:
    """torchrun's agents, each with one or two ranks; killed with them at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "train.py"
        self._path.write_text(PROGRAM)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._store: TCPStore | None = None
        self.started: list[subprocess.Popen[bytes]] = []

    def serve_store(self) -> None:
        """Serves torchrun's store in this process, so that any host may be lost."""
        self._store = TCPStore("127.0.0.1", self._port, is_master=True, wait_for_workers=False)

    def start(self, *options: str, victim: str, host: str = "A") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(self._path)]
        with (self.folder / f"log-{len(self.started)}").open("wb") as log:
            agent = subprocess.Popen(
                [*command, str(self.folder), victim, "20"],
                env={**os.environ, "HOST": host, "OMP_NUM_THREADS": "1", "GRADWIRE_SECRET": SECRET},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(agent)
        return agent

    def start_host(self, host: str, victim: str = "HOST=none") -> subprocess.Popen[bytes]:
        """An agent of one rank, of two that meet on loopback."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        serves = host == "A" and self._store is None
        conf = f"is_host={int(serves)},"  # of torchrun's store, with which all ends
        conf += "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=15"
        options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
        return self.start(
            *options, *meeting, "--rdzv-id", "job", "--rdzv-conf", conf, victim=victim, host=host
        )

    def await_trained(self) -> None:
        """Waits until some rank has made a step since the last look."""
        (self.folder / "saved").unlink(missing_ok=True)
        eventually((self.folder / "saved").exists)

    def logs(self) -> str:
        return "".join(
            f"--- {each.name}\n{each.read_text()}" for each in sorted(self.folder.glob("log-*"))
        )


@pytest.fixture
def agents(bare_environment: None, tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    for each in agents.started:
        _kill_all(each)


def _kill_all(agent: subprocess.Popen[bytes]) -> None:
    """Kills an agent with all that it has started."""
    for pid in (*_children(agent.pid), agent.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def _children(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in map(int, found) for each in (*_children(child), child)]


def end_of(agents: Agents, running: list[subprocess.Popen[bytes]]) -> list[list[str]]:
    """What both ranks say at their end, once the agents have ended well."""
    (agents.folder / "end").touch()
    for each in running:
        assert each.wait(LIMIT) == 0, agents.logs()
    ends = [(agents.folder / f"ended-{rank}").read_text().split() for rank in range(2)]
    assert ends[0][:3] == ends[1][:3], ends  # the same positions, and bits
    return ends


def test_one_host(agents: Agents) -> None:
    """All its ranks begin anew, from the last checkpoint."""
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    agent = agents.start(*options, victim="RANK=1")
    ends = end_of(agents, [agent])
    assert int(ends[0][0]) >= 9 * 8, ends  # rank 0 may not have saved the tenth step
    assert [end[3] for end in ends] == ["1", "1"]


def test_two_hosts_of_which_one_has_a_rank_that_fails(agents: Agents) -> None:
    """Its agent counts a restart, and the other one does not."""
    running = [agents.start_host("A"), agents.start_host("B", victim="HOST=B")]
    ends = end_of(agents, running)
    assert int(ends[0][0]) >= 10 * 8, ends
    assert sorted(end[3] for end in ends) == ["0", "1"]


@pytest.mark.parametrize("lost", ["A", "B"])
def test_a_host_that_is_lost_and_another_one_that_comes(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The rank that is left trains on alone, until another host has torchrun restart it."""
    # Otherwise the new agent waits for the address of a store that the others do not publish again.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if lost == "A":  # its agent is the first, with rank 0
        agents.serve_store()
    running = {host: agents.start_host(host) for host in "AB"}
    eventually((agents.folder / "saved").exists)
    _kill_all(running.pop(lost))
    agents.await_trained()
    ends = end_of(agents, [*running.values(), agents.start_host("C")])
    assert int(ends[0][0]) > 0, ends
    assert [end[3] for end in ends] == ["0", "0"]  # torchrun counts failures only
