"""Ranks find each other: transports, missing ranks, repeated rendezvous."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import connect as _connect
from gradwire._bootstrap import mesh as _mesh
from gradwire._bootstrap import rendezvous as _rendezvous
from gradwire._bootstrap import rendezvous_exchange as _exchange
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose, client_handshake
from gradwire._bootstrap.launch_info import LaunchInfo, explicit
from gradwire._bootstrap.mesh import (
    AddressInfo,
    Job,
    Mesh,
    inproc_meshes,
    unpack_address_info,
)
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.store import StoreClient
from gradwire._errors import RendezvousError
from gradwire._host.interfaces import Choice, Interface, interfaces
from gradwire._host.transport_kinds import KINDS
from ranks import LIMIT, over_processes, reserved_store

SECRET = b"0123456789abcdef"
pytestmark = pytest.mark.usefixtures("bare_environment")


def launches(size: int, **changes: object) -> list[LaunchInfo]:
    """A launch per rank, to meet in a store of its own that rank 0 hosts on a Unix socket."""
    store = f"unix://gradwire-test-{secrets.token_hex(8)}"
    base = LaunchInfo(0, size, store=store, rank_0_hosts=True)
    return [replace(base, rank=rank, **changes) for rank in range(size)]  # type: ignore[arg-type]


def on_threads(functions: Sequence[Callable[[], Mesh]]) -> list[Future[Mesh]]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [pool.submit(function) for function in functions]


def meet(
    places: Sequence[LaunchInfo], timeout: float = 20, **options: object
) -> list[Future[Mesh]]:
    calls = [
        lambda place=place: rendezvous(place, lambda mesh: mesh, timeout=timeout, **options)  # type: ignore[misc]
        for place in places
    ]
    return on_threads(calls)


def assert_connected(meshes: Sequence[Mesh], transport: str) -> None:
    """Every pair's three sockets are each other's ends, and are of the transport."""
    for mesh in meshes:
        assert sorted([*mesh.peers, mesh.rank]) == list(range(len(meshes)))
        for rank, peer in mesh.peers.items():
            assert [link.transport for link in peer.links.values()] == [transport] * 2
            for lane, sock in lanes(peer).items():
                sock.sendall(f"{mesh.rank}>{rank}:{lane}.".encode())
    for mesh in meshes:
        for rank, peer in mesh.peers.items():
            for lane, sock in lanes(peer).items():
                assert sock.recv(64) == f"{rank}>{mesh.rank}:{lane}.".encode()


def lanes(peer: _mesh.Peer) -> dict[str, socket.socket]:
    return {"control": peer.control, **{lane: link.sock for lane, link in peer.links.items()}}


@pytest.fixture
def closing() -> Iterator[Callable[[Sequence[Future[Mesh]]], list[Mesh]]]:
    opened: list[Mesh] = []

    def results(futures: Sequence[Future[Mesh]]) -> list[Mesh]:
        opened.extend(future.result() for future in futures)
        return opened[-len(futures) :]

    yield results
    for mesh in opened:
        mesh.close()


Closing = Callable[[Sequence[Future[Mesh]]], list[Mesh]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@over_processes
def test_all_pairs_are_connected(size: int, transport: str, closing: Closing) -> None:
    meshes = closing(meet(launches(size), transports=[transport]))
    assert_connected(meshes, transport)
    family = socket.AF_UNIX if KINDS[transport].local else socket.AF_INET
    assert all(peer.control.family == family for mesh in meshes for peer in mesh.peers.values())
    assert all(peer.same_host for mesh in meshes for peer in mesh.peers.values())


def test_sockets_block_and_are_not_inherited(closing: Closing) -> None:
    for mesh in closing(meet(launches(2))):
        for sock in mesh.peers[1 - mesh.rank].sockets():
            assert sock.getblocking()
            assert not sock.get_inheritable()


def test_sockets_fail_with_the_host_of_the_peer(closing: Closing) -> None:
    for mesh in closing(meet(launches(2), transports=["tcp"])):
        for sock in mesh.peers[1 - mesh.rank].sockets():
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_ranks_on_one_host_prefer_shared_memory(closing: Closing) -> None:
    assert_connected(closing(meet(launches(2))), "shm")


def test_the_environment_restricts_the_transports(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_TRANSPORT", "tcp")
    assert_connected(closing(meet(launches(2))), "tcp")


def test_one_can_meet_again_and_again_under_the_same_name(closing: Closing) -> None:
    places = launches(3)

    def thrice(place: LaunchInfo) -> list[Mesh]:
        return [rendezvous(place, lambda mesh: mesh, timeout=20) for _ in range(3)]

    with ThreadPoolExecutor(3) as pool:
        rounds = list(pool.map(thrice, places))
    for turn in range(3):
        meshes = [mine[turn] for mine in rounds]
        assert_connected(meshes, "shm")
        assert {mesh.communicator for mesh in meshes} == {turn}
        for mesh in meshes:
            mesh.close()


def test_nothing_listens_once_the_mesh_is_complete(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[AddressInfo] = []
    unpack = _mesh.unpack_address_info
    monkeypatch.setattr(
        "gradwire._bootstrap.connect.unpack_address_info",
        lambda *args: addresses.append(unpack(*args)) or addresses[-1],
    )
    closing(meet(launches(2)))
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.address, address.port), timeout=5)
        with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
            sock.connect("\0" + address.unix)


def test_rank_0_hosts_a_tcp_store_at_the_given_port(closing: Closing) -> None:
    with reserved_store() as store:
        meshes = closing(meet([explicit(rank, 3, store) for rank in range(3)], secret=SECRET))
    assert_connected(meshes, "shm")
    assert meshes[0].interface.reason == "all ranks are on this host"


def test_one_host_can_do_with_ipv6_alone(caplog: pytest.LogCaptureFixture) -> None:
    if not any(each.address == "::1" for each in interfaces()):
        pytest.skip("loopback has no IPv6 address here")
    with socket.socket(socket.AF_INET6) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("::1", 0))
        place = {"ranks": 3, "store": f"tcp://[::1]:{reserved.getsockname()[1]}"}

        def body(rank: int) -> tuple[str, dict[int, str], float]:
            with gradwire.init(rank=rank, **place, transports=["tcp"], secret=SECRET) as comm:
                x = comm.all_reduce(np.full(50_000, float(rank)))
                return str(comm._mesh.interface), comm.transports, float(x[-1])

        with ThreadPoolExecutor(3) as pool, caplog.at_level(logging.INFO, "gradwire"):
            found = list(pool.map(body, range(3)))
    for rank in range(3):
        assert f"rank {rank} listens on lo (::1): all ranks are on this host" in caplog.messages
    for rank, (interface, links, value) in enumerate(found):
        assert interface == "lo (::1): all ranks are on this host"
        assert links == {peer: "tcp" for peer in range(3) if peer != rank}
        assert value == 3.0


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    futures = meet([launch for launch in launches(4) if launch.rank != 2], timeout=0.5)
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, RendezvousError) for error in errors)
    expected = "timed out: rank 2 of 4 did not appear within 0.5 s"
    assert all(expected in str(error) for error in errors)


def test_all_missing_ranks_are_named() -> None:
    (future,) = meet(launches(4)[:1], timeout=0.2)
    assert "ranks 1, 2, 3 of 4 did not appear" in str(future.exception())


def test_a_rank_asks_nothing_of_the_store_once_it_has_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 may close the store from then on."""
    asked: list[str] = []
    honest = StoreClient._ask

    def ask(client: StoreClient, operation: int, key: str, *rest: Any) -> bytes:
        if client._rank == 1:
            asked.append(key)
        return honest(client, operation, key, *rest)

    monkeypatch.setattr(StoreClient, "_ask", ask)
    for future in meet(launches(2)):
        future.result().close()
    assert asked.index(asked[-1]) < len(asked) - 1  # it was the last will before
    assert asked[-1].endswith("/finished/1")


