"""The join listener's entry, its thread, and when it asks for a resize: on one rank."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import gradwire
import pytest
from gradwire import RendezvousError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import join_listener
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose
from gradwire._bootstrap.join_listener import (
    Backoff,
    Joiner,
    JoinListener,
    ListenerEntry,
    entry_key,
    require_given_secret,
    secret_key,
    unpack_entry,
)
from gradwire._bootstrap.mesh import AddressInfo, Mesh
from gradwire._bootstrap.resize import open_listener
from gradwire._bootstrap.store import Address, StoreClient
from ranks import LIMIT, eventually

SECRET = b"0123456789abcdef"
ENTRY = ListenerEntry("job", SECRET, AddressInfo("", "", (), "", "::1", 0), 3, 4, True)


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """One rank's; nothing is written again by itself."""
    monkeypatch.setattr(join_listener, "RENEW_SECONDS", 3600.0)
    with gradwire.init(rank=0, ranks=1, store="unix://nobody", secret=SECRET) as comm:
        yield comm._mesh


@pytest.fixture
def listener(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinListener]:
    """One whose thread is at rest."""
    monkeypatch.setattr(JoinListener, "_write_entry", lambda *_: None)
    with contextlib.closing(open_listener(mesh)) as found:
        eventually(lambda: not found._renew.passed)
        yield found


@pytest.fixture
def stopped(listener: JoinListener) -> JoinListener:
    """One without a thread."""
    listener.close()
    return listener


def later(mesh: Mesh, **changes: Any) -> Mesh:
    return replace(mesh, membership=replace(mesh.membership, **changes))


def test_an_entry_comes_back_as_it_was() -> None:
    assert unpack_entry(ENTRY.pack(), "job", SECRET) == ENTRY
    assert replace(ENTRY, over=False) != ENTRY
    assert not ListenerEntry(*(getattr(ENTRY, each) for each in ENTRY.__match_args__[:5])).over


@pytest.mark.parametrize(
    ("job", "secret"), [("other", SECRET), ("job", b"fedcba9876543210")], ids=["job", "secret"]
)
def test_an_entry_of_others_is_refused(job: str, secret: bytes) -> None:
    with pytest.raises(RendezvousError, match="is not signed with the job's secret"):
        unpack_entry(ENTRY.pack(), job, secret)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        ENTRY.pack().partition(b" ")[2].replace(b'"over": true', b'"over": 1'),
        ENTRY.pack().partition(b" ")[2].replace(b'"epoch": 3', b'"epoch": "3"'),
        ENTRY.pack().partition(b" ")[2].replace(b'"membership": 4', b'"membership": null'),
    ],
)
def test_an_entry_of_another_version_is_refused(body: bytes) -> None:
    signed = join_listener._signature("job", SECRET, body) + b" " + body
    with pytest.raises(RendezvousError, match="another gradwire version"):
        unpack_entry(signed, "job", SECRET)


def test_whose_address_cannot_be_read_is_told() -> None:
    forged = replace(ENTRY, address=mock.Mock(pack=lambda: b"{}"))
    with pytest.raises(RendezvousError, match="rank 0 published no address"):
        unpack_entry(forged.pack(), "job", SECRET)


def test_the_thread_and_its_descriptors_are_the_listeners_own(listener: JoinListener) -> None:
    assert (listener._thread.name, listener._thread.daemon) == ("gradwire-joins", True)
    assert not os.get_inheritable(listener._wake)
    assert not select.select([listener._wake], [], [], 0)[0]  # at rest


def test_a_listener_begins_with_its_entry_and_nothing_else(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_listener, "AuthenticatingThread", mock.Mock())
    found = open_listener(mesh)
    assert found._renew.passed
    assert not found._wants_resize
    assert not select.select([found._wake], [], [], 0)[0]
    found._renew = Deadline(3600)
    found.announce()
    assert found._renew.passed
    assert select.select([found._wake], [], [], 0)[0]
    found.close()
    found._release()


