"""Joining a job: who may, where ranks listen, and a thousand strangers who change nothing."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gradwire import Communicator
from gradwire._base.deadline import Deadline
from gradwire._base.environment import VARIABLES
from gradwire._bootstrap import handshake
from gradwire._bootstrap.authenticator import RefusalLog
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake, receive
from gradwire._bootstrap.job_secret import find_secret
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import AddressInfo, Job, Mesh, unpack_address_info
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.store import Address, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.through_torch.host_info import pack_host_info, unpack_host_info
from gradwire._bootstrap.through_torch.open_exchange import Question
from gradwire._communicator import from_mesh
from gradwire._errors import RendezvousError
from gradwire._host.interfaces import Choice, Interface
from ranks import LIMIT
from sealing import tcp_pair
from storm import Storm

SECRET = b"0123456789abcdef"
STRANGERS = 1000


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def quick_and_fresh_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._bootstrap.authenticator.refusals", RefusalLog())
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 2.0)  # silent strangers go sooner


def gather_storm() -> Storm:
    return Storm(*record_a_handshake())


def record_a_handshake() -> tuple[bytes, bytes]:
    """The hello and the proof of one that a store of the job let in."""
    ours, theirs = tcp_pair()
    deadline, here = Deadline(20), Address("tcp", "127.0.0.1", 0)
    with ours, theirs, StoreServer(here, "job", SECRET) as server:
        hello = Hello("job", Purpose.STORE)
        client = threading.Thread(target=client_handshake, args=(ours, hello, SECRET, deadline))
        client.start()
        with socket.create_connection((server.address.host, server.address.port)) as sock:
            sock.sendall(said := receive(theirs, 112, deadline))
            theirs.sendall(receive(sock, 60, deadline))
            sock.sendall(proof := receive(theirs, 16, deadline))
            theirs.sendall(receive(sock, 16, deadline))
        client.join()
    return said, proof


def open_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def refusals(records: Sequence[logging.LogRecord]) -> list[str]:
    return [str(each.args[0]) for each in records if "refused" in each.msg and each.args]


# A thousand strangers


def join(place: LaunchInfo) -> Mesh:
    return rendezvous(place, lambda mesh: mesh, timeout=60, secret=SECRET, transports=["tcp"])


def on_ranks(places: Sequence[LaunchInfo], call: Callable[[LaunchInfo], Mesh]) -> list[Mesh]:
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(call, places))


def test_all_ranks_join_amid_a_thousand_strangers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter at the store, and three quarters at the ranks' own listeners."""
    before = open_descriptors()
    pack = AddressInfo.pack

    def pack_amid_a_crowd(address: AddressInfo) -> bytes:
        storm.at(Address("tcp", address.address, address.port), STRANGERS // 4)
        return pack(address)

    monkeypatch.setattr(AddressInfo, "pack", pack_amid_a_crowd)
    with (
        caplog.at_level(logging.WARNING, "gradwire"),
        gather_storm() as storm,
        StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET) as server,
    ):
        storm.at(server.address, STRANGERS // 4)
        base = LaunchInfo(0, 3, job="job", store=str(server.address))
        for mesh in on_ranks([replace(base, rank=rank) for rank in range(3)], join):
            assert sorted([mesh.rank, *mesh.peers]) == [0, 1, 2]
            mesh.close()
        assert storm.end() == STRANGERS
    assert refusals(caplog.records) == ["127.0.0.1"]
    assert open_descriptors() == before


def train(comm: Communicator, more: Callable[[int], bool]) -> list[str]:
    """Digests of the weights after each step; the ranks end together, when rank 0 wants to."""
    gradients = np.random.default_rng(comm.rank)
    weights = np.zeros(50_000, np.float32)
    digests: list[str] = []
    goes_on = True
    while goes_on:
        step = gradients.standard_normal(weights.size + 1).astype(np.float32)
        step[-1] = comm.rank == 0 and more(len(digests))
        comm.all_reduce(step, algorithm="ring")
        goes_on = step[-1] == 1
        weights -= np.float32(0.1) * step[:-1]
        digests.append(hashlib.sha256(weights.tobytes()).hexdigest())
    return digests


def train_all(meshes: Sequence[Mesh], more: Callable[[int], bool]) -> list[list[str]]:
    def train_one(mesh: Mesh) -> list[str]:
        with from_mesh(mesh, timeout=60) as comm:
            return train(comm, more)

    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(train_one, meshes))


@pytest.mark.nightly
def test_a_thousand_strangers_change_no_bit_of_a_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store stays open for the whole of it, as a launcher's does."""
    before = open_descriptors()
    with (
        caplog.at_level(logging.WARNING, "gradwire"),
        gather_storm() as storm,
        StoreServer(Address("tcp", "127.0.0.1", 0), "job", SECRET) as server,
    ):
        base = LaunchInfo(0, 3, job="job", store=str(server.address))
        places = [replace(base, rank=rank) for rank in range(3)]

        def more(step: int) -> bool:
            if step == 0:
                storm.at(server.address, STRANGERS)
            return not storm.over

        stormy = train_all(on_ranks(places, join), more)
        assert storm.end() == STRANGERS
        quiet = train_all(on_ranks(places, join), lambda step: step + 1 < len(stormy[0]))
    assert stormy[0] == stormy[1] == stormy[2]
    assert stormy == quiet
    assert refusals(caplog.records) == ["127.0.0.1"]
    assert open_descriptors() == before


