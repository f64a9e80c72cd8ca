"""The parts of which a mesh is connected: routes, listeners, the acceptor, peers that end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from gradwire import RendezvousError
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import acceptor as acceptors
from gradwire._bootstrap import connect, endpoints, handshake
from gradwire._bootstrap.authenticator import Admitted, Authenticator
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.endpoints import listen, open_socket
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose, SettingsError
from gradwire._bootstrap.mesh import AddressInfo, Job, Mesh
from gradwire._errors import Error
from gradwire._host.interfaces import LOOPBACK, Choice, Interface
from ranks import LIMIT

JOB = Job("job", b"0123456789abcdef", 77)
NEAR = AddressInfo("h1", "near:1", ("tcp",), "", "10.0.0.1", 500, "eth0")
FAR = AddressInfo("h2", "far:2", ("tcp",), "", "10.0.0.2", 600, "eth0")
BEYOND = Choice(Interface("eth0", "10.0.0.1"), "a test")


def mesh(rank: int = 1, size: int = 4) -> Mesh:
    return Mesh(JOB, rank, size, 9, ("h",) * size, {}, LOOPBACK)


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 1 of 4, which has the addresses of all, and does not wait for peers to turn round."""
    monkeypatch.setattr(connect, "_TURN_SECONDS", 0.0)
    raised = mock.Mock()
    found: Any = connect._Attempt(
        mesh(), ("tcp",), Deadline(30), raised, lambda peer, text: RendezvousError(text)
    )
    found._addresses = [replace(FAR, name=f"rank{each}:0") for each in range(4)]
    yield found
    found.discard()


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (NEAR, FAR, None),
        (NEAR, replace(FAR, address="::1"), "one is IPv4 and one IPv6"),
        (NEAR, replace(NEAR, address="127.0.0.1"), None),
        (NEAR, replace(FAR, address="127.0.0.1"), "loopback only leads back"),
        (replace(NEAR, address="127.0.0.1"), FAR, "loopback only leads back"),
        (NEAR, replace(FAR, address="10.0.0.1"), "both hosts have this address"),
    ],
)
def test_a_route_is_one_between_the_hosts(
    one: AddressInfo, other: AddressInfo, why: str | None
) -> None:
    if why is None:
        endpoints.require_route(1, one, 3, other)
        return
    with pytest.raises(RendezvousError, match=rf"rank 1 \(near:1\) uses .*{why}"):
        endpoints.require_route(1, one, 3, other)


def test_a_pair_without_a_way_is_told(attempt: Any) -> None:
    assert attempt._choose_route(0) == "tcp"
    attempt._addresses[3] = replace(FAR, name="rank3:0", transports=("shm",))
    text = r"ranks 1 \(rank1:0: tcp\) and 3 \(rank3:0: shm\) share no transport"
    with pytest.raises(RendezvousError, match=text):
        attempt._choose_route(3)
    attempt._addresses[0] = replace(NEAR, address="10.0.0.2")
    with pytest.raises(RendezvousError, match=r"rank 0 \(near:1\) uses .*both hosts have"):
        attempt._choose_route(0)


@pytest.mark.parametrize(
    ("transports", "choice", "unix", "tcp"),
    [
        (("shm", "tcp"), LOOPBACK, True, False),
        (("shm", "tcp"), BEYOND, True, True),
        (("tcp",), LOOPBACK, False, True),
        (("tcp", "shm"), LOOPBACK, True, True),
        (("shm",), BEYOND, True, False),
    ],
)
def test_ranks_listen_where_their_transports_need_it(
    transports: tuple[str, ...], choice: Choice, unix: bool, tcp: bool, monkeypatch: Any
) -> None:
    bound: list[Any] = []

    def bind(family: Any, target: Any) -> Any:
        bound.append((family, target))
        return mock.Mock(getsockname=lambda: (target, 4242))

    monkeypatch.setattr(endpoints, "_bind", bind)
    monkeypatch.setattr(endpoints, "networks_of", lambda names: ("its networks",))
    listeners, info = listen(transports, choice)
    families = [socket.AF_UNIX] * unix + [socket.AF_INET] * tcp
    assert [family for family, _ in bound] == families
    by_relay = tcp and choice is BEYOND
    assert len(listeners) == len(families) + by_relay
    assert bool(info.listener) == by_relay
    for each in listeners:
        each.close()
    assert (bool(info.unix), info.port) == (unix, 4242 * tcp)
    assert not tcp or bound[-1][1][1] == 0  # any port
    assert (info.address, info.interface) == (choice.interface.address, choice.interface.name)
    together = choice is LOOPBACK and "shm" in transports
    assert info.networks == (() if together else ("its networks",))


