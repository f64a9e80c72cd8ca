"""Strangers: other users of the host, and whoever reaches torch's store, get nowhere."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import gradwire
import pytest
from agent import agents_store, rank_of_agent
from elastic_job import SECRET, elastic_job, has, train
from gradwire import RendezvousError, serve
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import join_listener, torch_rendezvous
from gradwire._bootstrap.advertised_store import endpoint_at, unpack_endpoint, unpack_place
from gradwire._bootstrap.authenticator import Authenticator, RefusalLog
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.endpoints import listen
from gradwire._bootstrap.groups.group_rendezvous import rendezvous_in_group
from gradwire._bootstrap.join_listener import ListenerEntry, entry_key, unpack_entry
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import AddressInfo, Job, Mesh
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.resize import open_listener
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.through_torch.open_exchange import Question, answer_to
from gradwire._bootstrap.through_torch.torch_store import TorchStore
from gradwire._host import own_folder
from gradwire._host.interfaces import LOOPBACK
from gradwire._host.transport_kinds import DEFAULTS
from ranks import LIMIT, eventually

NOBODY = 65534  # the user id of a stranger
as_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs a second user id, which root alone may take"
)


@pytest.fixture(autouse=True)
def alone(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._bootstrap.authenticator.refusals", RefusalLog())


@pytest.fixture
def torchs_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the one of torchrun's agent."""
    pytest.importorskip("torch.distributed")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with agents_store() as port:
        yield f"torch://127.0.0.1:{port}"


# Whoever reads torch's store


class Listener:
    """All that ranks write into torch's store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: dict[str, bytes] = {}
        honest = TorchStore.set

        def write(store: TorchStore, key: str, value: bytes) -> None:
            self.heard[key] = value
            honest(store, key, value)

        monkeypatch.setattr(TorchStore, "set", write)

    def require_ignorant(self, secret: bytes) -> None:
        """Neither a key nor a value has the secret."""
        text = b"\n".join(key.encode() + b" " + value for key, value in self.heard.items())
        assert self.heard
        assert secret not in text
        assert secret.hex().encode() not in text

    @property
    def answers(self) -> list[bytes]:
        return [each for key, each in self.heard.items() if "/answer/" in key]


def meet_by(store: str, **place: Any) -> list[Mesh]:
    base = replace(LaunchInfo(0, 2, "torchrun", "job", store=store), **place)
    with ThreadPoolExecutor(2) as pool:
        ranks = [replace(base, rank=rank) for rank in range(2)]
        return list(pool.map(lambda each: rendezvous(each, lambda mesh: mesh, timeout=30), ranks))


@pytest.mark.parametrize("restarts", [False, True])
def test_who_reads_torchs_store_learns_no_secret(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    torchs_store: str,
    restarts: bool,
) -> None:
    listener = Listener(monkeypatch)
    meshes = meet_by(torchs_store, local_size=2, restarts=restarts)
    for mesh in meshes:
        mesh.close()
    assert meshes[0].job.secret == meshes[1].job.secret
    assert len(meshes[0].job.secret) == 32
    listener.require_ignorant(meshes[0].job.secret)
    assert "GRADWIRE_SECRET" not in caplog.text  # other users cannot reach Unix sockets


def test_the_secret_of_a_process_group_is_not_in_what_its_ranks_exchange() -> None:
    said: list[dict[int, bytes]] = []
    barrier, lock = threading.Barrier(2), threading.Lock()

    def all_gather_of(rank: int) -> Callable[[bytes], list[bytes]]:
        turns = iter(range(9))

        def all_gather(own: bytes) -> list[bytes]:
            turn = next(turns)
            with lock:
                while len(said) <= turn:
                    said.append({})
                said[turn][rank] = own
            barrier.wait(LIMIT)
            return [said[turn][0], said[turn][1]]

        return all_gather

    def body(rank: int) -> bytes:
        def make(mesh: Mesh) -> bytes:
            mesh.close()
            return mesh.job.secret

        return rendezvous_in_group(rank, 2, all_gather_of(rank), make, Deadline(30))

    with ThreadPoolExecutor(2) as pool:
        known = set(pool.map(body, range(2)))
    assert len(known) == 1
    (secret,) = known
    everything = b"\n".join(each for turn in said for each in turn.values())
    assert len(secret) == 32
    assert secret not in everything
    assert secret.hex().encode() not in everything


def test_on_several_hosts_rank_0_warns_that_a_secret_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, torchs_store: str
) -> None:
    """Two addresses of one host stand for two hosts."""
    monkeypatch.setattr(
        torch_rendezvous, "_choose_store_address", lambda *_: Address("tcp", "127.0.0.1", 0)
    )
    listener = Listener(monkeypatch)
    meshes = meet_by(torchs_store)
    for mesh in meshes:
        mesh.close()
    warnings = [each for each in caplog.messages if "no GRADWIRE_SECRET" in each]
    assert len(warnings) == 1
    assert "export GRADWIRE_SECRET=$(openssl rand -hex 32)" in warnings[0]
    listener.require_ignorant(meshes[0].job.secret)
    (answer,) = listener.answers
    with pytest.raises(RendezvousError, match="another question than this rank's"):
        unpack_endpoint(answer, None, Question())


def test_on_one_host_no_stranger_takes_the_place_of_rank_0(torchs_store: str) -> None:
    """He answers the rank's question with a secret and a store of his own."""
    with StoreServer(Address("tcp", "127.0.0.1", 0), "job", b"of the stranger's") as evil:
        host, _, port = torchs_store.removeprefix("torch://").partition(":")
        stranger = TorchStore(host, int(port), 1, 2, Deadline(30))
        stranger.set("gradwire/job/0/0/store/0", f"{evil.address} -".encode())
        place = LaunchInfo(1, 2, "torchrun", "job", store=torchs_store, local_size=2)
        with pytest.raises(RendezvousError, match="all ranks are on this host, and the store"):
            rendezvous(place, lambda mesh: mesh, timeout=30)