def test_a_listener_that_is_closed_leaves_nothing(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = open_listener(replace(mesh, membership=replace(mesh.membership, store="unix://mine")))
    eventually(lambda: found._server)
    ours, theirs = socket.socketpair()
    found._joiners.append(Joiner(theirs, -1))
    found.close()
    assert not found._thread.is_alive()
    assert ours.recv(9) == b""  # is not told that the job is over
    assert found.take(9) == []
    ours.close()
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_whoever_waits_is_told_that_the_job_is_over(
    listener: JoinListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(JoinListener, "_write_entry", lambda self, _: said.append(self._over))
    pairs = [socket.socketpair() for _ in range(3)]
    pairs[0][0].close()  # has gone
    listener._joiners += [Joiner(theirs, -1) for _, theirs in pairs]
    listener.close(over=True)
    assert said == [True]
    for ours, _ in pairs[1:]:
        assert ours.recv(99)
        ours.close()


def test_an_entry_is_written_at_once_where_it_changes(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[str | None] = []
    monkeypatch.setattr(JoinListener, "_write_entry", lambda _, store: stores.append(store))
    with contextlib.closing(open_listener(mesh)) as found:
        eventually(lambda: len(stores) == 1)
        found.announce("unix://second")
        eventually(lambda: len(stores) == 2)
        found.announce()
        eventually(lambda: len(stores) == 3)
        found.serve(mesh, lambda: None)  # as it is known
        found.serve(later(mesh, epoch=5, store="unix://third"), lambda: None)
        eventually(lambda: len(stores) == 4)
    found.announce("unix://closed")
    assert stores == ["unix://nobody", "unix://second", "unix://nobody", "unix://third"]


def test_what_changes_while_an_entry_is_written_is_written_next(
    stopped: JoinListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped._renew = Deadline(0)
    stopped._announce()
    assert not stopped._renew.passed
    monkeypatch.setattr(stopped, "_write_entry", lambda _: stopped.announce("unix://new"))
    stopped._announce()
    assert stopped._renew.passed


def test_trouble_is_told_once(
    stopped: JoinListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def announce(error: Exception | None, over: bool = False) -> int:
        monkeypatch.setattr(stopped, "_write_entry", mock.Mock(side_effect=error))
        stopped._over = over
        caplog.clear()
        stopped._announce()
        assert bool(stopped.trouble) == (error is not None)
        return len(caplog.records)

    assert [announce(OSError("one")) for _ in range(2)] == [1, 0]
    assert "nobody can find where to join: one" in stopped.trouble
    assert [announce(each) for each in (RendezvousError("two"), None, None)] == [1, 0, 0]
    assert [announce(OSError("two"), over=True), announce(OSError("three"), over=True)] == [0, 0]


class Slate:
    """A store of one value, which must answer at once."""

    def __init__(self, found: bytes) -> None:
        self.found, self.values = found, dict[str, bytes]()

    def get(self, key: str, seconds: float) -> bytes:
        assert (key, seconds) == (entry_key("job"), 0)
        return self.found

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("first", "found", "writes"),
    [
        (True, {"membership": 5}, True),
        (False, {"membership": 5}, False),
        (False, {"membership": 4}, True),
        (False, {"membership": 3}, True),
        (False, {"membership": 5, "epoch": 2}, True),
    ],
)
def test_an_entry_of_a_later_communicator_stays(
    stopped: JoinListener, first: bool, found: dict[str, Any], writes: bool
) -> None:
    slate: Any = Slate(replace(ENTRY, **found).pack())
    stopped._is_first = first
    stopped._replace_entry(slate, ENTRY)
    assert slate.values == ({entry_key("job"): ENTRY.pack()} if writes else {})
    assert stopped._is_first is False


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_no_entry_is_later_than_that_of_the_first_communicator(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    monkeypatch.setattr(JoinListener, "_write_entry", lambda *_: None)
    with contextlib.closing(JoinListener(later(mesh, epoch=epoch), ("tcp",))) as found:
        assert found._is_first == (epoch == 0)


Write = Callable[..., Slate]


@pytest.fixture
def write(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes an entry at an address, with the secret of the job and the one that was given."""

    def run(store: str | None, given: bytes | None) -> Slate:
        slate = Slate(b"")
        monkeypatch.setenv("GRADWIRE_INSECURE", "1")
        wrote = JoinListener._write_entry
        own = later(mesh, secret=given)
        found = mock.Mock(spec=JoinListener, _mesh=own, _over=False, _server=None)
        found._address = ENTRY.address
        found._client_of.return_value = slate
        found._replace_entry.side_effect = lambda at, entry: at.set("entry", entry.pack())
        wrote(found, store)
        return slate

    return run


def test_a_store_of_this_user_has_the_secret_that_ranks_were_not_given(
    write: Write, mesh: Mesh
) -> None:
    key = secret_key(mesh.job.name)
    assert write("unix://x", None).values.keys() == {key, "entry"}
    assert write("unix://x", None).values[key] == mesh.job.secret
    assert write("unix://x", SECRET).values.keys() == {"entry"}
    assert write("tcp://127.0.0.1:1", mesh.job.secret).values.keys() == {"entry"}


@pytest.mark.parametrize("store", ["tcp://127.0.0.1:1", "torch:tcp://127.0.0.1:1"])
def test_a_store_that_others_read_needs_a_secret_that_was_given(write: Write, store: str) -> None:
    with pytest.raises(RendezvousError, match="rank 0: whoever joins"):
        write(store, None)


def test_no_store_is_told(write: Write) -> None:
    with pytest.raises(RendezvousError, match="this communicator knows no store"):
        write(None, SECRET)


def test_a_given_secret_is_enough(mesh: Mesh) -> None:
    require_given_secret(mesh, "tcp://127.0.0.1:1")
    with pytest.raises(RendezvousError, match="rank 0"):
        require_given_secret(later(mesh, secret=None), "tcp://127.0.0.1:1")


def test_a_store_that_nobody_serves_is_served_here_until_it_moves(stopped: JoinListener) -> None:
    first, second = (Address("unix", f"gradwire-{os.getpid()}-{each}") for each in "ab")
    job = stopped._mesh.job.name
    with contextlib.closing(stopped._client_of(first, SECRET)) as client:  # type: ignore[type-var]
        assert client is not None
        server = stopped._server
    with contextlib.closing(stopped._client_of(first, SECRET)):  # type: ignore[type-var]
        assert stopped._server is server  # it is still served
        with contextlib.closing(client_of(first, job)) as other, pytest.raises(TimeoutError):
            other.get("k", 0)
    with contextlib.closing(stopped._client_of(second, SECRET)):  # type: ignore[type-var]
        assert stopped._server is not server
        with pytest.raises(RendezvousError):
            StoreClient(first, job, SECRET, Deadline(0.1), listens=True)
    stopped._close_server("")
    stopped._over = True
    assert stopped._client_of(second, SECRET) is None
    assert stopped._server is None


def client_of(address: Address, job: str) -> StoreClient:
    return StoreClient(address, job, SECRET, Deadline(LIMIT))


def test_a_store_that_is_gone_is_noticed_at_once(
    stopped: JoinListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than after five seconds, in which it might come."""
    client = mock.Mock()
    monkeypatch.setattr(join_listener, "StoreClient", client)
    assert stopped._client_of(Address("unix", "x"), SECRET) is client.return_value
    assert client.call_args.kwargs == {"listens": True}


@pytest.mark.parametrize(
    ("purpose", "epoch", "fits"),
    [(Purpose.JOIN, 0, True), (Purpose.JOIN, 1, False), (Purpose.STORE, 0, False)],
)
def test_only_who_joins_this_start_of_the_job_is_let_in(
    stopped: JoinListener, purpose: Purpose, epoch: int, fits: bool
) -> None:
    job = stopped._mesh.job
    hello = Hello(job.name, purpose, epoch=job.epoch + epoch, source=-1)
    with contextlib.nullcontext() if fits else pytest.raises(HandshakeError, match="does not want"):
        stopped._check(hello, mock.Mock())


@pytest.mark.parametrize(
    ("size", "joined", "lost"), [(2, 0, False), (3, 1, False), (1, 0, True), (2, 1, True)]
)
def test_a_resize_that_lost_a_rank_is_told_from_one_that_did_not(
    stopped: JoinListener, size: int, joined: int, lost: bool
) -> None:
    stopped._backoff = mock.Mock(left=0)
    stopped._mesh = replace(stopped._mesh, size=2)
    stopped.serve(later(replace(stopped._mesh, size=size), joined=joined), lambda: None)
    stopped._backoff.note_joined.assert_called_once_with(joined, lost_rank=lost)


def test_joiners_are_taken_in_their_order_and_the_others_ask_again(
    stopped: JoinListener,
) -> None:
    asked: list[int] = []
    stopped._backoff = mock.Mock(left=0)
    stopped.serve(stopped._mesh, lambda: asked.append(1))
    assert not asked
    joiners = [Joiner(mock.Mock(), each) for each in range(3)]
    stopped._joiners = joiners
    assert stopped.take(2) == joiners[:2]
    stopped._backoff.note_taken.assert_called_once_with(2)
    stopped.serve(stopped._mesh, lambda: asked.append(2))
    stopped._request_resize()
    assert asked == [2]  # once
    assert stopped.take(2) == joiners[2:]
    stopped.serve(stopped._mesh, lambda: asked.append(3))
    assert asked == [2]


def test_a_resize_that_nobody_can_make_is_no_error(stopped: JoinListener) -> None:
    stopped._joiners = [Joiner(mock.Mock(), 0)]
    stopped.serve(stopped._mesh, mock.Mock(side_effect=gradwire.Aborted("it has ended")))
    assert stopped.take(1)


def test_the_thread_asks_when_the_pause_is_over(listener: JoinListener) -> None:
    asked: list[int] = []
    clock = Clock()
    listener._backoff = Backoff(clock)
    listener._backoff._until = clock.now + 0.25
    listener._request = lambda: asked.append(1)
    listener._wants_resize = True
    os.eventfd_write(listener._wake, 1)
    eventually(lambda: not select.select([listener._wake], [], [], 0)[0])
    listener._request_resize()
    assert not asked
    clock.now += 1
    eventually(lambda: asked)
    assert asked == [1]


def test_a_pause_is_as_long_as_the_share_of_what_joiners_took() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    assert backoff.left == 0
    backoff.note_taken(0)
    clock.now += 50
    backoff.note_taken(1)
    clock.now += 1
    backoff.note_taken(1)  # in the same resize
    clock.now += 1
    backoff.note_joined(1)
    assert backoff.left == 19 * 2
    clock.now += 3
    assert backoff.left == 19 * 2 - 3
    backoff.note_joined(0)  # of a resize that took none
    assert backoff.left == 19 * 2 - 3
    clock.now += math.inf
    assert backoff.left == 0