def test_an_address_that_is_anothers_cannot_be_listened_at() -> None:
    with pytest.raises(RendezvousError, match="cannot listen on"):
        endpoints._bind(socket.AF_INET, ("203.0.113.1", 0))


@pytest.mark.parametrize(
    ("transport", "info", "unix"),
    [
        ("tcp", FAR, False),
        ("shm", replace(FAR, unix="u"), True),
        ("tcp", replace(FAR, unix="u"), False),
        ("tcp", replace(FAR, unix="u", port=0), True),
    ],
)
def test_a_peer_is_reached_where_it_listens(
    transport: str, info: AddressInfo, unix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dial = mock.Mock()
    monkeypatch.setattr(endpoints, "dial", dial)
    open_socket(info, transport, BEYOND.interface, Deadline(LIMIT))
    family, target, seconds, *source = dial.call_args.args
    assert seconds == pytest.approx(20, abs=1)
    assert family == (socket.AF_UNIX if unix else socket.AF_INET)
    assert target == ("\0u" if unix else ("10.0.0.2", 600))
    assert source == ([] if unix else [("10.0.0.1", 0)])
    dial.side_effect = TimeoutError
    if not unix:
        with pytest.raises(OSError, match="no answer in 20 s") as raised:
            open_socket(info, transport, BEYOND.interface, Deadline(LIMIT))
        assert raised.value.errno == errno.ETIMEDOUT


def test_a_peer_that_has_ended_is_seen_and_its_bytes_stay() -> None:
    one, other = socket.socketpair()
    with one:
        assert not connect._has_ended(one)
        other.sendall(b"x")
        assert not connect._has_ended(one)
        assert one.recv(9) == b"x"
        other.close()
        assert connect._has_ended(one)
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as left:
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # a reset
        assert connect._has_ended(left)


def test_only_a_control_socket_that_ends_is_a_failure(attempt: Any) -> None:
    ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
    attempt._sockets = {
        (0, Purpose.CONTROL, 0): ours[0],
        (0, Purpose.P2P, 0): ours[1],
    }
    attempt._acceptor._accepted = {(2, Purpose.CONTROL, 0): ours[2]}
    theirs[1].close()
    attempt._check_peers()
    attempt._raise_if_peer_failed.assert_called_once_with(0)
    theirs[2].close()
    with pytest.raises(RendezvousError, match=r"rank 2 \(rank2:0\) ended or gave up"):
        attempt._check_peers()
    assert [each.args for each in attempt._raise_if_peer_failed.call_args_list[1:]] == [
        *((0,), (connect._POLL_SECONDS,))
    ]
    attempt._raise_if_peer_failed.side_effect = [None, RendezvousError("its reason")]
    with pytest.raises(RendezvousError, match="its reason"):
        attempt._check_peers()
    attempt._raise_if_peer_failed.side_effect = None
    theirs[0].close()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SettingsError("another setting"), r"rank 1 and rank 0 \(rank0:0\) cannot connect: anoth"),
        (HandshakeError("refused"), r"rank 0 \(rank0:0, .*\) no longer accepts .*\(refused\)"),
        (ConnectionRefusedError("nobody"), r"no longer accepts connections \(nobody\)"),
        (OSError(errno.EMFILE, "x"), r"rank 1 of 4 .* cannot connect: this process has no file"),
        (OSError(errno.ENETUNREACH, "no way"), r"could not connect to rank 0 .* \(no way\)"),
    ],
)
def test_a_connection_that_cannot_be_made_is_told_at_once(
    attempt: Any, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = mock.Mock(side_effect=[error, AssertionError("again")])
    monkeypatch.setattr(connect, "open_socket", tries)
    with pytest.raises(RendezvousError, match=text) as raised:
        attempt._connect(0, Purpose.CONTROL, "tcp")
    assert raised.value.__cause__ is error
    seconds = [each.args for each in attempt._raise_if_peer_failed.call_args_list]
    asked = isinstance(error, ConnectionRefusedError | HandshakeError)
    if asked and not isinstance(error, SettingsError):
        assert seconds == [(connect._POLL_SECONDS,), (0,)]


def test_a_peer_that_is_busy_is_tried_until_the_deadline(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_RETRY_SECONDS", 0.001)
    busy = OSError(errno.EAGAIN, "busy")
    tries = mock.Mock(side_effect=[busy, busy, "a socket"])
    monkeypatch.setattr(connect, "open_socket", tries)
    attempt._authenticate = lambda sock, *_: sock
    assert attempt._connect(0, Purpose.CONTROL, "tcp") == "a socket"
    assert attempt._raise_if_peer_failed.call_args_list == [mock.call(0)] * 2
    attempt._deadline = Deadline(0)
    tries.side_effect = busy
    with pytest.raises(RendezvousError, match="could not connect to rank 0"):
        attempt._connect(0, Purpose.CONTROL, "tcp")


@pytest.mark.parametrize(
    ("source", "told"), [("10.0.0.2", False), ("10.0.0.2%eth0", False), ("10.9.9.9", True)]
)
def test_an_address_that_is_translated_is_told(
    attempt: Any, source: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sock = mock.Mock(family=socket.AF_INET, getpeername=lambda: (source, 1))
    attempt._sockets = {(2, Purpose.CONTROL, 0): sock}
    attempt._compare_source(2)
    assert ("from 10.9.9.9: addresses are translated" in caplog.text) == told
    sock.family = socket.AF_UNIX
    sock.getpeername = None
    attempt._compare_source(2)


def test_missing_ranks_are_named_at_the_deadline(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried before."""
    attempt._transports = dict.fromkeys(range(4), "tcp")
    tries = mock.Mock(side_effect=OSError(errno.ENETUNREACH, "no way"))
    monkeypatch.setattr(connect, "open_socket", tries)
    attempt._deadline = Deadline(0.01)
    attempt._acceptor.wait = lambda _: [2, 3]
    text = r"timed out: rank 2 \(rank2:0\), 3 \(rank3:0\) of 4 published .*within 0.01 s"
    with pytest.raises(RendezvousError, match=text):
        attempt._await_higher()
    assert attempt._raise_if_peer_failed.called
    attempt._acceptor.wait = mock.Mock(side_effect=[[3], []])
    attempt._deadline = Deadline(LIMIT)
    tries.reset_mock()
    attempt._await_higher()
    assert [each.args[0].name for each in tries.call_args_list] == ["rank3:0"]


def test_a_rank_that_turns_in_vain_leaves_its_peers_more_and_more_time(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two that are busy refuse each other for ever."""
    attempt._acceptor.wait = mock.Mock(side_effect=[[3], [3], [3], []])
    attempt._turn_to = mock.Mock()
    monkeypatch.setattr(connect, "_TURN_SECONDS", 3.0)
    pauses = mock.Mock(return_value=mock.Mock(passed=True))
    monkeypatch.setattr(connect, "Deadline", pauses)
    attempt._await_higher()
    assert pauses.call_args_list == [mock.call(each) for each in (1.5, 3.0, 6.0, 12.0)]
    assert attempt._turn_to.call_args_list == [mock.call(3)] * 3


def test_a_busy_peer_gets_more_time_to_answer(
    attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is only busy with those that have given up."""
    monkeypatch.setattr(connect, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(connect, "open_socket", mock.Mock())
    shakes = mock.Mock(side_effect=[TimeoutError] * 4 + ["a socket"])
    monkeypatch.setattr(connect, "client_handshake", shakes)
    assert attempt._connect(0, Purpose.CONTROL, "tcp") == "a socket"
    assert [each.args[-1] for each in shakes.call_args_list] == [1, 2, 4, 4, 4]


def test_slow_ranks_that_turn_to_each_other_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message takes about as long as its limit, now and then."""
    chance, size = random.Random(7), 5
    for name in ("_TURN_SECONDS", "_BRIEF_SECONDS", "_POLL_SECONDS"):
        monkeypatch.setattr(connect, name, getattr(connect, name) / 20)
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 0.15)
    monkeypatch.setattr(connect, "require_route", mock.Mock())
    monkeypatch.setenv("GRADWIRE_TCP_STREAMS", "2")

    def slowed(honest: Any) -> Any:
        def slow(*given: Any) -> Any:
            threading.Event().wait(0.03 * chance.random() * chance.choice([1] * 9 + [5]))
            return honest(*given)

        return slow

    monkeypatch.setattr(Authenticator, "_advance", slowed(Authenticator._advance))
    monkeypatch.setattr(handshake, "receive", slowed(handshake.receive))
    gathered = [b""] * size
    barrier = threading.Barrier(size)

    def exchange(rank: int, own: bytes) -> list[bytes]:
        gathered[rank] = own
        barrier.wait(LIMIT)
        return gathered

    def meet(rank: int) -> Mesh:
        found: Any = connect._Attempt(
            mesh(rank, size), ("tcp",), Deadline(60), mock.Mock(), lambda _, text: Error(text)
        )
        found._own = replace(found._own, host=f"h{rank}")
        try:
            found.run(lambda own, _: exchange(rank, own))
        except BaseException:
            found.discard()
            raise
        return found._mesh

    with ThreadPoolExecutor(size) as pool:
        meshes = list(pool.map(meet, range(size)))
    for rank, peer in itertools.permutations(range(size), 2):
        ours, theirs = (meshes[a].peers[b].sockets() for a, b in ((rank, peer), (peer, rank)))
        for mine, its in zip(ours, theirs, strict=True):
            assert (mine.getsockname(), mine.getpeername()) == (
                its.getpeername(),
                its.getsockname(),
            )
    for each in meshes:
        each.close()


def test_a_rank_alone_needs_no_socket() -> None:
    with mock.patch.object(connect, "listen") as listens:
        options: dict[str, Any] = {"rank": 0, "size": 1, "communicator": 9}
        found = connect_mesh(JOB, mock.Mock(), deadline=Deadline(1), job_ranks=[5], **options)
        assert not listens.called
        assert (found.peers, found.job_ranks) == ({}, (5,))
        listens.side_effect = RendezvousError("asked")
        with pytest.raises(RendezvousError, match="asked"):
            connect_mesh(JOB, mock.Mock(), deadline=Deadline(1), **{**options, "size": 2})


# ---- The acceptor ------------------------------------------------------------------------------


@pytest.fixture
def acceptor() -> Iterator[Any]:
    """Of rank 1 of 4."""
    found: Any = acceptors.Acceptor([], mesh())
    yield found
    found._authenticator.close()


def hello(**changes: Any) -> Hello:
    given = {"communicator": 9, "epoch": 77, "source": 2, "target": 1, **changes}
    return Hello("job", given.pop("purpose", Purpose.CONTROL), **given)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"source": 3, "purpose": Purpose.P2P}, None),
        ({"communicator": 8}, "another communicator"),
        ({"epoch": 78}, "another start of the job"),
        ({"target": 2}, "does not expect rank 2 to connect to rank 2 for control"),
        ({"source": 0}, None),  # which this rank may not reach
        ({"source": 0, "purpose": Purpose.P2P}, "does not expect rank 0 to connect to rank 1 for"),
        ({"source": 1}, "does not expect rank 1"),
        ({"source": 4}, "does not expect rank 4"),
        ({"purpose": Purpose.STORE}, "for store"),
        ({"purpose": Purpose.STREAM, "stream": 1}, "for stream"),
        ({"purpose": Purpose.COLLECTIVE, "stream": 16}, "for collective"),
    ],
)
def test_who_is_not_expected_is_refused(
    acceptor: Any, changes: dict[str, Any], text: str | None
) -> None:
    with contextlib.nullcontext() if text is None else pytest.raises(HandshakeError, match=text):
        acceptor._check(hello(**changes), mock.Mock())


