"""GRADWIRE_ENCRYPTION: which sockets are sealed, who refuses whom, and what nobody may read."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import gradwire
import numpy as np
import pytest
from elastic_job import Process
from gradwire import _core, serve
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake, joining
from gradwire._bootstrap.acceptor import Acceptor
from gradwire._bootstrap.authenticator import Authenticator, RefusalLog
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose, client_handshake
from gradwire._bootstrap.mesh import Job, Mesh
from gradwire._bootstrap.rendezvous import choose_transports
from gradwire._bootstrap.store import NO_RANK, Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._calls import gpus
from gradwire._host import encryption
from gradwire._host.encryption import Mismatch, Setting, Side, agree, unpack_side
from gradwire._host.encryption import Path as Way
from gradwire._host.interfaces import LOOPBACK
from gradwire._host.sealed_socket import SealedSocket
from gradwire.serve import _channels
from hosts import Network
from namespaces import missing
from ranks import LIMIT
from sealing import sealed, tcp_pair

SECRET = b"a secret that nobody may read"
HELLO = Hello("job", Purpose.CONTROL)
_HERE, _THERE = b"8 bytes.", b"another."


def side(setting: Setting, way: Way = Way.NETWORK, host: bytes = _HERE, aes: bool = True) -> Side:
    return Side(setting, way, host, aes)


@pytest.mark.parametrize(
    ("mine", "theirs", "is_sealed"),
    [
        (side(Setting.AUTO), side(Setting.AUTO, host=_THERE), True),
        (side(Setting.AUTO), side(Setting.ON, host=_THERE), True),
        (side(Setting.AUTO, Way.LOCAL), side(Setting.AUTO, Way.LOCAL), False),
        # A program that relays loopback to another host deceives nobody.
        (side(Setting.AUTO, Way.LOCAL), side(Setting.AUTO, Way.LOCAL, _THERE), True),
        (side(Setting.AUTO, Way.LOCAL), side(Setting.AUTO, Way.NETWORK), True),
        (side(Setting.AUTO, Way.LOCAL), side(Setting.ON, Way.LOCAL), True),
        (side(Setting.AUTO, Way.LOCAL), side(Setting.OFF, Way.LOCAL), False),
        (side(Setting.ON, Way.LOCAL), side(Setting.ON, Way.LOCAL), True),
        (side(Setting.OFF), side(Setting.OFF), False),
        (side(Setting.ON, Way.UNIX), side(Setting.OFF, Way.UNIX), False),
    ],
)
def test_both_ends_agree_on_whether_to_seal(mine: Side, theirs: Side, is_sealed: bool) -> None:
    assert agree(mine, theirs) == agree(theirs, mine)
    assert (agree(mine, theirs) is not None) == is_sealed


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (side(Setting.ON), side(Setting.OFF)),
        (side(Setting.AUTO), side(Setting.OFF, host=_THERE)),
        (side(Setting.AUTO, Way.UNIX), side(Setting.AUTO, Way.LOCAL)),
    ],
)
def test_two_ends_that_exclude_each_other_both_say_so(mine: Side, theirs: Side) -> None:
    for one, other in ((mine, theirs), (theirs, mine)):
        with pytest.raises(Mismatch):
            agree(one, other)


def test_aes_is_taken_only_where_both_processors_have_it() -> None:
    fast, slow = side(Setting.ON), side(Setting.ON, aes=False)
    assert agree(fast, fast) is _core.Cipher.AES_128_GCM
    for one, other in ((fast, slow), (slow, fast), (slow, slow)):
        assert agree(one, other) is _core.Cipher.CHACHA20_POLY1305


@pytest.mark.parametrize(
    "foreign", [b"", bytes(11), bytes(13), b"\3" + bytes(11), b"\0\3" + bytes(10)]
)
def test_a_side_that_is_none_is_refused(foreign: bytes) -> None:
    with pytest.raises(Mismatch):
        unpack_side(foreign)
    assert unpack_side(side(Setting.ON).pack()) == side(Setting.ON)


@pytest.fixture
def authenticator(monkeypatch: pytest.MonkeyPatch) -> Authenticator:
    monkeypatch.setattr("gradwire._bootstrap.authenticator.refusals", RefusalLog())
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", "on")
    return Authenticator([], "job", SECRET, lambda hello, sock: None)


def meet(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> list[socket.socket | OSError]:
    """What a client with another setting gets, and whom the authenticator admits."""
    one, other = tcp_pair()
    authenticator.begin_handshake(other, "192.0.2.7")
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", theirs)
    found: list[socket.socket | OSError] = []

    def run() -> None:
        try:
            found.append(client_handshake(one, HELLO, SECRET, Deadline(LIMIT)))
        except OSError as error:
            found.append(error)

    client = threading.Thread(target=run)
    client.start()
    while authenticator.pending:
        found += [each.sock for each in authenticator.poll(0.1)]
    client.join()
    one.close()
    return found


def test_on_and_off_are_a_clear_error_at_both_ends(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        (error,) = meet(authenticator, monkeypatch, "off")
    assert isinstance(error, HandshakeError)
    assert "it has GRADWIRE_ENCRYPTION=on and this process off" in str(error)
    assert "it has GRADWIRE_ENCRYPTION=off and this process on" in caplog.text
    authenticator.close()


@pytest.mark.parametrize("answers", [False, True])
def test_a_recording_excludes_nobody(
    answers: bool,
    authenticator: Authenticator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a rank with another setting has said once proves nothing without its answer."""
    one, other = tcp_pair()
    authenticator.begin_handshake(other, "192.0.2.7")
    said = side(Setting.OFF).pack()
    noise = handshake._noise(True, SECRET, HELLO)
    with caplog.at_level(logging.WARNING, "gradwire"), one:
        one.sendall(HELLO.pack() + noise.write(said))
        one.sendall(bytes(16) if answers else b"")
        one.shutdown(socket.SHUT_WR)
        while authenticator.pending:
            assert authenticator.poll(0.1) == []
    assert authenticator.excluded is None
    assert ("repeats" if answers else "closed the connection") in caplog.text
    authenticator.close()


