"""The handshake: strangers, replays and mix-ups are refused, and ranks get in all the same."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import pytest
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.handshake import (
    Admitted,
    Authenticator,
    HandshakeError,
    Hello,
    Purpose,
    RefusalLog,
    client_handshake,
    unpack_hello,
)
from ranks import LIMIT

SECRET = b"0123456789abcdef"
HELLO = Hello("job", Purpose.CONTROL, communicator=3, epoch=1, source=2, target=0)


@pytest.fixture(autouse=True)
def fresh_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's strangers are kept quiet by an earlier one's."""
    monkeypatch.setattr(handshake, "refusals", RefusalLog())


class Door:
    """A Authenticator with its thread, on a free port of loopback."""

    def __init__(self, check: Callable[[Hello, socket.socket], None]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.authenticator = Authenticator([listener], "job", SECRET, check)
        self.admitted: list[Admitted] = []
        self.pending_most = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            found = self.authenticator.poll(0.02)
            with self._changed:
                self.admitted += found
                self.pending_most = max(self.pending_most, self.authenticator.pending)
                self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self.authenticator.close()
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
        client_handshake(sock, hello, secret, Deadline(10))
        sock.sendall(b"payload")


def test_the_right_rank_is_admitted_with_its_hello_and_its_next_bytes(door: Door) -> None:
    join(door)
    door.wait_for(lambda: bool(door.admitted))
    hello, sock = door.admitted[0]
    assert (hello.source, hello.target, hello.communicator, hello.epoch) == (2, 0, 3, 1)
    assert hello.purpose is Purpose.CONTROL
    assert handshake.receive(sock, 7, Deadline(10)) == b"payload"


def test_frames_are_fixed_and_small(door: Door) -> None:
    assert len(HELLO.pack()) == 72
    assert len(Hello("a much longer name of a job " * 10, Purpose.P2P).pack()) == 72
    assert [len(frame) for frame in record(door)] == [72, 64, 32, 1]


def test_a_handshake_has_the_bytes_that_the_protocol_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reckoned from the definition with SHA-256 alone; nonces are 0 to 31 and 32 to 63."""
    monkeypatch.setattr(
        handshake.secrets, "token_bytes", lambda count: bytes(range(32, 32 + count))
    )
    key = handshake._key(SECRET, Purpose.CONTROL, "job")
    assert key.hex() == "101026ca5e048a2ec174b27accc411f2d1c2025d4784ae82d2f461e9f1367b4d"
    conversation = handshake.server_handshake("job", SECRET, lambda hello: None)
    assert next(conversation) == (b"", 72)
    hello = replace(HELLO, nonce=bytes(range(32)))
    assert hello.pack().hex() == (
        "47574a31010002005e8c9902207afaeb7120430c585a445f030000000100000002000000000000"
        "00000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
    challenge, wanted = conversation.send(hello.pack())
    assert (challenge[:32], wanted) == (bytes(range(32, 64)), 32)
    assert challenge[32:].hex() == (
        "f0c4cc1307b2ba81f14f1510eae7847adb888c50db9497975de50e743ecada78"
    )
    proof = "a1dbcbbcdd0a9b36d68fc8074bfca6b1b9a70eafb1d79261a9fca353b31cdd32"
    with pytest.raises(StopIteration) as proved:
        conversation.send(bytes.fromhex(proof))
    assert proved.value.value == hello


def test_strangers_have_five_seconds_and_sixty_four_places() -> None:
    assert handshake.LIMIT_SECONDS == 5
    assert handshake.MAX_PENDING == 64


def test_macs_are_compared_in_constant_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = handshake.hmac.compare_digest

    def spy(one: bytes, other: bytes) -> bool:
        compared.extend((one, other))
        return compare(one, other)

    monkeypatch.setattr(handshake.hmac, "compare_digest", spy)
    transcript = record(door)
    assert transcript.challenge[32:] in compared  # by the client
    assert transcript.proof in compared  # by the server


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
        if size < 72:  # the authenticator would wait for the rest
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    join(door)


def test_silence_ends_at_the_limit(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "LIMIT_SECONDS", 0.1)
    with knock(door) as sock:
        assert is_closed(sock)


def test_bytes_that_drip_do_not_stretch_the_limit(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "LIMIT_SECONDS", 0.2)
    with knock(door) as sock:
        sock.settimeout(0.02)  # between two bytes: 72 of them would take 1.4 s
        assert 0 < drip(sock, HELLO.pack()) < 72


def drip(sock: socket.socket, frame: bytes) -> int:
    """Sends a byte at a time; returns how many before the authenticator hung up."""
    for sent in range(len(frame)):
        try:
            sock.sendall(frame[sent : sent + 1])
            if sock.recv(1) == b"":
                return sent
        except TimeoutError:  # the next byte's time
            continue
        except ConnectionError:
            return sent
    return len(frame)


def test_a_challenge_is_not_waited_for_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "LIMIT_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        client_handshake(ours, HELLO, SECRET, Deadline(60))


@pytest.mark.parametrize("excess", [1, 1 << 20])
def test_more_bytes_than_a_frame_are_no_proof(door: Door, excess: int) -> None:
    with knock(door) as sock, suppress(ConnectionError):  # it hangs up in the middle
        sock.sendall(HELLO.pack() + bytes(32) + bytes(excess))
        while sock.recv(4096):
            pass
    join(door)
    door.wait_for(lambda: len(door.admitted) == 1)


def test_a_recorded_hello_gets_no_further_than_a_new_challenge(door: Door) -> None:
    transcript = record(door)
    with knock(door) as sock:
        sock.sendall(transcript.hello)
        challenge = handshake.receive(sock, 64, Deadline(10))
        assert challenge != transcript.challenge
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    assert len(door.admitted) == 1


def test_a_recorded_handshake_does_not_fit_again(door: Door) -> None:
    transcript = record(door)
    with knock(door) as sock:
        sock.sendall(transcript.hello)
        handshake.receive(sock, 64, Deadline(10))
        sock.sendall(transcript.proof)
        assert is_closed(sock)
    assert len(door.admitted) == 1


def test_a_recorded_handshake_sent_at_once_does_not_fit_again(door: Door) -> None:
    transcript = record(door)
    with knock(door) as sock:
        sock.sendall(transcript.hello + transcript.proof)
        handshake.receive(sock, 64, Deadline(10))
        assert is_closed(sock)
    assert len(door.admitted) == 1


def test_a_recorded_server_convinces_no_client(door: Door) -> None:
    transcript = record(door)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(transcript.challenge + transcript.welcome)
        with pytest.raises(HandshakeError, match="another secret"):
            client_handshake(ours, HELLO, SECRET, Deadline(10))


class Transcript(NamedTuple):
    hello: bytes
    challenge: bytes
    proof: bytes
    welcome: bytes


def record(door: Door) -> Transcript:
    """The bytes of both sides in a handshake that succeeds, as an eavesdropper sees them."""
    ours, theirs = socket.socketpair()
    with ours, theirs, knock(door) as sock:
        client = threading.Thread(target=client_handshake, args=(ours, HELLO, SECRET, Deadline(10)))
        client.start()
        sock.sendall(hello := handshake.receive(theirs, 72, Deadline(10)))
        theirs.sendall(challenge := handshake.receive(sock, 64, Deadline(10)))
        sock.sendall(proof := handshake.receive(theirs, 32, Deadline(10)))
        theirs.sendall(welcome := handshake.receive(sock, 1, Deadline(10)))
        client.join()
    return Transcript(hello, challenge, proof, welcome)


def test_our_own_challenge_sent_back_is_refused(door: Door) -> None:
    with knock(door) as sock:
        sock.sendall(HELLO.pack())
        challenge = handshake.receive(sock, 64, Deadline(10))
        sock.sendall(challenge[32:])
        assert is_closed(sock)
    assert not door.admitted


def test_our_own_hello_sent_back_convinces_no_client() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(8) + HELLO.pack()[:56])
        with pytest.raises(HandshakeError, match="another secret"):
            client_handshake(ours, HELLO, SECRET, Deadline(10))


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
        nonce = handshake.receive(sock, 64, Deadline(10))[:32]
        sock.sendall(handshake._mac(SECRET, other, b"C", other.pack() + nonce))
        assert is_closed(sock)
    assert not door.admitted


def test_the_nonce_is_fresh_each_time(door: Door) -> None:
    nonces = set()
    for _ in range(3):
        with knock(door) as sock:
            sock.sendall(HELLO.pack())
            nonces.add(handshake.receive(sock, 64, Deadline(10))[:32])
    assert len(nonces) == 3


def test_a_thousand_strangers_keep_no_rank_out(door: Door) -> None:
    frames = (b"", os.urandom(40), os.urandom(72), HELLO.pack(), HELLO.pack() + os.urandom(32))
    with ExitStack() as crowd:
        for number in range(1000):
            sock = crowd.enter_context(knock(door))
            sock.sendall(frames[number % len(frames)])
            if number % 3:  # the others stay connected
                sock.close()
            if number % 100 == 50:
                join(door)
    door.wait_for(lambda: len(door.admitted) == 10)
    assert door.pending_most <= handshake.MAX_PENDING


def test_a_crowd_evicts_its_own() -> None:
    authenticator = Authenticator([], "job", SECRET, expect_hello)
    with ExitStack() as stack:
        ends = [socket.socketpair() for _ in range(handshake.MAX_PENDING + 20)]
        for ours, theirs in ends:
            stack.enter_context(ours)
            address = "192.0.2.1" if ours is ends[0][0] else "192.0.2.66"
            authenticator.begin_handshake(theirs, address)
        assert authenticator.pending == handshake.MAX_PENDING
        assert [theirs.fileno() == -1 for _, theirs in ends] == (
            [False] + [True] * 20 + [False] * (handshake.MAX_PENDING - 1)
        )
        authenticator.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_listener_without_descriptors_pauses_and_then_listens_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    authenticator = Authenticator([listener], "job", SECRET, expect_hello)
    with socket.create_connection(listener.getsockname()):
        polls, until = 0, time.monotonic() + 0.4
        with caplog.at_level(logging.WARNING, "gradwire"), no_descriptor_left():
            while time.monotonic() < until:
                assert not authenticator.poll(10)
                assert authenticator.pending == 1  # so that who polls by it comes back
                polls += 1
        assert polls <= 10
        assert len(caplog.records) == 1
        assert "Too many open files" in caplog.text
        limit = Deadline(10)
        while not authenticator._pending and not limit.passed:
            authenticator.poll(1)
        assert not authenticator._paused
        assert authenticator._pending
    authenticator.close()


def test_an_authenticator_without_descriptors_drops_who_has_not_proved_itself() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    authenticator = Authenticator([listener], "job", SECRET, expect_hello)
    ours, theirs = socket.socketpair()
    with ours, socket.create_connection(listener.getsockname()):
        authenticator.begin_handshake(theirs, "192.0.2.66")
        with no_descriptor_left():
            authenticator.poll(1)
            assert theirs.fileno() == -1
            assert authenticator.pending == 0
    authenticator.close()


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


def test_all_authenticators_of_a_process_share_one_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(3):
            authenticator = Authenticator([], "job", SECRET, expect_hello)
            ours, theirs = socket.socketpair()
            with ours:
                authenticator.begin_handshake(theirs, "192.0.2.7")
                ours.sendall(secrets.token_bytes(72))
                authenticator.poll(10)
            assert authenticator.pending == 0
            authenticator.close()
    assert len(caplog.records) == 1


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
