"""Who may join: what strangers, replays and mix-ups get, and that ranks get in all the same."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from gradwire import _handshake
from gradwire._deadline import Deadline
from gradwire._handshake import (
    Admitted,
    Gate,
    HandshakeError,
    Hello,
    Purpose,
    RefusalLog,
    introduce,
    unpack_hello,
)

SECRET = b"0123456789abcdef"
HELLO = Hello("job", Purpose.CONTROL, communicator=3, epoch=1, source=2, target=0)


class Door:
    """A Gate with its thread, on a free port of loopback."""

    def __init__(self, check: Callable[[Hello, socket.socket], None]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.gate = Gate([listener], "job", SECRET, check)
        self.admitted: list[Admitted] = []
        self.pending_most = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            found = self.gate.poll(0.02)
            with self._changed:
                self.admitted += found
                self.pending_most = max(self.pending_most, self.gate.pending)
                self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 10)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self.gate.close()
        for admitted in self.admitted:
            admitted.sock.close()


def expect_hello(hello: Hello, _: socket.socket) -> None:
    if hello.target != 0:
        raise HandshakeError("this is rank 0")


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door(expect_hello)
    yield door
    door.close()


@contextmanager
def knock(door: Door) -> Iterator[socket.socket]:
    with socket.create_connection(door.address, timeout=10) as sock:
        yield sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def join(door: Door, hello: Hello = HELLO, secret: bytes = SECRET) -> None:
    with knock(door) as sock:
        introduce(sock, hello, secret, Deadline(10))
        sock.sendall(b"payload")


def test_the_right_rank_is_admitted_with_its_hello_and_its_next_bytes(door: Door) -> None:
    join(door)
    door.wait_for(lambda: bool(door.admitted))
    hello, sock = door.admitted[0]
    assert (hello.source, hello.target, hello.communicator, hello.epoch) == (2, 0, 3, 1)
    assert hello.purpose is Purpose.CONTROL
    assert _handshake.receive(sock, 7, Deadline(10)) == b"payload"


def test_frames_are_fixed_and_small() -> None:
    assert len(HELLO.pack()) == 72
    assert len(Hello("a much longer name of a job " * 10, Purpose.P2P).pack()) == 72


def test_another_secret_is_refused_on_both_sides(door: Door) -> None:
    with pytest.raises(HandshakeError, match="another secret"):
        join(door, secret=b"another-secret-of-16")
    assert not door.admitted


def test_another_job_is_refused(door: Door) -> None:
    with pytest.raises(ConnectionError):
        join(door, Hello("other job", Purpose.CONTROL, 3, 1, 2, 0))


def test_a_hello_that_is_not_expected_is_refused(door: Door) -> None:
    with pytest.raises(ConnectionError):
        join(door, Hello("job", Purpose.CONTROL, 3, 1, 2, 5))


@pytest.mark.parametrize("size", [1, 71, 72, 4096])
def test_random_bytes_are_refused(door: Door, size: int) -> None:
    with knock(door) as sock:
        sock.sendall(os.urandom(size))
        if size < 72:  # the gate would wait for the rest
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    join(door)


def test_silence_ends_at_the_limit(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_handshake, "LIMIT_SECONDS", 0.1)
    with knock(door) as sock:
        assert is_closed(sock)


def test_a_recorded_handshake_does_not_fit_again(door: Door) -> None:
    transcript = record(door)
    with knock(door) as sock:
        sock.sendall(transcript[0])
        _handshake.receive(sock, 64, Deadline(10))
        sock.sendall(transcript[1])
        assert is_closed(sock)
    assert len(door.admitted) == 1


def record(door: Door) -> tuple[bytes, bytes]:
    """What a rank sends in a handshake that succeeds, as an eavesdropper sees it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, knock(door) as sock:
        client = threading.Thread(target=introduce, args=(ours, HELLO, SECRET, Deadline(10)))
        client.start()
        sock.sendall(hello := _handshake.receive(theirs, 72, Deadline(10)))
        theirs.sendall(_handshake.receive(sock, 64, Deadline(10)))
        sock.sendall(proof := _handshake.receive(theirs, 32, Deadline(10)))
        theirs.sendall(_handshake.receive(sock, 1, Deadline(10)))
        client.join()
    return hello, proof


def test_our_own_challenge_sent_back_is_refused(door: Door) -> None:
    with knock(door) as sock:
        sock.sendall(HELLO.pack())
        challenge = _handshake.receive(sock, 64, Deadline(10))
        sock.sendall(challenge[32:])
        assert is_closed(sock)
    assert not door.admitted


def test_our_own_hello_sent_back_convinces_no_client() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(8) + HELLO.pack()[:56])
        with pytest.raises(HandshakeError, match="another secret"):
            introduce(ours, HELLO, SECRET, Deadline(10))


@pytest.mark.parametrize(
    "other",
    [
        Hello("job", Purpose.CONTROL, 3, 1, source=1, target=0),
        Hello("job", Purpose.CONTROL, 3, 1, source=0, target=2),
        Hello("job", Purpose.COLLECTIVE, 3, 1, source=2, target=0),
        Hello("job", Purpose.CONTROL, 4, 1, source=2, target=0),
        Hello("job", Purpose.CONTROL, 3, 2, source=2, target=0),
    ],
    ids=["pair", "direction", "purpose", "communicator", "epoch"],
)
def test_a_right_mac_for_something_else_is_refused(door: Door, other: Hello) -> None:
    with knock(door) as sock:
        sock.sendall(HELLO.pack())
        nonce = _handshake.receive(sock, 64, Deadline(10))[:32]
        sock.sendall(_handshake._mac(SECRET, other, b"C", other.pack() + nonce))
        assert is_closed(sock)
    assert not door.admitted


def test_the_nonce_is_fresh_each_time(door: Door) -> None:
    nonces = set()
    for _ in range(3):
        with knock(door) as sock:
            sock.sendall(HELLO.pack())
            nonces.add(_handshake.receive(sock, 64, Deadline(10))[:32])
    assert len(nonces) == 3


def test_a_crowd_of_silent_strangers_keeps_no_rank_out(door: Door) -> None:
    with ExitStack() as crowd:
        for _ in range(200):
            crowd.enter_context(knock(door))
        join(door)
    door.wait_for(lambda: len(door.admitted) == 1)
    assert door.pending_most <= _handshake.MAX_PENDING


def test_refusals_are_logged_once_per_address_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 59.0, 61.0, 61.0))
    log = RefusalLog(clock=lambda: next(times))
    with caplog.at_level(logging.WARNING, "gradwire"):
        for address in ("192.0.2.7",) * 4 + ("192.0.2.8",):
            log.note(address, "reason")
    assert [record.args[0] for record in caplog.records if record.args] == [
        "192.0.2.7",
        "192.0.2.7",
        "192.0.2.8",
    ]


def test_a_refused_stranger_is_logged_with_its_address_and_the_reason(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"), knock(door) as sock:
        sock.sendall(bytes(72))
        assert is_closed(sock)
        door.wait_for(lambda: bool(caplog.records))
    assert "127.0.0.1" in caplog.text
    assert "does not speak" in caplog.text


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"XXXX" + HELLO.pack()[4:], "protocol"),
        (HELLO.pack()[:4] + struct.pack("<H", 9) + HELLO.pack()[6:], "version 9"),
        (HELLO.pack()[:6] + b"\xee" + HELLO.pack()[7:], "purpose 238"),
    ],
)
def test_foreign_hellos_are_refused_with_a_reason(frame: bytes, reason: str) -> None:
    with pytest.raises(HandshakeError, match=reason):
        unpack_hello(frame, "job")