# A question as everybody can make it, with a public key with which all agree on zeros.
_WITHOUT_A_KEY = bytes(32) + bytes.fromhex("237bbe1893825a3aeed48c73629808dc")


def test_an_answer_is_for_one_question() -> None:
    question, other = Question(), Question()
    answer = answer_to(question.message, b"a secret")
    with pytest.raises(ValueError, match="secret"):
        other.read(answer)
    assert question.read(answer) == b"a secret"
    for foreign in (b"", bytes(48), question.message[:-1], _WITHOUT_A_KEY):
        with pytest.raises(ValueError, match="it"):
            answer_to(foreign, b"a secret")
    with pytest.raises(RendezvousError, match="rank 0 has a GRADWIRE_SECRET"):
        endpoint_at(unpack_place(b"unix://x secret"), b"", None, Question())


# The join listener


def enter_torchrun(rank: int, port: int) -> None:
    os.environ |= rank_of_agent(rank, port)
    for name in ("GRADWIRE_STORE", "GRADWIRE_JOB"):
        os.environ.pop(name, None)


@pytest.mark.parametrize("call", ["accept_joins", "resize"])
def test_without_a_secret_no_door_is_opened_in_torchs_store(torchs_store: str, call: str) -> None:
    port = int(torchs_store.rpartition(":")[2])

    def member(rank: int) -> str:
        enter_torchrun(rank, port)
        with gradwire.init(timeout=30) as comm, pytest.raises(RendezvousError) as raised:
            getattr(comm, call)()
        return str(raised.value)

    with elastic_job() as job:
        texts = [each.value() for each in [job.process(lambda r=r: member(r)) for r in range(2)]]
    for rank, text in enumerate(texts):
        assert f"rank {rank}: " in text
        assert "`export GRADWIRE_SECRET=$(openssl rand -hex 32)` once" in text
    stranger = TorchStore("127.0.0.1", port, 1, 2, Deadline(30))
    assert stranger.find(entry_key("run")) is None


