"""User namespaces: where one user id stands for many users, it tells nobody apart."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_job import SECRET, Process
from gradwire import RendezvousError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.store_server import StoreServer
from gradwire._host import user_namespace
from ranks import LIMIT

UNMAPPED = 65534  # as whom each user appears who has no id
STRANGER = 12345


@pytest.fixture
def store() -> Iterator[str]:
    """The name of a store without a secret, which this process serves."""
    name = f"gradwire-{secrets.token_hex(8)}"
    with StoreServer(Address("unix", name), "job", b""):
        yield name


def enter_namespace() -> bool:
    """Leaves all user ids: from now on each is 65534 here, this process's own, too."""
    return ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER


def client_refusal(name: str) -> str:
    with pytest.raises(RendezvousError) as raised:
        StoreClient(Address("unix", name), "job", b"", Deadline(LIMIT))
    return str(raised.value)


def server_answer() -> bytes:
    """What a store of this process says to who connects."""
    name = f"gradwire-{secrets.token_hex(8)}"
    with StoreServer(Address("unix", name), "job", b""), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LIMIT)
        sock.connect("\0" + name)
        return sock.recv(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user id, which root alone may take")
def test_without_a_user_id_of_its_own_a_process_trusts_no_user_id(store: str) -> None:
    """The server is another user's, and both are 65534 in the client's user namespace."""

    def meet() -> tuple[str, bytes] | None:
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        if not enter_namespace():
            return None
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + store)
            assert handshake.peer_uid(sock) == os.geteuid() == UNMAPPED
            handshake.require_own_user(sock, SECRET.encode())  # the secret shows who it is
        return client_refusal(store), server_answer()

    found = Process(meet, before=lambda: None).value()
    if found is None:
        pytest.skip("nobody may make a user namespace here")
    refusal, answer = found
    assert "stands for all users without a number there" in refusal
    assert "set GRADWIRE_SECRET" in refusal
    assert answer == b""


def test_where_user_ids_tell_nothing_the_secret_does(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """As in such a namespace, in this process alone."""
    monkeypatch.setattr(handshake, "stands_for_all_unmapped", lambda: True)
    assert "set GRADWIRE_SECRET" in client_refusal(store)
    assert server_answer() == b""
    address, known = Address("unix", f"gradwire-{secrets.token_hex(8)}"), SECRET.encode()
    with StoreServer(address, "job", known):
        StoreClient(address, "job", known, Deadline(LIMIT)).close()


@pytest.mark.parametrize(
    ("user", "mapped", "stands_for_all"),
    [
        (UNMAPPED, "         0          0 4294967295\n", False),
        (UNMAPPED, "0 1000 1\n1 100000 65536\n", True),
        (UNMAPPED, "", True),
        (0, "0 1000 1\n", False),
    ],
)
def test_user_65534_is_no_user_where_others_have_no_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: int, mapped: str, stands_for_all: bool
) -> None:
    (tmp_path / "uid_map").write_text(mapped)
    monkeypatch.setattr(user_namespace, "_MAP", str(tmp_path / "uid_map"))
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert user_namespace.stands_for_all_unmapped() == stands_for_all