LAUNCHED = """
import os, sys
import gradwire
from test_joins import train

def more(step):
    print("step", flush=True)
    return sys.stdin.read(1) == "+"

with gradwire.init() as comm:
    if comm.rank == 0:
        print(os.environ["GRADWIRE_STORE"], flush=True)
    comm.barrier()
    digests = train(comm, more)
    if comm.rank == 0:
        print(len(digests), digests[-1], flush=True)
"""


@pytest.mark.long
def test_a_launched_training_listens_nowhere_but_at_its_launcher(tmp_path: Path) -> None:
    """A thousand strangers come to the launcher, and are refused with one line of log."""
    script = tmp_path / "rank.py"
    script.write_text(LAUNCHED)
    with Launched(script) as stormy, gather_storm() as storm:
        stormy.step()  # so all have met
        descriptors = open_descriptors(stormy.process.pid)
        assert stormy.listening() == ([f"@{stormy.store.host}"], [])
        storm.at(stormy.store, STRANGERS)
        steps = 1
        while not storm.over:
            stormy.step()
            steps += 1
        assert storm.end() == STRANGERS
        assert open_descriptors(stormy.process.pid) <= descriptors
        digest, errors = stormy.end()
    assert errors.count("refused a connection from a process of user") == 1
    with Launched(script) as quiet:
        for _ in range(steps):
            quiet.step()
        assert quiet.end()[0] == digest
    assert digest.split()[0] == str(steps + 1)


class Launched:
    """`gradwire run -n 2 script`, whose ranks take a step each time that they are told to."""

    def __init__(self, script: Path) -> None:
        environment = {**os.environ, "GRADWIRE_TRANSPORT": "tcp"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self._errors = script.with_suffix(".stderr")  # unlike a pipe, it never is full
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradwire", "run", "-n", "2", str(script)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdin is not None
        self._hears = self.process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.store = parse_address(self._line())

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its pipes
            self.process.kill()  # and the kernel its ranks, if it has not ended
            self._reader.join(LIMIT)

    def step(self, then: str = "+") -> None:
        assert self._line() == "step"
        self._hears.write(then)
        self._hears.flush()

    def end(self) -> tuple[str, str]:
        """Takes the last step; returns the steps with the last digest, and what went to stderr."""
        self.step(then="-")
        out = self._line()
        code = self.process.wait(LIMIT)
        errors = self._errors.read_text()
        assert code == 0, errors
        return out, errors

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def _line(self) -> str:
        """The next that it says; raises queue.Empty where it says nothing for long."""
        return self._lines.get(timeout=LIMIT)

    def listening(self) -> tuple[list[str], list[str]]:
        """The addresses that the launcher listens at, and those that its ranks do."""
        pid = self.process.pid
        ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return listening(pid), [each for rank in ranks for each in listening(int(rank))]


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens, by any socket of the kernel's lists."""
    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    own = {match[1] for each in links if (match := re.fullmatch(r"socket:\[(\d+)\]", each))}
    found = []
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in own:
                found.append(words[1])
    for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = row.split()
        if int(words[3], 16) & 0x10000 and words[6] in own:  # __SO_ACCEPTCON
            found.append(words[7])
    return found


# Where ranks listen


def test_a_rank_listens_at_the_chosen_address_only() -> None:
    chosen = Choice(Interface("lo", "127.0.0.2"), "the test's")
    addresses: dict[int, bytes] = {}
    barrier = threading.Barrier(2)

    def exchange_of(rank: int) -> Callable[[bytes, Deadline], list[bytes]]:
        def exchange(address: bytes, deadline: Deadline) -> list[bytes]:
            port = unpack_address_info(address, rank).port
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=5)
            socket.create_connection(("127.0.0.2", port), timeout=5).close()
            addresses[rank] = address
            barrier.wait(deadline.remaining)
            return [addresses[0], addresses[1]]

        return exchange

    def call(rank: int) -> Mesh:
        return connect_mesh(
            Job("job", SECRET),
            exchange_of(rank),
            rank=rank,
            size=2,
            communicator=1,
            deadline=Deadline(20),
            transports=["tcp"],
            interface=chosen,
        )

    with ThreadPoolExecutor(2) as pool:
        for mesh in pool.map(call, range(2)):
            mesh.close()


# Secrets


@pytest.mark.parametrize("name", ["GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE"])
def test_a_variable_that_is_empty_is_no_wish_to_go_without(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(RendezvousError, match=r"has 0 bytes|cannot read"):
        find_secret(None)


@pytest.mark.parametrize("given", ["", b"", "x" * 15])
def test_a_short_argument_is_refused_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch, given: str | bytes
) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", "long enough, long enough")
    with pytest.raises(RendezvousError, match="fewer than 16"):
        find_secret(given)


def test_a_secret_file_that_would_block_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(RendezvousError):
        find_secret(None)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b"[" * 10_000,
        b'{"host": "a", "question": null, "reached": ""}',
        b'{"host": "a", "question": "no hex", "reached": "", "job": "j"}',
        b'{"host": "a", "question": "00", "reached": "", "job": "j"}',
        b'{"host": "a", "question": 1, "reached": "", "job": "j"}',
    ],
)
def test_a_foreign_introduction_in_a_process_group_names_the_rank(data: bytes) -> None:
    with pytest.raises(RendezvousError, match="rank 0 sent no host information"):
        unpack_host_info(data, 0)


def test_an_introduction_survives_its_trip() -> None:
    question = Question().message
    said = unpack_host_info(pack_host_info(0, question, "192.0.2.1"), 0)
    assert (said["question"], said["reached"]) == (question, "192.0.2.1")
    said = unpack_host_info(pack_host_info(1, None, ""), 1)
    assert said["question"] is None
    assert "job" not in said