def test_who_joins_by_torchs_store_needs_the_secret(torchs_store: str) -> None:
    with pytest.raises(RendezvousError, match=r"join\(\) needs the job's secret"):
        gradwire.join(store=torchs_store, timeout=30)


def test_a_forged_sign_is_replaced_and_nobody_follows_it(
    monkeypatch: pytest.MonkeyPatch, torchs_store: str
) -> None:
    monkeypatch.setattr(join_listener, "RENEW_SECONDS", 0.2)
    port = int(torchs_store.rpartition(":")[2])

    def member(rank: int) -> Any:
        enter_torchrun(rank, port)
        comm, state = train(gradwire.init(secret=SECRET, timeout=30), has(3))
        with comm:
            return state

    def joiner() -> Any:
        os.environ |= {"GRADWIRE_JOB": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        comm, state = train(gradwire.join(store=torchs_store, secret=SECRET, timeout=60), has(3))
        with comm:
            return state

    with elastic_job() as job, socket.create_server(("127.0.0.1", 0)) as evil:
        processes = [job.process(lambda rank=rank: member(rank)) for rank in range(2)]
        stranger = TorchStore("127.0.0.1", port, 1, 2, Deadline(LIMIT))
        key = entry_key("run")
        honest = unpack_entry(stranger.get(key, LIMIT), "run", SECRET.encode())
        there = AddressInfo("h", "evil:1", ("tcp",), "", "127.0.0.1", evil.getsockname()[1])
        forged = ListenerEntry("run", b"the stranger's own", there, 0, 10**6).pack()
        stranger.set(key, forged)
        eventually(lambda: stranger.get(key, LIMIT) != forged)
        assert unpack_entry(stranger.get(key, LIMIT), "run", SECRET.encode()) == honest
        stranger.set(key, forged)  # which whoever joins now reads at first
        processes.append(job.process(joiner))
        assert len({each.value() for each in processes}) == 1
        evil.settimeout(0)
        with pytest.raises(BlockingIOError):
            evil.accept()


def test_a_sign_is_for_its_job_and_whole(torchs_store: str) -> None:
    entry = ListenerEntry("job", SECRET.encode(), AddressInfo("", "", (), "", "::1", 0), 0, 3)
    assert unpack_entry(entry.pack(), "job", SECRET.encode()) == entry
    assert SECRET.encode() not in entry.pack()
    changed = entry.pack().replace(b'"membership": 3', b'"membership": 4')
    for foreign, job in ((entry.pack(), "other"), (changed, "job"), (b"", "job"), (b"{}", "job")):
        with pytest.raises(RendezvousError, match="not signed with the job's secret"):
            unpack_entry(foreign, job, SECRET.encode())


# Other users of this host


def as_nobody(body: Callable[[], Any]) -> Any:
    """What the function returns in a process of another user."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writes, str(body()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with open(reads, "rb") as pipe:
        return pipe.read().decode()


def request(name: str) -> str:
    """What a Unix socket says to who connects: nothing, and it ends the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT)
        sock.connect("\0" + name)
        return repr(sock.recv(1))


@contextlib.contextmanager
def a_store() -> Iterator[str]:
    name = f"gradwire-{secrets.token_hex(8)}"
    with StoreServer(Address("unix", name), "job", b""):
        yield name


@contextlib.contextmanager
def a_join_listener() -> Iterator[str]:
    with (
        gradwire.init(rank=0, ranks=1, store=f"unix://{secrets.token_hex(8)}") as comm,
        contextlib.closing(open_listener(comm._mesh)) as opened,
    ):
        yield opened._address.unix


