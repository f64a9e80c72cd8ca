"""The handshake: strangers, replays and mix-ups are refused, and ranks get in all the same."""

from __future__ import annotations

import errno
import hashlib
import hmac
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
from unittest import mock

import pytest
from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.authenticator import MAX_PENDING, Admitted, Authenticator, RefusalLog
from gradwire._bootstrap.handshake import (
    HandshakeError,
    Hello,
    Purpose,
    client_handshake,
    unpack_hello,
)
from ranks import LIMIT

SECRET = b"0123456789abcdef"
HELLO = Hello("job", Purpose.CONTROL, communicator=3, epoch=1, source=2, target=0)


@pytest.fixture(autouse=True)
def fresh_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's strangers are kept quiet by an earlier one's."""
    monkeypatch.setattr("gradwire._bootstrap.authenticator.refusals", RefusalLog())


class Listener:
    """An Authenticator with its thread, on a free port of loopback."""

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
def listener() -> Iterator[Listener]:
    listener = Listener(expect_hello)
    yield listener
    listener.close()


@contextmanager
def connected(listener: Listener) -> Iterator[socket.socket]:
    with socket.create_connection(listener.address, timeout=10) as sock:
        yield sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def join(listener: Listener, hello: Hello = HELLO, secret: bytes = SECRET) -> None:
    with connected(listener) as sock:
        client_handshake(sock, hello, secret, Deadline(10))
        sock.sendall(b"payload")


def test_the_right_rank_is_admitted_with_its_hello_and_its_next_bytes(listener: Listener) -> None:
    join(listener)
    listener.wait_for(lambda: bool(listener.admitted))
    hello, sock = listener.admitted[0]
    assert (hello.source, hello.target, hello.communicator, hello.epoch) == (2, 0, 3, 1)
    assert hello.purpose is Purpose.CONTROL
    assert handshake.receive(sock, 7, Deadline(10)) == b"payload"


def test_frames_are_fixed_and_small(listener: Listener) -> None:
    assert len(HELLO.pack()) == 52
    assert len(Hello("a much longer name of a job " * 10, Purpose.P2P).pack()) == 52
    assert [len(frame) for frame in record(listener)] == [112, 60, 16, 16]


def test_the_psk_and_the_hello_have_the_bytes_that_the_protocol_says() -> None:
    digest = hashlib.sha256(b"job").digest()[:16]
    listener = bytes(range(1, 9))
    hello = b"GWJ1" + bytes([6, 6, 2, 0]) + listener + digest + struct.pack("<IIiiI", 3, 1, 2, 0, 7)
    assert (
        replace(HELLO, listener=int.from_bytes(listener, "little"), way=6, generation=7).pack()
        == hello
    )
    label = b"gradwire/2 control" + digest
    assert handshake._psk(SECRET, Purpose.CONTROL, "job") == hmac.digest(SECRET, label, "sha256")


# cacophony's vectors of Noise_NNpsk0_25519_AESGCM_SHA256, as hexadecimal digits
_PROLOGUE = "4a6f686e2047616c74"
_PSK = "54686973206973206d7920417573747269616e20706572737065637469766521"
_CLIENT_KEY = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
_SERVER_KEY = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
_HASH = "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530"
_MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
    ),
    ("462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
    ("4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
]


def test_noise_gives_the_published_messages() -> None:
    ends = [
        _core.Noise(first, *(bytes.fromhex(each) for each in (_PROLOGUE, _PSK, key)))
        for first, key in ((True, _CLIENT_KEY), (False, _SERVER_KEY))
    ]
    for turn, (payload, message) in enumerate(_MESSAGES):
        sender, receiver = ends[turn % 2], ends[1 - turn % 2]
        assert sender.write(bytes.fromhex(payload)).hex() == message
        assert receiver.read(bytes.fromhex(message)).hex() == payload
    assert [end.hash.hex() for end in ends] == [_HASH, _HASH]


def test_strangers_have_five_seconds_and_sixty_four_places() -> None:
    assert handshake.HANDSHAKE_TIMEOUT == 5
    assert MAX_PENDING == 64


def test_another_secret_is_refused_on_both_sides(listener: Listener) -> None:
    with pytest.raises(HandshakeError, match="another secret"):
        join(listener, secret=b"another-secret-of-16")
    assert not listener.admitted


def test_another_job_is_refused(listener: Listener) -> None:
    with pytest.raises(ConnectionError):
        join(listener, Hello("other job", Purpose.CONTROL, 3, 1, 2, 0))


def test_a_hello_that_is_not_expected_is_refused(listener: Listener) -> None:
    with pytest.raises(ConnectionError):
        join(listener, Hello("job", Purpose.CONTROL, 3, 1, 2, 5))


@pytest.mark.parametrize("size", [1, 111, 112, 4096])
def test_random_bytes_are_refused(listener: Listener, size: int) -> None:
    with connected(listener) as sock:
        sock.sendall(os.urandom(size))
        if size < 112:  # the authenticator would wait for the rest
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    join(listener)


def test_silence_ends_at_the_limit(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 0.1)
    with connected(listener) as sock:
        assert is_closed(sock)


def test_bytes_that_drip_do_not_stretch_the_limit(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 0.2)
    with connected(listener) as sock:
        sock.settimeout(0.02)  # between two bytes: 112 of them would take 2 s
        assert 0 < drip(sock, HELLO.pack() + bytes(60)) < 112


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
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        client_handshake(ours, HELLO, SECRET, Deadline(60))


def test_a_welcome_may_come_after_the_limit(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have admitted the client, and would take one that gave up for dead."""
    honest, passed = handshake.receive, []

    def receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
        passed.append(deadline.passed)
        found = honest(sock, count, deadline)
        deadline.at = 0.0  # all the time of this message is over
        return found

    monkeypatch.setattr(handshake, "receive", receive)
    join(listener)
    assert passed == [False, False]


