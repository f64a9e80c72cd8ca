"""Where a store is: names, ports, and sockets in folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import store as stores
from gradwire._bootstrap import store_server
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import InvalidArgument, RendezvousError
from ranks import LIMIT

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("errors", "stays"),
    [
        ([None, None], 2),
        ([errno.EADDRNOTAVAIL, None], 1),
        ([None, errno.EADDRNOTAVAIL], 1),
        ([errno.EADDRNOTAVAIL, errno.EADDRNOTAVAIL], 0),
        ([None, errno.EADDRINUSE], 0),
        ([errno.EADDRINUSE, None], 0),
    ],
)
def test_a_store_listens_at_all_addresses_of_its_name_that_are_this_hosts(
    errors: list[int | None], stays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, (f"127.0.0.{i}", 0)) for i in (1, 2)]
    listen, listeners = store_server._listen_at, list[socket.socket]()

    def listen_at(family: Any, target: Any) -> socket.socket:
        if (error := errors[found.index((family, target))]) is not None:
            raise OSError(error, "no")
        listeners.append(listen(family, target))
        return listeners[-1]

    monkeypatch.setattr(Address, "resolve", lambda _: found)
    monkeypatch.setattr(store_server, "_listen_at", listen_at)
    with contextlib.nullcontext() if stays else pytest.raises(RendezvousError, match="a port that"):
        assert len(store_server._listen([Address("tcp", "here", 0)] * 2)) == stays
    assert all((each.fileno() >= 0) == bool(stays) for each in listeners)
    for each in listeners:
        assert not stays or each.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        each.close()


def test_a_socket_whose_queue_is_full_is_no_leftover(tmp_path: Path) -> None:
    path = str(tmp_path / "busy")
    with contextlib.ExitStack() as opened:
        busy = opened.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(path)
        busy.listen(0)
        for _ in range(3):
            queued = opened.enter_context(socket.socket(socket.AF_UNIX))
            queued.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                queued.connect(path)
        assert not store_server._is_leftover(path)


def test_a_store_under_a_name_that_is_not_there_hints_at_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Address, "resolve", lambda self: [(socket.AF_INET, ("127.0.0.1", self.port))]
    )
    with socket.socket() as reserved:  # bound and never listening
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        for host, hint in (("node0", True), ("127.0.0.1", False), ("localhost", False)):
            with pytest.raises(RendezvousError, match="is rank 0 running") as caught:
                StoreClient(Address("tcp", host, port), "job", SECRET, Deadline(0.01))
            assert ("Does node0 mean loopback on rank 0's host?" in str(caught.value)) == hint


def test_addresses_of_a_name_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, ("127.0.0.1", port)) for port in (1, 2, 3)]
    tried: list[int] = []

    def dial(_: Any, target: Any, __: float) -> Any:
        tried.append(target[1])
        raise ValueError("enough") if len(tried) == 7 else ConnectionRefusedError

    monkeypatch.setattr(Address, "resolve", lambda _: found)
    monkeypatch.setattr(stores, "dial", dial)
    monkeypatch.setattr(stores, "_RETRY", 0.001)
    with pytest.raises(ValueError, match="enough"):
        StoreClient(Address("tcp", "here", 1), "job", SECRET, Deadline(LIMIT))
    assert tried == [1, 2, 3, 1, 2, 3, 1]


def test_a_port_that_is_taken_is_an_error_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("tcp", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(RendezvousError, match=r"cannot host the store.*a port that is free"):
            StoreServer(address, "job", SECRET)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("tcp://node7:29400", Address("tcp", "node7", 29400)),
        ("tcp://[::1]:29400", Address("tcp", "::1", 29400)),
        ("unix://gradwire-0-abc", Address("unix", "gradwire-0-abc")),
        ("unix:///run/user/0/gradwire-abc", Address("unix", "/run/user/0/gradwire-abc")),
    ],
)
def test_addresses_are_read_and_written_alike(url: str, address: Address) -> None:
    assert parse_address(url) == address
    assert str(address) == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "node7:29400",
        "tcp://node7",
        "tcp://:1",
        "http://a:1",
        "unix://",
        "unix:///",
        "tcp://a:x",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"tcp://HOST:PORT"):
        parse_address(url)


def test_a_store_at_a_path_replaces_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """And removes its own file at the end."""
    path = tmp_path / "store"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    assert path.exists()
    address = Address("unix", str(path))
    with StoreServer(address, "job", SECRET):
        client = StoreClient(address, "job", SECRET, Deadline(LIMIT))
        client.set("key", b"value")
        assert client.get("key", 0) == b"value"
        client.close()
    assert not path.exists()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A folder that somebody has locked, as whoever can read it may; gives the descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def test_who_locks_the_folder_of_a_store_does_not_hang_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store_server, "_LOCK_SECONDS", 0.1)
    path = tmp_path / "store"
    with locked(tmp_path), pytest.raises(RendezvousError) as raised:
        StoreServer(Address("unix", str(path)), "job", SECRET)
    assert f"another process has locked the folder {tmp_path} for 0.1 s" in str(raised.value)
    assert "a folder of this user's own" in str(raised.value)
    assert not path.exists()


def test_a_store_waits_for_another_that_starts_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flock, refusals = fcntl.flock, []

    def lock(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except BlockingIOError as error:
            refusals.append(error)
            flock(other, fcntl.LOCK_UN)
            raise

    with locked(tmp_path) as other:
        monkeypatch.setattr(fcntl, "flock", lock)
        with StoreServer(Address("unix", str(tmp_path / "store")), "job", SECRET):
            assert len(refusals) == 1


def test_a_store_at_a_path_leaves_what_lives_there(tmp_path: Path) -> None:
    path = tmp_path / "store"
    address = Address("unix", str(path))
    with StoreServer(address, "job", SECRET):
        with pytest.raises(RendezvousError, match="cannot host the store"):
            StoreServer(address, "job", SECRET)
        StoreClient(address, "job", SECRET, Deadline(LIMIT)).close()
    path.write_text("a file of somebody's")
    with pytest.raises(RendezvousError, match="cannot host the store"):
        StoreServer(address, "job", SECRET)
    assert path.read_text() == "a file of somebody's"


def test_a_forked_child_does_not_remove_the_socket_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with StoreServer(Address("unix", str(path)), "job", SECRET) as server:
        child = os.fork()
        if child == 0:
            server.release_after_fork()
            os._exit(0)
        os.waitpid(child, 0)
        assert path.exists()


def test_a_store_at_a_path_that_is_gone_is_lost_at_once(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="is gone"):
        StoreClient(
            Address("unix", str(tmp_path / "none")), "job", SECRET, Deadline(LIMIT), listens=True
        )
