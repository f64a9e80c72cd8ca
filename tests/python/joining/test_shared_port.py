"""One TCP port for all that listens on a host (GRADWIRE_PORT), and advertised addresses."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespaces
import numpy as np
import pytest
from gradwire import Communicator, RendezvousError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import shared_port
from gradwire._bootstrap.advertised_store import _advertised
from gradwire._bootstrap.authenticator import Authenticator, open_listener, refusals
from gradwire._bootstrap.endpoints import listen
from gradwire._bootstrap.handshake import Hello, Purpose, client_handshake, dial
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._host.interfaces import Choice, Interface
from hosts import PORT, Network, Rank
from ranks import LIMIT

MISSING = namespaces.missing()
HERE = "127.0.0.1"
SECRET = b"0123456789abcdef"
LISTENS = "0A"  # the state in /proc/net/tcp

needs_namespaces = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def listening() -> set[int]:
    """The TCP ports at which this host listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        rows = Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]
        fields = [row.split() for row in rows]
        found |= {int(each[1].rpartition(":")[2], 16) for each in fields if each[3] == LISTENS}
    return found


def sum_of_ranks(comm: Communicator) -> float:
    return float(comm.all_reduce(np.full(3, comm.rank + 1, np.float32))[0])


@needs_namespaces
@pytest.mark.parametrize("first", [f"10.77.0.1:{PORT}", f"[fd77::1]:{PORT}"], ids=["IPv4", "IPv6"])
def test_all_ranks_of_a_host_and_the_store_share_one_port(network: Network, first: str) -> None:
    """The ports are read while the ranks connect, and again when processes may join."""
    seen: set[int] = set()
    honest = shared_port.share

    def body(comm: Communicator, _: Any) -> tuple[float, set[int]]:
        comm.accept_joins()
        comm.barrier()
        group = comm.split(comm.rank % 2)
        assert group is not None
        return sum_of_ranks(comm) + sum_of_ranks(group), seen | listening()

    def share(*where: Any) -> None:
        honest(*where)
        seen.update(listening())

    how = {"environment": lambda _: {"GRADWIRE_PORT": str(PORT), "GRADWIRE_TRANSPORT": "tcp"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_port, "share", share)
        found = network.values((0, 0, 1, 1), body, store=f"tcp://{first}", **how)
    assert found == [(13.0, {PORT})] * 4


def forward(pipe: Any, port: int, to: tuple[str, int]) -> None:
    """Leads from a port of this host to another host's, as a router does, until it is killed."""

    def pump(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := one.recv(1 << 16):
                other.sendall(part)
            other.shutdown(socket.SHUT_WR)

    with socket.create_server(("", port)) as listener:
        pipe.send("it listens")
        while True:
            inner, _ = listener.accept()
            try:
                outer = socket.create_connection(to)
            except OSError:  # nobody listens there yet
                inner.close()
                continue
            for each in ((inner, outer), (outer, inner)):
                threading.Thread(target=pump, args=each, daemon=True).start()


@needs_namespaces
@pytest.mark.parametrize("name", ["10.77.0.3", "node0"])
def test_a_rank_is_reached_at_what_it_advertises(
    network: Network, name: str, tmp_path: Path
) -> None:
    """Rank 0 is behind host 2, whose port 8443 leads to it; its name means loopback on host 0."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.77.0.3 node0\n")

    def environment(rank: int) -> dict[str, str]:
        own = {"GRADWIRE_PORT": str(PORT), "GRADWIRE_ADVERTISE": f"{name}:8443"}
        place = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        store = f"tcp://10.77.0.1:{PORT}" if rank == 0 else f"tcp://{name}:8443"
        return {**place, "GRADWIRE_STORE": store, **(own if rank == 0 else {})}

    how = {"store": None, "environment": environment, "etc_hosts": lambda _: hosts}
    router = Rank(network.hosts[2], lambda pipe: forward(pipe, 8443, ("10.77.0.1", PORT)))
    with contextlib.closing(router):
        assert router.pipe.recv() == "it listens"
        found = network.values((0, 1, 1), lambda comm, _: sum_of_ranks(comm), **how)
    assert found == [6.0] * 3


# ---- The port ----------------------------------------------------------------------------------


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one, which this process shares in the test alone."""
    with socket.create_server((HERE, 0)) as free:
        found = int(free.getsockname()[1])
    monkeypatch.setattr(shared_port, "_ports", {})
    monkeypatch.setenv("GRADWIRE_PORT", str(found))
    return found


@contextlib.contextmanager
def a_listener(port: int, number: int) -> Iterator[None]:
    """One that welcomes who proves that he knows the secret."""
    ends = threading.Event()
    authenticator = Authenticator([open_listener(number, port)], "job", SECRET, lambda *_: None)

    def run() -> None:
        while not ends.is_set():
            for admitted in authenticator.poll(0.01):
                with admitted.sock:
                    admitted.sock.sendall(b"welcome")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        authenticator.close()


def ask(port: int, number: int) -> bytes:
    """What the listener of this number says."""
    hello = Hello("job", Purpose.JOIN, listener=number)
    sock = dial(socket.AF_INET, (HERE, port), LIMIT)
    with client_handshake(sock, hello, SECRET, Deadline(LIMIT)) as sealed:
        return sealed.recv(1 << 16)


def share(port: int) -> None:
    shared_port.share(socket.AF_INET, (HERE, port))


def test_each_client_gets_to_the_listener_that_it_wants(port: int) -> None:
    one, other = secrets.randbits(64), secrets.randbits(64)
    share(port)
    with a_listener(port, one), a_listener(port, other):
        assert [ask(port, number) for number in (one, other, one)] == [b"welcome"] * 3
        with pytest.raises(ConnectionRefusedError, match="nobody listens there any more"):
            ask(port, one ^ other)
    with pytest.raises(ConnectionRefusedError):
        ask(port, one)


def test_jobs_of_one_name_at_two_ports_of_a_host_have_stores_of_their_own(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((HERE, 0)) as free:
        other = int(free.getsockname()[1])
    secrets_of = {port: SECRET, other: SECRET[::-1]}
    with contextlib.ExitStack() as stack:
        for number, secret in secrets_of.items():
            monkeypatch.setenv("GRADWIRE_PORT", str(number))
            stack.enter_context(StoreServer(Address("tcp", HERE, number), "job", secret))
        for number, secret in secrets_of.items():
            where = Address("tcp", HERE, number)
            client = StoreClient(where, "job", secret, Deadline(LIMIT))
            stack.callback(client.close)
            assert client.add("at this port") == 1


def test_the_names_of_listeners_hide_their_numbers(port: int) -> None:
    number = secrets.randbits(64)
    with open_listener(number, port):
        names = Path("/proc/net/unix").read_text()
    assert "@gradwire-listener-" in names
    assert f"{number:x}" not in names


def test_strangers_who_say_nothing_keep_nobody_out(port: int) -> None:
    share(port)
    with a_listener(port, 7), contextlib.ExitStack() as stack:
        for _ in range(100):
            stranger = stack.enter_context(dial(socket.AF_INET, (HERE, port), LIMIT))
            stranger.sendall(b"GW")
        assert ask(port, 7) == b"welcome"


@contextlib.contextmanager
def another_process(port: int, user: int = 0) -> Iterator[None]:
    """A process that shares a port until it is killed, perhaps another user's."""

    def run(pipe: Any) -> None:
        if user:
            os.setresuid(user, user, user)
        share(port)
        pipe.send("it shares")
        pipe.recv()

    child = Rank(None, run)
    with contextlib.closing(child):
        assert child.pipe.recv() == "it shares"
        yield


def test_another_process_takes_the_port_of_one_that_ends(port: int) -> None:
    with another_process(port), a_listener(port, 7):
        share(port)
        (mine,) = shared_port._ports.values()
        assert mine._dispatcher is None
        assert ask(port, 7) == b"welcome"  # which the child hands over
    limit = Deadline(LIMIT)
    while mine._dispatcher is None and not limit.passed:
        threading.Event().wait(0.01)
    with a_listener(port, 7):
        assert ask(port, 7) == b"welcome"


def test_a_port_that_another_program_has_is_told(port: int) -> None:
    choice = Choice(Interface("lo", HERE), "a test")
    with socket.create_server((HERE, port)):
        with pytest.raises(RendezvousError, match=rf"lo \({HERE}\) port {port}, as GRADWIRE_PORT"):
            listen(("tcp",), choice)
        with pytest.raises(RendezvousError, match=f"cannot host the store at tcp://{HERE}:{port}"):
            StoreServer(Address("tcp", HERE, port), "job", SECRET)
    with contextlib.ExitStack() as stack:  # it is free again
        listeners, info = listen(("tcp",), choice)
        for each in listeners:
            stack.callback(each.close)
        assert (info.port, info.advertised) == (port, "")
        assert info.listener


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as another user")
def test_a_port_that_another_users_job_has_is_told(port: int) -> None:
    with (
        another_process(port, user=65534),
        pytest.raises(OSError, match="a job of user 65534 has it: choose another GRADWIRE_PORT"),
    ):
        share(port)


@pytest.mark.parametrize("listens", [False, True])
def test_a_holder_of_the_port_that_does_not_answer_ends_the_attempt(
    port: int, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_port, "_HOLDER_SECONDS", 0.05)
    name = f"\0gradwire-port-{HERE}-{port}"
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as holder:
        holder.bind(name)
        if listens:
            holder.listen(0)
            stack.enter_context(dial(socket.AF_UNIX, name, LIMIT))  # so its queue is full
        with pytest.raises((ConnectionRefusedError, BlockingIOError)):
            share(port)
    share(port)  # it is free again


def test_more_processes_than_its_queue_holds_wait_for_the_holder(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_port, "BACKLOG", 1)
    monkeypatch.setattr(shared_port, "_TURN_SECONDS", 0.01)
    share(port)
    limit = struct.pack("ll", int(LIMIT), 0)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            other.connect(f"\0gradwire-port-{HERE}-{port}")


def test_a_forked_child_keeps_no_port(port: int) -> None:
    share(port)
    child = os.fork()
    if child == 0:
        os._exit(len(shared_port._ports))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with a_listener(port, 7):
        assert ask(port, 7) == b"welcome"


def test_a_forked_child_needs_no_lock_of_the_parents_threads(port: int) -> None:
    with shared_port._lock, refusals._lock:
        child = os.fork()
        if child == 0:
            free = [each.acquire(timeout=1) for each in (shared_port._lock, refusals._lock)]
            os._exit(0 if all(free) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_takes_no_client_from_its_parent() -> None:
    with contextlib.closing(Authenticator([], "job", SECRET, lambda *_: None)) as authenticator:
        client, server = socket.socketpair()
        authenticator.begin_handshake(server, "a client")
        child = os.fork()
        if child == 0:
            authenticator.close()
            os._exit(0)
        os.waitpid(child, 0)
        client.close()
        authenticator.poll(1.0)
        assert authenticator.pending == 0


@pytest.mark.parametrize(
    ("advertised", "host"), [("", "10.0.0.1"), ("none", "10.0.0.1"), ("there", "there")]
)
def test_the_advertised_place_of_a_groups_store(
    advertised: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_PORT", "29400")
    monkeypatch.setenv("GRADWIRE_ADVERTISE", advertised)
    assert _advertised(Address("tcp", "10.0.0.1", 29400)) == Address("tcp", host, 29400)


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ({}, "", 0),
        ({"GRADWIRE_PORT": "29400"}, "", 29400),
        ({"GRADWIRE_PORT": "29400", "GRADWIRE_ADVERTISE": "there"}, "there", 29400),
        ({"GRADWIRE_PORT": "29400", "GRADWIRE_ADVERTISE": "there:80"}, "there", 80),
        ({"GRADWIRE_ADVERTISE": "[2001:db8::1]:80"}, "2001:db8::1", 80),
    ],
)
def test_the_advertised_place(
    given: dict[str, str], host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert (shared_port.advertised_host(), shared_port.advertised_port()) == (host, port)
    assert shared_port.chosen_port() == int(given.get("GRADWIRE_PORT", port))