@pytest.mark.parametrize("excess", [1, 1 << 20])
def test_more_bytes_than_a_frame_are_no_proof(listener: Listener, excess: int) -> None:
    with connected(listener) as sock, suppress(ConnectionError):  # it hangs up in the middle
        sock.sendall(HELLO.pack() + bytes(60) + bytes(excess))
        while sock.recv(4096):
            pass
    join(listener)
    listener.wait_for(lambda: len(listener.admitted) == 1)


def test_a_recorded_first_message_gets_no_further_than_a_new_answer(listener: Listener) -> None:
    transcript = record(listener)
    with connected(listener) as sock:
        sock.sendall(transcript.first)
        answer = handshake.receive(sock, 60, Deadline(10))
        assert answer != transcript.answer
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    assert len(listener.admitted) == 1


def test_a_recorded_handshake_does_not_fit_again(listener: Listener) -> None:
    transcript = record(listener)
    with connected(listener) as sock:
        sock.sendall(transcript.first)
        handshake.receive(sock, 60, Deadline(10))
        sock.sendall(transcript.proof)
        assert is_closed(sock)
    assert len(listener.admitted) == 1


def test_a_recorded_handshake_sent_at_once_does_not_fit_again(listener: Listener) -> None:
    transcript = record(listener)
    with connected(listener) as sock:
        sock.sendall(transcript.first + transcript.proof)
        handshake.receive(sock, 60, Deadline(10))
        assert is_closed(sock)
    assert len(listener.admitted) == 1


def test_a_recorded_server_convinces_no_client(listener: Listener) -> None:
    transcript = record(listener)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(transcript.answer + transcript.welcome)
        with pytest.raises(HandshakeError, match="another secret"):
            client_handshake(ours, HELLO, SECRET, Deadline(10))


class Transcript(NamedTuple):
    first: bytes
    answer: bytes
    proof: bytes
    welcome: bytes


def record(listener: Listener) -> Transcript:
    """The bytes of both sides in a handshake that succeeds, as an eavesdropper sees them."""
    with relay(listener) as (theirs, sock, client):
        sock.sendall(first := handshake.receive(theirs, 112, Deadline(10)))
        theirs.sendall(answer := handshake.receive(sock, 60, Deadline(10)))
        sock.sendall(proof := handshake.receive(theirs, 16, Deadline(10)))
        theirs.sendall(welcome := handshake.receive(sock, 16, Deadline(10)))
        client.join()
    return Transcript(first, answer, proof, welcome)