@contextlib.contextmanager
def an_acceptor() -> Iterator[str]:
    """A rank's listener, with a thread as `connect` has it."""
    listeners, info = listen(DEFAULTS, LOOPBACK)
    authenticator = Authenticator(listeners, "job", b"", lambda *_: None)
    ends = threading.Event()

    def run() -> None:
        while not ends.is_set():
            authenticator.poll(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield info.unix
    finally:
        ends.set()
        thread.join()
        authenticator.close()


@contextlib.contextmanager
def a_server() -> Iterator[str]:
    with serve.Server(1) as server:
        yield server._listener.address.unix


@as_another_user
@pytest.mark.parametrize("place", [a_store, a_join_listener, an_acceptor, a_server])
def test_another_user_is_refused_before_a_word(
    caplog: pytest.LogCaptureFixture,
    place: Callable[[], contextlib.AbstractContextManager[str]],
) -> None:
    with place() as name:
        assert as_nobody(lambda: request(name)) == "b''"
    assert f"process of user {NOBODY}: it runs as user {NOBODY}, this as 0" in caplog.text


@contextlib.contextmanager
def served_by_nobody(name: str) -> Iterator[None]:
    """A process of another user that serves a store at this name, and takes whoever comes."""
    ready, over = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            with StoreServer(Address("unix", name), "job", b""):
                os.write(ready[1], b"x")
                os.close(over[1])
                os.read(over[0], 1)
        finally:
            os._exit(0)
    os.close(ready[1])
    try:
        assert os.read(ready[0], 1) == b"x", "it cannot serve there"
        yield
    finally:
        for each in (ready[0], *over):
            os.close(each)
        os.waitpid(child, 0)


@as_another_user
def test_a_store_that_another_user_serves_is_not_joined() -> None:
    """He has taken the name before the job."""
    name = f"gradwire-{secrets.token_hex(8)}"
    with (
        served_by_nobody(name),
        pytest.raises(RendezvousError, match=f"is not ours: it runs as user {NOBODY}"),
    ):
        StoreClient(Address("unix", name), "job", b"", Deadline(10))


@as_another_user
def test_a_rank_whose_name_another_user_has_taken_is_not_joined() -> None:
    """He has waited for the end of its owner, whose name others know."""
    listeners, taken = listen(DEFAULTS, LOOPBACK)
    for each in listeners:
        each.close()
    with (
        served_by_nobody(taken.unix),
        pytest.raises(RendezvousError, match=f"rank 0 .*it runs as user {NOBODY}, this as 0"),
    ):
        connect_mesh(
            Job("job", b""),
            lambda own, _: [taken.pack(), own],
            rank=1,
            size=2,
            communicator=0,
            deadline=Deadline(LIMIT),
        )


@as_another_user
def test_a_name_that_can_be_guessed_is_taken_by_nobody_else(
    bare_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store of ranks of one host, whose launcher gives them no store: mpirun's, for one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        os.chmod(shared, 0o1777)
        monkeypatch.setattr(own_folder, "_SHARED", shared)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        folder = own_folder.own_folder()  # before him: there he can take no name
        assert as_nobody(lambda: squat(f"{folder}/gradwire-job")) == "PermissionError"
        os.rmdir(folder)
        assert as_nobody(lambda: squat(f"{folder}/gradwire-job")) == "taken"  # and after him
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "0")
        for name in ("SIZE", "LOCAL_SIZE"):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "2")
        with pytest.raises(RendezvousError, match=f"belongs to user {NOBODY}, and this is user 0"):
            gradwire.init(timeout=LIMIT)


def squat(path: str) -> str:
    """Listens at a socket's path, whose folder it makes where there is none."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            sock.listen()
    except OSError as error:
        return type(error).__name__
    return "taken"


def test_on_one_host_ranks_listen_on_unix_sockets_alone(
    monkeypatch: pytest.MonkeyPatch, torchs_store: str
) -> None:
    published: list[AddressInfo] = []
    pack = AddressInfo.pack
    monkeypatch.setattr(AddressInfo, "pack", lambda info: published.append(info) or pack(info))
    for mesh in meet_by(torchs_store, local_size=2):
        mesh.close()
    with serve.Server(1):
        pass
    with a_join_listener():
        pass
    assert len(published) >= 3
    assert all(info.unix and not info.port for info in published)
