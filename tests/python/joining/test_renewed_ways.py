"""A way between two ranks whose sockets have ended is made anew while the communicator lives."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hosts
import namespaces
import numpy as np
import pytest
from gradwire import Communicator, TransportError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.core import renewal
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake
from gradwire._bootstrap.mesh import Job, Link, Mesh, Peer, WaySocket
from gradwire._host import keepalive
from gradwire._host.interfaces import LOOPBACK
from hosts import Network, Rank
from ranks import Outcome
from two_interfaces import (
    LIMIT,
    NAMED,
    apart,
    await_line,
    bytes_sent,
    log_lines,
    reset,
    with_two_interfaces,
)

MISSING = namespaces.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
SOCKETS_OF_A_WAY = 5  # control, and for each lane one for messages and one for acknowledgements


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = with_two_interfaces(2)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(renewal, "_FIRST_PAUSE", 0.2)
    monkeypatch.setattr(renewal, "_LONGEST_PAUSE", 1.0)


def _sum(comm: Communicator, call: int = 0, last: bool = False) -> bool:
    """Sums enough for both ways to be used; whether any rank says that this is the last one."""
    x = np.empty(2_000_000, np.float32)
    x[:] = np.arange(x.size) % 97 + comm.rank + call % 5
    x[-1] = last
    comm.all_reduce(x)
    expected = comm.size * (np.arange(x.size - 1) % 97 + call % 5) + sum(range(comm.size))
    assert (x[:-1] == expected).all(), call
    return bool(x[-1])


def _obey(comm: Communicator, order: str) -> None:
    if order.startswith("reset"):
        assert reset(comm, order.split()[1]) == SOCKETS_OF_A_WAY


def _train(comm: Communicator, pipe: Any) -> None:
    """Sums, while rank 0 obeys orders, until one says stop; tells each line of the log."""
    lines = log_lines(level=10)
    order, told = "", 0
    for call in range(1_000_000):
        if _sum(comm, call, last=order == "stop"):
            return
        if call == 0:
            pipe.send("under way")
        for line in lines[told:]:
            pipe.send(line)
        told = len(lines)
        order = pipe.recv() if comm.rank == 0 and pipe.poll() else ""
        _obey(comm, order)


@contextlib.contextmanager
def _training(
    network: Network, encryption: str = "auto", body: Callable[..., Any] = _train
) -> Iterator[list[Rank]]:
    setting = {**NAMED, "GRADWIRE_ENCRYPTION": encryption}
    with network.start(range(2), body, environment=lambda _: setting, timeout=60) as ranks:
        for rank in ranks:
            await_line(rank, "under way")
        yield ranks


def _outcome(rank: Rank) -> Outcome:
    """The outcome of a rank, after the lines of its log."""
    while True:
        assert rank.pipe.poll(hosts.LIMIT)
        found = rank.pipe.recv()
        if isinstance(found, Outcome):
            return found


def _stop(ranks: list[Rank]) -> None:
    ranks[0].pipe.send("stop")
    assert [_outcome(rank).error for rank in ranks] == [None] * 2


def _await_bytes(network: Network, interface: str, count: int) -> None:
    """Waits until each host has sent so many bytes more by an interface."""
    before = [host.run(lambda: bytes_sent(interface)) for host in network.hosts]
    until = Deadline(hosts.LIMIT)
    for host, then in zip(network.hosts, before, strict=True):
        while host.run(lambda: bytes_sent(interface)) - then < count:
            assert not until.passed


@needs_hosts
@pytest.mark.parametrize(
    ("interface", "encryption"),
    [
        ("eth1", "on"),
        pytest.param("eth0", "on", marks=pytest.mark.nightly),
        pytest.param("eth1", "off", marks=pytest.mark.nightly),
    ],
)
def test_an_interface_whose_sockets_were_reset_carries_bytes_again(
    network: Network, interface: str, encryption: str
) -> None:
    with _training(network, encryption) as ranks:
        ranks[0].pipe.send(f"reset {interface}")
        for rank in ranks:
            assert interface in await_line(rank, "has failed")
        for rank in ranks:
            assert interface in await_line(rank, "works again")
        _await_bytes(network, interface, 1_000_000)
        _stop(ranks)


@needs_hosts
@pytest.mark.nightly
def test_an_interface_comes_back_after_its_sockets_have_ended(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end by themselves after an hour."""
    monkeypatch.setattr(keepalive, "_OUTAGE_SECONDS", 2)
    with _training(network) as ranks:
        for _ in range(2):
            with apart(network, "eth1", 1):
                for rank in ranks:
                    await_line(rank, "has failed")
                await_line(ranks[1], "not made anew")
            for rank in ranks:
                assert "eth1" in await_line(rank, "works again")
            _await_bytes(network, "eth1", 1_000_000)
        _stop(ranks)