def test_the_ranks_are_named_of_which_sockets_are_missing(acceptor: Any) -> None:
    assert acceptor.wait(Deadline(0)) == [2, 3]
    first = mock.Mock()
    for purpose in acceptors.PURPOSES:
        acceptor._accept(Admitted(hello(purpose=purpose), first))
    assert acceptor.wait(Deadline(0)) == [3]
    assert not first.close.called
    acceptor._accept(Admitted(hello(), mock.Mock()))  # it tried again
    first.close.assert_called_once_with()
    assert len(acceptor.accepted()) == 3
    for purpose in acceptors.PURPOSES:
        acceptor._accept(Admitted(hello(source=3, purpose=purpose), mock.Mock()))
    assert acceptor.wait(Deadline(LIMIT)) == []
    assert acceptor.close().keys() == acceptor._expected
    assert acceptor.close() == {}


def test_one_rank_of_a_pair_makes_its_sockets(acceptor: Any) -> None:
    acceptor.let_connect([0, 2])
    assert acceptor.wait(Deadline(0)) == [3]
    assert acceptor.claim(0)
    with pytest.raises(HandshakeError, match="does not expect rank 0"):
        acceptor._check(hello(source=0), mock.Mock())
    acceptor.give_up(0)
    acceptor._check(hello(source=0), mock.Mock())
    acceptor._accept(Admitted(hello(source=0), mock.Mock()))
    assert not acceptor.claim(0)
    assert acceptor.wait(Deadline(0)) == [0, 3]
    assert acceptor.claim(2)
    acceptor.settle(2)
    assert not acceptor._unsettled