@contextmanager
def relay(
    listener: Listener, errors: list[OSError] | None = None
) -> Iterator[tuple[socket.socket, socket.socket, threading.Thread]]:
    """A client's socket, one to the listener, and the client; its error goes into the list."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        connected(listener) as sock,
    ):
        theirs = server.accept()[0]

        def run() -> None:
            try:
                client_handshake(ours, HELLO, SECRET, Deadline(10))
            except OSError as error:
                if errors is None:
                    raise
                errors.append(error)

        client = threading.Thread(target=run)
        client.start()
        with theirs:
            yield theirs, sock, client
        client.join()


@pytest.mark.parametrize(
    "byte", [*range(4), 6, 8, 16, 31, 32, 36, 40, 44, 48, 52, 83, 84, 95, 96, 111]
)
def test_a_changed_first_message_is_refused(listener: Listener, byte: int) -> None:
    errors: list[OSError] = []
    with relay(listener, errors) as (theirs, sock, client):
        first = bytearray(handshake.receive(theirs, 112, Deadline(10)))
        first[byte] ^= 1
        sock.sendall(first)
        with suppress(OSError):
            theirs.sendall(handshake.receive(sock, 60, Deadline(10)))
        theirs.close()
        client.join()
    assert errors
    assert not listener.admitted


@pytest.mark.parametrize("byte", [0, 31, 32, 44, 59])
def test_a_changed_answer_is_refused(listener: Listener, byte: int) -> None:
    errors: list[OSError] = []
    with relay(listener, errors) as (theirs, sock, client):
        sock.sendall(handshake.receive(theirs, 112, Deadline(10)))
        answer = bytearray(handshake.receive(sock, 60, Deadline(10)))
        answer[byte] ^= 1
        theirs.sendall(answer)
        client.join()
    assert isinstance(errors[0], HandshakeError)
    assert not listener.admitted


def test_a_public_key_with_which_all_agree_alike_ends_no_listener(listener: Listener) -> None:
    """Whoever knows the secret can send one, and where there is none everybody does."""
    sealed = "1160a9624c592bf591a0921e65f83905be95b039a76c757511f322d6"  # what fits a key of zeros
    with connected(listener) as sock:
        sock.sendall(HELLO.pack() + bytes(32) + bytes.fromhex(sealed))
        assert handshake.receive(sock, 60, Deadline(10)) == bytes(60)
        assert is_closed(sock)
    join(listener)
    listener.wait_for(lambda: len(listener.admitted) == 1)


def test_our_own_messages_sent_back_are_refused(listener: Listener) -> None:
    with connected(listener) as sock:
        sock.sendall(record(listener).first)
        sock.sendall(handshake.receive(sock, 60, Deadline(10))[:16])
        assert is_closed(sock)
    assert len(listener.admitted) == 1
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(HELLO.pack() + bytes(20))
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
def test_a_proof_of_something_else_is_refused(listener: Listener, other: Hello) -> None:
    with connected(listener) as sock:
        noise = handshake._noise(True, SECRET, other)
        sock.sendall(
            HELLO.pack() + noise.write(handshake.side_of(sock, handshake.host_identity()).pack())
        )
        assert handshake.receive(sock, 60, Deadline(10)) == bytes(60)
        assert is_closed(sock)
    assert not listener.admitted


def test_each_handshake_has_other_keys(listener: Listener) -> None:
    assert len({record(listener).answer[:32] for _ in range(3)}) == 3


def test_a_thousand_strangers_keep_no_rank_out(listener: Listener) -> None:
    hello = HELLO.pack()
    frames = (b"", os.urandom(40), os.urandom(100), hello, hello + os.urandom(60))
    with ExitStack() as crowd:
        for number in range(1000):
            sock = crowd.enter_context(connected(listener))
            sock.sendall(frames[number % len(frames)])
            if number % 3:  # the others stay connected
                sock.close()
            if number % 100 == 50:
                join(listener)
    listener.wait_for(lambda: len(listener.admitted) == 10)
    assert listener.pending_most <= MAX_PENDING


def test_a_crowd_evicts_its_own() -> None:
    authenticator = Authenticator([], "job", SECRET, expect_hello)
    with ExitStack() as stack:
        ends = [socket.socketpair() for _ in range(MAX_PENDING + 20)]
        for ours, theirs in ends:
            stack.enter_context(ours)
            address = "192.0.2.1" if ours is ends[0][0] else "192.0.2.66"
            authenticator.begin_handshake(theirs, address)
        assert authenticator.pending == MAX_PENDING
        assert [theirs.fileno() == -1 for _, theirs in ends] == (
            [False] + [True] * 20 + [False] * (MAX_PENDING - 1)
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
                assert authenticator.shortage is not None
                polls += 1
        assert polls <= 10
        assert len(caplog.records) == 1
        assert "Too many open files" in caplog.text
        limit = Deadline(10)
        while not authenticator._pending and not limit.passed:
            authenticator.poll(1)
        assert not authenticator._paused
        assert authenticator._pending
        assert authenticator.shortage is None
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


def test_a_minute_ends_with_its_last_second_and_a_crowd_is_not_kept() -> None:
    now = 0.0
    log = RefusalLog(clock=lambda: now)
    assert log._is_due("a")
    now = 59.9
    assert not log._is_due("a")
    now = 60.0
    assert log._is_due("a")
    assert [log._is_due(str(each)) for each in range(1024)] == [True] * 1023 + [False]
    now = 120.0
    assert log._is_due("the next")
    assert log._last.keys() == {"the next"}


def test_a_client_that_says_nothing_blocks_nobody() -> None:
    """Also where its socket was taken for readable."""
    authenticator = Authenticator([], "job", SECRET, expect_hello)
    ours, theirs = socket.socketpair()
    with ours:
        authenticator.begin_handshake(theirs, "192.0.2.7")
        (entry,) = authenticator._pending
        assert not theirs.getblocking()
        assert authenticator._advance(entry) == []
        assert authenticator.pending == 1
        authenticator.close()


def test_a_client_that_is_gone_again_is_no_shortage(listener: Listener) -> None:
    authenticator = listener.authenticator
    gone = mock.Mock(accept=mock.Mock(side_effect=OSError(errno.ECONNABORTED, "gone")))
    authenticator._accept(gone)
    assert authenticator.shortage is None
    assert not authenticator._paused


def test_all_authenticators_of_a_process_share_one_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(3):
            authenticator = Authenticator([], "job", SECRET, expect_hello)
            ours, theirs = socket.socketpair()
            with ours:
                authenticator.begin_handshake(theirs, "192.0.2.7")
                ours.sendall(secrets.token_bytes(112))
                authenticator.poll(10)
            assert authenticator.pending == 0
            authenticator.close()
    assert len(caplog.records) == 1


def test_a_refused_stranger_is_logged_with_its_address_and_the_reason(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradwire"), connected(listener) as sock:
        sock.sendall(bytes(112))
        assert is_closed(sock)
        listener.wait_for(lambda: bool(caplog.records))
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