@needs_hosts
def test_an_interface_that_failed_between_calls_comes_back_with_the_next_ones(
    network: Network,
) -> None:
    def body(comm: Communicator, pipe: Any) -> None:
        _sum(comm)
        pipe.send("under way")
        pipe.recv()
        if comm.rank == 0:
            reset(comm, "eth1")
        lines, call = log_lines(), 0
        while not _sum(comm, call, last=any("works again" in line for line in lines)):
            call += 1

    with _training(network, body=body) as ranks:
        for rank in ranks:
            rank.pipe.send("go")
        assert [_outcome(rank).error for rank in ranks] == [None] * 2


def _until_lost(comm: Communicator, pipe: Any) -> int:
    """Trains; the rank that is lost."""
    try:
        _train(comm, pipe)
    except TransportError as error:
        return error.peer
    return -1


@needs_hosts
@pytest.mark.nightly
@pytest.mark.parametrize("renewed", [True, False], ids=["after it", "during it"])
def test_the_peer_is_lost_with_the_last_interface(network: Network, *, renewed: bool) -> None:
    with contextlib.ExitStack() as cut, _training(network, body=_until_lost) as ranks:
        if not renewed:
            cut.enter_context(apart(network, "eth1", 1))
        ranks[0].pipe.send("reset eth1")
        for rank in ranks:
            await_line(rank, "works again" if renewed else "has failed")
        if renewed:
            cut.enter_context(apart(network, "eth1", 1))
        cut.enter_context(apart(network, "eth0", 1))
        began = time.monotonic()
        found = [_outcome(rank) for rank in ranks]
        took = time.monotonic() - began
    assert [each.error for each in found] == [None] * 2
    assert [each.value for each in found] == [1, 0]
    assert took < 3 * float(LIMIT) + max(each.queued for each in found)


@needs_hosts
@pytest.mark.nightly
def test_a_rank_that_dies_while_a_way_is_made_anew_is_named_at_once(network: Network) -> None:
    with _training(network, body=_until_lost) as ranks, apart(network, "eth1", 1):
        ranks[0].pipe.send("reset eth1")
        await_line(ranks[1], "not made anew")
        began = time.monotonic()
        ranks[0].close()
        found = _outcome(ranks[1])
        assert (found.error, found.value) == (None, 0)
        assert time.monotonic() - began < float(LIMIT) + found.queued


@needs_hosts
@pytest.mark.nightly
def test_a_communicator_closes_at_once_while_a_way_is_made_anew(network: Network) -> None:
    with _training(network) as ranks, apart(network, "eth1", 1):
        ranks[0].pipe.send("reset eth1")
        await_line(ranks[1], "has failed")
        began = time.monotonic()
        _stop(ranks)
        assert time.monotonic() - began < float(LIMIT)


@needs_hosts
def test_nothing_listens_once_the_communicator_is_closed(network: Network) -> None:
    def body(comm: Communicator, pipe: Any) -> None:
        began = _listening()
        with _forked_child():
            comm.close()
            until = Deadline(hosts.LIMIT)
            while any(each.name.startswith("gradwire-ways") for each in threading.enumerate()):
                assert not until.passed
            assert began == (1 if comm.rank == 0 else 0)  # rank 1 had connected
            assert not _listening()

    network.values(range(2), body, environment=lambda _: NAMED)