def test_a_peer_that_turned_round_early_is_waited_for(acceptor: Any) -> None:
    """It connected before this rank knew the addresses."""
    acceptor._accept(Admitted(hello(source=0), mock.Mock()))
    acceptor.let_connect([0])
    assert acceptor.is_taken(0)
    assert acceptor.wait(Deadline(0)) == [0, 2, 3]


@pytest.mark.parametrize(
    ("shortage", "excluded", "text"),
    [
        (OSError(errno.EMFILE, "x"), None, r"no connections any more \(this process has no file"),
        (ValueError("own"), None, r"no connections any more \(ValueError\('own'\)\)"),
        (None, (3, "an address"), "rank 1 cannot admit rank 3 at an address"),
    ],
)
def test_what_ends_the_acceptor_is_told(
    acceptor: Any, shortage: Any, excluded: Any, text: str
) -> None:
    acceptor._authenticator.close()
    acceptor._authenticator = mock.Mock(shortage=shortage, excluded=excluded)
    acceptor._authenticator.poll.return_value = []
    assert (acceptor._thread.name, acceptor._thread.daemon) == ("gradwire-accept", True)
    acceptor.start()
    with pytest.raises(RendezvousError, match=text):
        acceptor.wait(Deadline(LIMIT))
    acceptor.close()
    acceptor._authenticator.close.assert_called_once_with()
    acceptor._authenticator.poll.assert_called_once_with(acceptors.ACCEPT_SECONDS)


def test_an_acceptor_that_is_closed_stops(acceptor: Any) -> None:
    acceptor.start()
    acceptor.close()
    assert not acceptor._thread.is_alive()
    acceptor._run()  # returns at once