def failing_after_its_address_info(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Makes one rank fail when it has published its address."""
    honest = _exchange.RendezvousExchange.exchange_addresses

    def exchange(
        self: _exchange.RendezvousExchange, address: bytes, deadline: Deadline
    ) -> list[bytes]:
        addresses = honest(self, address, deadline)
        if self.launch.rank == rank:
            raise OSError("died")
        return addresses

    monkeypatch.setattr(_exchange.RendezvousExchange, "exchange_addresses", exchange)


def test_a_rank_that_gives_up_tells_the_others_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_after_its_address_info(monkeypatch, 2)
    errors = [future.exception() for future in meet(launches(4), timeout=60)]
    assert str(errors.pop(2)).endswith("cannot connect: died")
    for error in errors:
        assert isinstance(error, RendezvousError)
        assert re.fullmatch(r"rank 2 \(\S+\) gave up: died", str(error))


def test_a_rank_that_dies_after_publishing_its_address_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing_after_its_address_info(monkeypatch, 2)
    monkeypatch.setattr(
        _exchange.RendezvousExchange, "raise_if_peer_failed", lambda self, within: None
    )
    errors = [str(future.exception()) for future in meet(launches(3), timeout=0.5)]
    assert "rank 2" in errors[0]
    assert "did not connect to rank 0" in errors[0]
    assert errors[2].endswith("cannot connect: died")


def test_a_rank_that_dies_while_it_connects_is_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = _connect._Attempt._connect

    def connect(self: _connect._Attempt, peer: int, purpose: Purpose, *rest: Any) -> object:
        if self._mesh.rank == 2 and purpose == Purpose.COLLECTIVE:  # after the control socket
            raise OSError("died")
        return honest(self, peer, purpose, *rest)

    monkeypatch.setattr(_connect._Attempt, "_connect", connect)
    monkeypatch.setattr(
        _exchange.RendezvousExchange,
        "abort_on_failure",
        lambda self, hosts_store: contextlib.nullcontext(),
    )
    errors = [str(future.exception()) for future in meet(launches(3), timeout=60)]
    assert re.match(r"rank 2 \(\S+\) ended or gave up", errors[0])
    assert errors[2].endswith("cannot connect: died")


def test_a_waiting_rank_says_whom_it_waits_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_exchange, "WARN_SECONDS", 0.05)
    with caplog.at_level(logging.WARNING, "gradwire"):
        meet(launches(2)[:1], timeout=0.3)
    assert "still waiting for rank 1 of 2" in caplog.text


def test_strangers_do_not_disturb_a_rendezvous(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = AddressInfo.pack

    def pack_after_strangers_came(address: AddressInfo) -> bytes:
        for junk in (b"", os.urandom(72), os.urandom(500)):
            with socket.create_connection((address.address, address.port)) as stranger:
                stranger.sendall(junk)
        return pack(address)

    monkeypatch.setattr(AddressInfo, "pack", pack_after_strangers_came)
    assert_connected(closing(meet(launches(3), transports=["tcp"])), "tcp")


def test_ranks_with_different_secrets_are_told_so() -> None:
    places = launches(2)
    calls = [
        lambda: rendezvous(places[0], lambda mesh: mesh, timeout=1, secret=b"a" * 16),
        lambda: rendezvous(places[1], lambda mesh: mesh, timeout=1, secret=b"b" * 16),
    ]
    errors = [str(future.exception()) for future in on_threads(calls)]
    assert "did not appear" in errors[0]
    assert "another secret" in errors[1]


# Communicators made from communicators


def test_a_mesh_can_be_made_through_any_all_gather(closing: Closing) -> None:
    addresses: dict[int, bytes] = {}
    barrier = threading.Barrier(3)

    def exchange(rank: int) -> Callable[[bytes, Deadline], list[bytes]]:
        def all_gather(address: bytes, deadline: Deadline) -> list[bytes]:
            addresses[rank] = address
            barrier.wait(deadline.remaining)
            return [addresses[each] for each in range(3)]

        return all_gather

    def call(rank: int) -> Callable[[], Mesh]:
        job = Job("job", SECRET)
        return lambda: connect_mesh(
            job, exchange(rank), rank=rank, size=3, communicator=77, deadline=Deadline(20)
        )

    assert_connected(closing(on_threads([call(rank) for rank in range(3)])), "shm")


@pytest.mark.parametrize(("communicator", "epoch"), [(78, 1), (77, 2)], ids=["other", "restarted"])
def test_a_rank_of_another_communicator_or_start_is_not_taken_for_this_ones(
    communicator: int, epoch: int, closing: Closing
) -> None:
    """It has the same job, secret and number, and comes first."""
    addresses: dict[int, bytes] = {}
    barrier = threading.Barrier(2)

    def exchange(rank: int) -> Callable[[bytes, Deadline], list[bytes]]:
        def all_gather(address: bytes, deadline: Deadline) -> list[bytes]:
            addresses[rank] = address
            barrier.wait(deadline.remaining)
            if rank == 1:
                come(unpack_address_info(addresses[0], 0), deadline)
            return [addresses[each] for each in range(2)]

        return all_gather

    def come(info: AddressInfo, deadline: Deadline) -> None:
        for purpose in Purpose.CONTROL, Purpose.COLLECTIVE, Purpose.P2P:
            hello = Hello("job", purpose, communicator, epoch, source=1, target=0)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\0" + info.unix)
                with pytest.raises((HandshakeError, OSError)):
                    client_handshake(sock, hello, SECRET, deadline)

    def call(rank: int) -> Callable[[], Mesh]:
        job = Job("job", SECRET, epoch=1)
        return lambda: connect_mesh(
            job, exchange(rank), rank=rank, size=2, communicator=77, deadline=Deadline(20)
        )

    assert_connected(closing(on_threads([call(rank) for rank in range(2)])), "shm")


def test_threads_get_meshes_of_socket_pairs() -> None:
    meshes = inproc_meshes(3)
    assert_connected(meshes, "inproc")
    for mesh in meshes:
        mesh.close()


# Two hosts


def meet_two_hosts(monkeypatch: pytest.MonkeyPatch, **options: object) -> list[Future[Mesh]]:
    """Two ranks that each believe to be on a host of their own."""
    identity = threading.local()
    monkeypatch.setattr(
        "gradwire._bootstrap.endpoints.host_identity", lambda: getattr(identity, "name", "unset")
    )

    def call(place: LaunchInfo) -> Mesh:
        identity.name = f"host {place.rank}"
        return rendezvous(place, lambda mesh: mesh, timeout=2, **options)  # type: ignore[arg-type]

    return on_threads([lambda place=place: call(place) for place in launches(2)])


def test_loopback_is_refused_when_a_peer_is_on_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for future in meet_two_hosts(monkeypatch, transports=["tcp"]):
        with pytest.raises(RendezvousError, match=r"loopback only.*GRADWIRE_SOCKET_IFNAME"):
            future.result()


def test_shared_memory_alone_cannot_join_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for future in meet_two_hosts(monkeypatch, transports=["shm"]):
        with pytest.raises(RendezvousError, match=r"ranks 0 .* and 1 .* share no transport"):
            future.result()


def test_who_connects_comes_from_the_address_that_its_card_says(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choice(exchange: _exchange.RendezvousExchange, _: object) -> Choice:
        return Choice(Interface("lo", f"127.0.0.{exchange.launch.rank + 2}"), "")

    monkeypatch.setattr(_rendezvous, "_choose_interface", choice)
    for mesh in closing(meet(launches(3), transports=["tcp"])):
        for rank, peer in mesh.peers.items():
            for sock in peer.sockets():
                assert sock.getpeername()[0] == f"127.0.0.{rank + 2}"
                assert sock.getsockname()[0] == f"127.0.0.{mesh.rank + 2}"


def test_an_address_that_is_translated_on_the_way_is_told(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = _exchange.RendezvousExchange.exchange_addresses

    def exchange(
        self: _exchange.RendezvousExchange, data: bytes, deadline: Deadline
    ) -> list[bytes]:
        address = unpack_address_info(data, self.launch.rank)
        if self.launch.rank == 1:
            address = replace(address, address="127.0.0.7")
        return honest(self, address.pack(), deadline)

    monkeypatch.setattr(_exchange.RendezvousExchange, "exchange_addresses", exchange)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert_connected(closing(meet(launches(2), transports=["tcp"])), "tcp")
    assert "rank 1" in caplog.text
    assert re.search(
        r"listens at lo 127\.0\.0\.7 .* from 127\.0\.0\.1: addresses are translated", caplog.text
    )


def test_a_secret_is_made_for_each_rendezvous_where_none_is_given(closing: Closing) -> None:
    places = launches(2)
    found = [{mesh.job.secret for mesh in closing(meet(places))} for _ in range(2)]
    assert [len(each) for each in found] == [1, 1]
    assert found[0] != found[1]
    assert "secret" not in repr(closing(meet(places))[0].job)


# torch's store

TORCH_RANK = """
import os
from gradwire._bootstrap.rendezvous import rendezvous
from gradwire._bootstrap.job_secret import find_secret
from gradwire._bootstrap.launch_info import from_environment
mesh = rendezvous(from_environment(), lambda mesh: mesh, timeout=60)
control = next(iter(mesh.peers.values())).control
control.sendall(b"x")
assert control.recv(1) == b"x"
os.write(1, f"{mesh.rank} {mesh.job.name} {mesh.job.epoch}\\n".encode())
"""


@pytest.mark.long
def test_ranks_meet_in_torchs_store(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "rank.py"
    script.write_text(TORCH_RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines() if line)
    assert [line[0] for line in lines] == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]