@contextlib.contextmanager
def _forked_child() -> Iterator[None]:
    """Meanwhile a child of this process lives, which has copies of its sockets."""
    (ready, began), (end, ends) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.write(began, b"1")
        os.read(end, 1)
        os._exit(0)
    os.read(ready, 1)
    yield
    os.close(ends)
    os.waitpid(child, 0)


def _listening() -> int:
    """How many sockets listen at eth1 of this host."""
    lines = Path("/proc/thread-self/net/tcp").read_text().splitlines()
    sockets = [line.split()[1:4] for line in lines]
    return sum(own[4:8] == "4E0A" and state == "0A" for own, _, state in sockets)  # 10.78


JOB = Job("job", b"0123456789abcdef", epoch=5)


class _Ways:
    """What a core would do with the sockets of a way."""

    def __init__(self) -> None:
        self.in_use = True
        self.renewed: list[tuple[int, int, list[tuple[int, Any, int]]]] = []

    def generation(self, way: int) -> int:
        return 2

    def renew(self, *given: Any) -> None:
        self.renewed.append(given)


def _link() -> Link:
    unused = socket.socket()
    by_ways = [WaySocket(unused, way, acks) for way, acks in ((0, True), (1, False), (1, True))]
    return Link("tcp", unused, (), tuple(by_ways))


@pytest.fixture
def accepting() -> Iterator[tuple[Any, Callable[..., socket.socket]]]:
    """Rank 0's ways to rank 1, and what connects to it; its arguments change the hello."""
    peer = Peer(False, socket.socket(), {"collective": _link(), "p2p": _link()}, ways=("a", "b"))
    mesh = Mesh(JOB, 0, 2, 7, ("here", "there"), {1: peer}, LOOPBACK)
    ways, listener = _Ways(), socket.create_server(("127.0.0.1", 0))
    target = listener.getsockname()
    thread = threading.Thread(target=renewal._accept, args=(mesh, {1: ways}, [listener]))
    thread.start()

    def connect(secret: bytes = JOB.secret, **changed: Any) -> socket.socket:
        usual = {"communicator": 7, "epoch": 5, "source": 1, "target": 0, "way": 1, "generation": 3}
        hello = Hello("job", changed.pop("purpose", Purpose.WAY), **{**usual, **changed})
        sock = handshake.dial(socket.AF_INET, target, hosts.LIMIT)
        return client_handshake(sock, hello, secret, Deadline(hosts.LIMIT))

    with contextlib.closing(mesh):
        yield ways, connect
        ways.in_use = False
        thread.join()


def test_all_sockets_of_a_generation_are_handed_over_together(accepting: Any) -> None:
    ways, connect = accepting
    given_up = [connect(stream=number, generation=3) for number in range(4)]
    sockets = [connect(stream=number, generation=4) for number in (3, 1, 0, 4, 2)]
    until = Deadline(hosts.LIMIT)
    while not ways.renewed:
        assert not until.passed
    ((way, generation, given),) = ways.renewed
    assert (way, generation) == (1, 4)
    assert [part for *_, part in given] == [0, 1, 1, 2, 2]
    for (fd, *_), number in zip(given, range(5), strict=True):
        with socket.socket(fileno=fd) as theirs:
            theirs.sendall(bytes([number]))
    said = []
    for sock in (*sockets, *given_up):
        with sock:
            said.append(sock.recv(1))
    assert said == [*(bytes([each]) for each in (3, 1, 0, 4, 2)), *[b""] * 4]  # the others closed


@pytest.mark.parametrize(
    "changed",
    [
        {"secret": b"another's secret"},
        {"purpose": Purpose.CONTROL},
        {"communicator": 8},
        {"epoch": 6},
        {"source": 2},
        {"target": 1},
        {"way": 2},
        {"stream": 5},
        {"generation": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_stranger_is_refused(accepting: Any, changed: dict[str, Any]) -> None:
    ways, connect = accepting
    with pytest.raises(ConnectionError):
        connect(**changed)
    assert not ways.renewed
