"""A program between two sealed sockets changes bytes: an error names the peer, on every rank."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.endpoints import listen
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake
from gradwire._bootstrap.mesh import Job, Mesh
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.survivor_links import LinkEnded, Message, MessageKind, SurvivorLinks, View
from gradwire._communicator import from_mesh
from gradwire._errors import Error, RendezvousError, Timeout, TransportError
from gradwire._host.interfaces import LOOPBACK
from gradwire.serve import _coordinator
from gradwire.serve._coordinator import Coordinator
from gradwire.serve._sandblaster.messages import OF_COORDINATORS, Reader, pack
from ranks import LIMIT, Outcome, _in_threads, eventually, meshes
from sealing import ATTACKS, Attack, Impostor, Middle, drop, sealed_with_middle, seals, tcp_pair

_RANKS = 3
_SECRET = b"0123456789abcdef"

each_attack = pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.__name__)


def _with_middle(lane: str) -> tuple[list[Mesh], Middle]:
    """Three ranks over TCP; what rank 1 sends to rank 0 in a lane passes a program."""
    made = meshes(_RANKS, "tcp")
    (theirs, ours), middle = sealed_with_middle()
    for rank, peer, sock in ((0, 1, ours), (1, 0, theirs)):
        found = made[rank].peers[peer]
        if lane == "control":
            found.control.close()
            found.control = sock
        else:
            found.links[lane].sock.close()
            found.links[lane] = found.links[lane]._replace(sock=sock)
    return made, middle


def _judge(outcomes: list[Outcome], attack: Attack) -> None:
    """All ranks have raised, and say who it was; a byte that never comes may time out."""
    allowed = (TransportError, Timeout) if attack is drop else TransportError
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, allowed), (rank, outcome)
        assert outcome.error.peer in (0, 1), (rank, outcome.error)
        assert "rank" in str(outcome.error)


@each_attack
def test_data_that_was_changed_fails_on_all_ranks(attack: Attack) -> None:
    made, middle = _with_middle("collective")
    first = threading.Barrier(_RANKS, lambda: middle.arm(attack))

    def body(mesh: Mesh) -> Outcome:
        try:
            with from_mesh(mesh, timeout=5.0) as comm:
                for call in range(20):
                    if call == 3:
                        first.wait(LIMIT)
                    x = np.full(50_000, float(comm.rank + call), np.float32)
                    total = comm.all_reduce(x)
                    assert (total == 3.0 * call + 3.0).all(), "wrong elements"
                return Outcome()
        except BaseException as error:
            return Outcome(error=error)

    _judge(_in_threads(made, body), attack)


@each_attack
def test_a_message_that_was_changed_is_not_received(attack: Attack) -> None:
    made, middle = _with_middle("p2p")
    first = threading.Barrier(_RANKS, lambda: middle.arm(attack))

    def body(mesh: Mesh) -> Outcome:
        try:
            with from_mesh(mesh, timeout=5.0) as comm:
                first.wait(LIMIT)
                for value in range(3):
                    x = np.full(1000, value, np.int64)
                    if comm.rank == 1:
                        comm.send(x, 0)
                        comm.recv(x, 0)  # so that each message is a piece of its own
                    elif comm.rank == 0:
                        comm.recv(x, 1)
                        assert (x == value).all(), "wrong elements"
                        comm.send(x, 1)
                comm.barrier()
                return Outcome()
        except BaseException as error:
            return Outcome(error=error)

    _judge(_in_threads(made, body), attack)


@each_attack
def test_control_frames_that_were_changed_fail_on_all_ranks(attack: Attack) -> None:
    made, middle = _with_middle("control")
    first = threading.Barrier(_RANKS, lambda: middle.arm(attack))

    def body(mesh: Mesh) -> Outcome:
        try:
            with from_mesh(mesh, timeout=5.0) as comm:
                comm.all_reduce(np.ones(8, np.float32))
                first.wait(LIMIT)
                if comm.rank == 2:  # the others tell each other that they wait
                    middle.attacked.wait(LIMIT)
                for _ in range(2):
                    comm.all_reduce(np.ones(8, np.float32))
                    if comm.rank == 2:
                        comm.recv(np.ones(8, np.float32), 1)
                return Outcome()
        except BaseException as error:
            return Outcome(error=error)

    _judge(_in_threads(made, body), attack)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StoreServer, Impostor]]:
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", "on")
    with StoreServer(Address("tcp", "127.0.0.1", 0), "job", _SECRET) as server:
        impostor = Impostor(("127.0.0.1", server.address.port))
        yield server, impostor
        impostor.close()


def _client(port: int) -> StoreClient:
    return StoreClient(Address("tcp", "127.0.0.1", port), "job", _SECRET, Deadline(LIMIT), margin=1)


@each_attack
def test_a_request_to_the_store_that_was_changed_is_never_obeyed(
    store: tuple[StoreServer, Impostor], attack: Attack
) -> None:
    server, impostor = store
    honest = _client(server.address.port)
    with contextlib.closing(_client(impostor.port)) as client:
        client.set("weights", b"\0" * 1000)
        impostor.middles.get(timeout=LIMIT).arm(attack)

        def write_often() -> None:
            for _ in range(3):
                client.set("weights", b"\1" * 1000)

        with pytest.raises(RendezvousError, match=f"store at tcp://127.0.0.1:{impostor.port}"):
            write_often()
    with contextlib.closing(honest):
        assert honest.get("weights", LIMIT) in (b"\0" * 1000, b"\1" * 1000)


@each_attack
def test_control_links_that_outlive_their_communicator_stay_sealed(attack: Attack) -> None:
    """They carry what shrink and resize say, and so do those of joiners with the join listener."""
    (one, other), middle = sealed_with_middle()
    with (
        contextlib.closing(SurvivorLinks((), 2)) as ours,
        contextlib.closing(SurvivorLinks((), 2)) as theirs,
    ):
        ours.add(1, one)
        theirs.add(0, other)
        everybody = View(frozenset({0, 1}))
        ours.send(1, MessageKind.VIEW, everybody, b"x" * 40_000)
        eventually(lambda: theirs.poll(0.1))
        middle.arm(attack)
        heard: list[Message | LinkEnded] = []

        def has_ended() -> bool:
            ours.send(1, MessageKind.READY, everybody, b"y" * 100)
            heard.extend(theirs.poll(0.05))
            return any(isinstance(each, LinkEnded) for each in heard)

        eventually(has_ended)
        assert heard[-1].peer == 0


@each_attack
def test_a_parameter_servers_channel_that_was_changed_ends(attack: Attack) -> None:
    (near, far), (end, other) = tcp_pair(), tcp_pair()
    middle, (here, there) = Middle(far, end), seals()
    server = _core.ServeServer(0, 1, log=False)
    admission = threading.Thread(
        target=server.admit, args=("tcp", None, other.detach(), there, "replica", 1, LIMIT)
    )
    admission.start()
    channel = _core.ServeChannel("tcp", None, near.detach(), here, "shard 0 (host:7)", LIMIT)
    admission.join()
    table = _core.serve_table(
        [("w", [1000])], "sgd:rate=0.1", ["none"], 1, False, False, _core.SERVE_NO_VERSION
    )
    client = _core.ServeClient(table, 1, [channel])
    values = np.zeros(1000, np.float32)
    addresses = [(values.ctypes.data, values.size)]
    client.wait(client.join(LIMIT), LIMIT)
    client.wait(client.set(addresses, LIMIT, [values]), LIMIT)
    middle.arm(attack)

    def push_often() -> None:
        for _ in range(3):
            client.wait(client.push(addresses, ["none"], None, 0.0, False, 3.0, [values]), 5.0)

    with pytest.raises(Error, match="shard 0"):
        push_often()
    client.close(1.0)
    server.stop()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Coordinator, Impostor]]:
    """One of Sandblaster that listens over TCP, as where replicas are on other hosts."""
    monkeypatch.setenv("GRADWIRE_ENCRYPTION", "on")
    monkeypatch.setattr(_coordinator, "listen", lambda _, choice: listen(("tcp",), choice))
    job = Job("job", _SECRET)
    with contextlib.closing(
        Coordinator(job, 7, LOOPBACK, portions=2, push_every=1, backups=False)
    ) as made:
        impostor = Impostor(("127.0.0.1", made.address.port))
        yield made, impostor
        impostor.close()


def _replica(port: int, name: str) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock = client_handshake(sock, Hello("job", Purpose.COORDINATE, 7), _SECRET, Deadline(LIMIT))
    sock.sendall(pack("hello", name=name, portions=2))
    (welcome,) = Reader(OF_COORDINATORS).feed(sock.recv(1 << 16))
    assert welcome["what"] == "welcome"
    return sock


@each_attack
def test_a_replica_whose_words_were_changed_is_ended_by_its_name_alone(
    coordinator: tuple[Coordinator, Impostor], attack: Attack, caplog: pytest.LogCaptureFixture
) -> None:
    made, impostor = coordinator
    with _replica(made.address.port, "honest"), _replica(impostor.port, "between") as replica:
        impostor.middles.get(timeout=LIMIT).arm(attack)

        def has_ended() -> bool:
            with contextlib.suppress(OSError):
                replica.sendall(pack("forgotten", ticket=9))
            return "between has ended" in caplog.text

        eventually(has_ended)
        with _replica(made.address.port, "another"):
            assert "honest has ended" not in caplog.text