def excluded_by(setting_0: str, setting_1: str, store: str, timeout: float) -> list[str]:
    """What two ranks with these settings raise, in processes of their own."""

    def body(rank: int) -> str:
        os.environ["GRADWIRE_ENCRYPTION"] = setting_1 if rank else setting_0
        with pytest.raises(gradwire.RendezvousError) as raised:
            gradwire.init(rank=rank, ranks=2, store=store, secret=SECRET, timeout=timeout)
        return str(raised.value)

    ranks = [Process(partial(body, rank), before=lambda: None) for rank in range(2)]
    return [each.value() for each in ranks]


def test_both_ranks_fail_at_once_where_settings_exclude_each_other(bare_environment: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        store = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    began = time.monotonic()
    listens, connects = excluded_by("on", "off", store, timeout=10 * LIMIT)
    assert time.monotonic() - began < LIMIT
    assert "cannot admit rank 1 at 127.0.0.1" in listens
    assert "it has GRADWIRE_ENCRYPTION=off and this process on" in listens
    assert "it has GRADWIRE_ENCRYPTION=on and this process off" in connects


def let_clients_say(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives clients of this thread a setting; who listens in another thread has "on"."""

    def side_of(sock: socket.socket, host: str) -> Side:
        mine = threading.current_thread() is threading.main_thread()
        return replace(encryption.side_of(sock, host), setting=setting if mine else Setting.ON)

    monkeypatch.setattr(handshake, "side_of", side_of)


def test_a_client_that_is_no_rank_ends_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program with the secret and another setting is refused alone."""
    address = Address("tcp", "127.0.0.1", 0)
    let_clients_say(Setting.ON, monkeypatch)
    with StoreServer(address, "job", SECRET, one_rendezvous=True) as server:
        client = StoreClient(server.address, "job", SECRET, Deadline(LIMIT), rank=0)
        let_clients_say(Setting.OFF, monkeypatch)
        for rank in (NO_RANK, 1):
            with pytest.raises(gradwire.RendezvousError, match="cannot use the store"):
                StoreClient(server.address, "job", SECRET, Deadline(LIMIT), rank=rank)
            if rank == NO_RANK:
                with pytest.raises(TimeoutError):
                    client.get("nothing", 0.1)
        with pytest.raises(gradwire.RendezvousError, match="cannot admit rank 1 at"):
            client.get("nothing", LIMIT)
        client.close()


def test_the_rank_that_accepts_learns_which_rank_it_excludes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where neither has met in a store: communicators of a communicator's ranks."""
    let_clients_say(Setting.OFF, monkeypatch)
    mesh = Mesh(Job("job", SECRET), 0, 2, 0, ("here",) * 2, {}, LOOPBACK)
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor([listener], mesh)
    acceptor.start()
    hello = Hello("job", Purpose.CONTROL, source=1)
    with (
        socket.create_connection(listener.getsockname()) as sock,
        pytest.raises(handshake.SettingsError),
    ):
        client_handshake(sock, hello, SECRET, Deadline(LIMIT))
    with pytest.raises(gradwire.RendezvousError, match=r"cannot admit rank 1 at .*: it has"):
        acceptor.wait(Deadline(LIMIT))
    acceptor.close()


def fail(sock: socket.socket, *_: object) -> None:
    sock.close()
    raise handshake.SettingsError("it has GRADWIRE_ENCRYPTION=on and this process off")


def test_who_joins_with_another_setting_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"unix://{secrets.token_hex(8)}"
    with gradwire.init(rank=0, ranks=1, store=store, secret=SECRET) as comm:
        comm.accept_joins()
        monkeypatch.setattr(joining, "client_handshake", fail)
        with pytest.raises(gradwire.RendezvousError, match="cannot join job 'gradwire': it has"):
            gradwire.join(store=store, secret=SECRET, timeout=10 * LIMIT)


def test_a_client_with_another_setting_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve.Server(1) as server:
        monkeypatch.setattr(_channels, "client_handshake", fail)
        with pytest.raises(gradwire.RendezvousError, match=r"cannot connect to shard 0 .*: it has"):
            serve.connect(
                [np.zeros(9, np.float32)], serve.SGD(lr=1.0), store=server.store, timeout=10 * LIMIT
            )


def test_on_seals_tcp_and_neither_secrets_nor_keys_show(
    authenticator: Authenticator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        ends = meet(authenticator, monkeypatch, "on")
    assert all(isinstance(end, SealedSocket) for end in ends)
    assert SECRET.decode() not in caplog.text
    for end in ends:
        assert isinstance(end, SealedSocket)
        assert {name for name in dir(end.seal) if not name.startswith("_")} == {
            *("cipher", "missing", "opened", "records")
        }
        end.close()
    authenticator.close()


_ALL_REDUCE = """
import sys
import gradwire, numpy
from gradwire import _core
if "none" in sys.argv:
    _core.use_libcrypto("libcrypto-that-is-nowhere.so")
with gradwire.init(timeout=20) as comm:
    print(f" {comm.all_reduce(numpy.ones(3))[0]} ")
"""


def launch(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "rank.py"
    script.write_text(_ALL_REDUCE)
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "run", "-n", "2", str(script), *arguments],
        env=os.environ | {"GRADWIRE_TRANSPORT": "tcp"} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_ranks_without_libcrypto_say_which_package_to_install(tmp_path: Path) -> None:
    ended = launch(tmp_path, "none", GRADWIRE_ENCRYPTION="on")
    assert ended.returncode == 1, ended.stderr  # by an exception, and not by an abort
    assert "apt-get install libssl3" in ended.stderr
    assert "gradwire.RendezvousError" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("setting", ["on", "off", "auto"])
def test_a_job_runs_with_each_setting(tmp_path: Path, setting: str) -> None:
    ended = launch(tmp_path, GRADWIRE_ENCRYPTION=setting)
    assert (ended.stdout.split(), ended.returncode) == (["2.0", "2.0"], 0), ended.stderr


def test_another_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", "maybe")
    with pytest.raises(gradwire.InvalidArgument, match="is none of auto, on, off"):
        encryption.setting()


def test_on_refuses_rdma_by_name_and_leaves_it_out_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "rdma" in choose_transports(None)
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", "on")
    assert choose_transports(None) == ("shm", "tcp")
    with pytest.raises(gradwire.InvalidArgument, match="rdma cannot be encrypted"):
        choose_transports(["rdma", "tcp"])


def test_on_refuses_nccl_by_name_and_leaves_it_out_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus._core, "cuda_device_identity", lambda device: ("gpu 0", "a GPU"))
    monkeypatch.setattr(gpus.cuda, "nccl_version", lambda: "2.27")
    assert gpus._gpu_info(0).nccl == "2.27"
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", "on")
    assert gpus._gpu_info(0).nccl == ""
    monkeypatch.setenv("GRADWIRE_GPU_LINKS", "nccl")
    with pytest.raises(gradwire.InvalidArgument, match="NCCL cannot be encrypted"):
        gpus._gpu_info(0)


def test_auto_says_once_what_it_cannot_seal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encryption, "_told", set())
    with caplog.at_level(logging.INFO, "gradwire"):
        for _ in range(2):
            encryption.tell_unsealed("rdma", 0)
            encryption.tell_unsealed("NCCL", 1)
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    assert "rdma between hosts is not encrypted" in caplog.text


def test_a_sealed_socket_sends_without_blocking_all_that_it_is_given() -> None:
    one, other = sealed(*tcp_pair())
    outbox, received = bytearray(os.urandom(3_000_000)), bytearray()
    expected = bytes(outbox)
    with one, other:
        one.setblocking(False)
        other.settimeout(LIMIT)
        while len(received) < len(expected):
            try:
                del outbox[: one.send(outbox)]
            except BlockingIOError:
                received += other.recv(1 << 16)
            if not outbox:
                received += other.recv(1 << 16)
    assert received == expected


def test_a_sealed_socket_takes_no_byte_beyond_what_is_asked_for() -> None:
    """What follows is for the core."""
    one, other = sealed(*tcp_pair())
    with one, other:
        one.sendall(b"first")
        one.sendall(b"second")
        assert handshake.receive(other, 5, Deadline(LIMIT)) == b"first"
        rest = socket.socket.recv(other, 4096)
        assert len(rest) == 4 + len(b"second") + 16


def _sum(comm: gradwire.Communicator, _: object) -> float:
    return float(comm.all_reduce(np.ones(1000))[0])


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_auto_seals_between_hosts_and_says_who_must_not() -> None:
    """One that must seal joins it, and with one that must not both say why."""
    network = Network(2)
    try:
        settings = ("auto", "on")
        with_on = network.values(
            [0, 1], _sum, environment=lambda rank: {"GRADWIRE_ENCRYPTION": settings[rank]}
        )
        assert with_on == [2.0, 2.0]
        settings = ("auto", "off")
        with network.start(
            [0, 1],
            _sum,
            environment=lambda rank: {"GRADWIRE_ENCRYPTION": settings[rank]},
            timeout=5.0,
        ) as ranks:
            error = ranks[1].outcome().error
        assert "it has GRADWIRE_ENCRYPTION=auto and this process off" in str(error)
    finally:
        network.close()
