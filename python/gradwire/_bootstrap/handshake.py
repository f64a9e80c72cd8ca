"""Who may join: both ends of a socket prove that they know the secret before it carries data.

    client  hello(magic, version, purpose, job, communicator, epoch, from, to, nonce_c)    72 bytes
    server  nonce_s, HMAC-SHA256(k, "S" ‖ hello ‖ nonce_s)                                 64 bytes
    client  HMAC-SHA256(k, "C" ‖ hello ‖ nonce_s)                                          32 bytes
    server  one byte: welcome

with k = HMAC-SHA256(secret, "gradwire/1 " ‖ purpose ‖ job). Both MACs cover both nonces, the pair,
its direction and the purpose, so neither a recorded handshake, nor our own challenge sent back, nor
the MAC of another pair fits. The welcome lets a client whose server gave up meanwhile try again.

The guard is against strangers and replay. Established connections are neither encrypted nor signed.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gradwire._base.deadline import Deadline

LIMIT_SECONDS = 5.0
MAX_PENDING = 64
# What a listener queues of those that come at once. Where the queue is full, the kernel drops
# attempts to connect, and they come again after 1, 2, 4, ... 32 seconds.
BACKLOG = 1024
REST_SECONDS = 0.1  # without listening, where no descriptor is left to accept with

_MAGIC = b"GWJ1"
_VERSION = 1
_HELLO = struct.Struct("<4sHBx16sIIii32s")
_NONCE = 32
_MAC = 32
_WELCOME = b"\x06"
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger("gradwire")


class HandshakeError(ConnectionError):
    """The other end could not prove that it belongs to the job, or would not have us."""


class Purpose(enum.IntEnum):
    """What an authenticated socket is for; each has a key of its own."""

    STORE = 1
    CONTROL = 2
    COLLECTIVE = 3
    P2P = 4


@dataclass(frozen=True)
class Hello:
    """Who opens a socket to whom, and for what."""

    job: str
    purpose: Purpose
    communicator: int = 0
    epoch: int = 0
    source: int = 0
    target: int = 0
    nonce: bytes = bytes(_NONCE)

    def pack(self) -> bytes:
        """The fixed frame that travels."""
        return _HELLO.pack(
            _MAGIC,
            _VERSION,
            self.purpose,
            job_digest(self.job),
            self.communicator,
            self.epoch,
            self.source,
            self.target,
            self.nonce,
        )


def unpack_hello(frame: bytes, job: str) -> Hello:
    """Reads a foreign frame; raises HandshakeError for what is not a hello of this job."""
    magic, version, purpose, digest, *rest = _HELLO.unpack(frame)
    if magic != _MAGIC:
        raise HandshakeError("it does not speak gradwire's protocol")
    if version != _VERSION:
        raise HandshakeError(f"it speaks version {version}, this is {_VERSION}")
    if not hmac.compare_digest(digest, job_digest(job)):
        raise HandshakeError(f"it belongs to another job than {job!r}")
    try:
        return Hello(job, Purpose(purpose), *rest)
    except ValueError:
        raise HandshakeError(f"its purpose {purpose} is unknown") from None


def job_digest(job: str) -> bytes:
    """The 16 bytes by which frames and keys name a job."""
    return hashlib.sha256(job.encode()).digest()[:16]


def _key(secret: bytes, purpose: Purpose, job: str) -> bytes:
    label = b"gradwire/1 " + purpose.name.lower().encode() + job_digest(job)
    return hmac.digest(secret, label, "sha256")


def _mac(secret: bytes, hello: Hello, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(_key(secret, hello.purpose, hello.job), role + transcript, "sha256")


def receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Exactly `count` bytes, and not one more; raises ConnectionError or TimeoutError."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(deadline.remaining, 1e-3))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        data += part
    return data


def introduce(sock: socket.socket, hello: Hello, secret: bytes, deadline: Deadline) -> None:
    """The client's half, on a connected socket; returns once the server has said welcome."""
    limit = deadline.within(LIMIT_SECONDS)
    frame = replace(hello, nonce=secrets.token_bytes(_NONCE)).pack()
    sock.settimeout(max(limit.remaining, 1e-3))
    sock.sendall(frame)
    reply = receive(sock, _NONCE + _MAC, limit)
    transcript = frame + reply[:_NONCE]
    if not hmac.compare_digest(reply[_NONCE:], _mac(secret, hello, b"S", transcript)):
        raise HandshakeError("it answered with another secret: give all ranks the same one")
    sock.sendall(_mac(secret, hello, b"C", transcript))
    if receive(sock, 1, limit) != _WELCOME:
        raise HandshakeError("it did not say welcome")
    sock.settimeout(None)


# A conversation yields (bytes to send, number of bytes it wants next) and returns the proven Hello.
_Conversation = Generator[tuple[bytes, int], bytes, Hello]


def answer(job: str, secret: bytes, check: Callable[[Hello], None]) -> _Conversation:
    """The server's half. `check` raises HandshakeError for a hello that is not expected here."""
    frame = yield b"", _HELLO.size
    hello = unpack_hello(frame, job)
    check(hello)
    transcript = frame + secrets.token_bytes(_NONCE)
    challenge = transcript[_HELLO.size :] + _mac(secret, hello, b"S", transcript)
    proof = yield challenge, _MAC
    if not hmac.compare_digest(proof, _mac(secret, hello, b"C", transcript)):
        raise HandshakeError("it does not know the secret")
    return hello


class Admitted(NamedTuple):
    """A socket whose other end has proved itself."""

    hello: Hello
    sock: socket.socket


@dataclass(eq=False)
class _Pending:
    sock: socket.socket
    address: str
    conversation: _Conversation
    wanted: int
    limit: Deadline
    received: bytes = b""


class RefusalLog:
    """One log line per address and minute, however often and at however many doors it knocks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}

    def note(self, address: str, reason: str) -> None:
        """Logs that `address` was refused, unless that was said within the last minute."""
        if self._is_due(address):
            _log.warning("refused a connection from %s: %s", address, reason)

    def _is_due(self, address: str) -> bool:
        now = self._clock()
        with self._lock:
            self._last = {known: at for known, at in self._last.items() if now - at < 60}
            if address in self._last or len(self._last) >= 1024:
                return False
            self._last[address] = now
            return True


refusals = RefusalLog()  # of all gates of this process


class Gate:
    """Listens, and hands out only sockets that were proved; one thread owns it.

    At most 64 connections are pending, each for at most 5 s. A newcomer takes the place of the
    oldest one of the address that has most, so that a crowd of strangers evicts its own; so it does
    where the process has no descriptor left. Where that frees none, the listener rests for 0.1 s.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        job: str,
        secret: bytes,
        check: Callable[[Hello, socket.socket], None],
    ) -> None:
        self._job, self._secret, self._check = job, secret, check
        self._listeners = tuple(listeners)
        self._pending: list[_Pending] = []
        self._resting: dict[socket.socket, Deadline] = {}
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Polls readable when poll() has something to do (an epoll descriptor)."""
        return self._selector.fileno()

    @property
    def pending(self) -> int:
        """How many wait for a poll() that nothing may announce: who has not proved himself yet, and
        listeners that rest.
        """
        return len(self._pending) + len(self._resting)

    def poll(self, timeout: float) -> list[Admitted]:
        """Goes on with what has arrived; waits at most `timeout` seconds for something."""
        admitted = []
        self._listen_again()
        wait = min(timeout, REST_SECONDS) if self._resting else timeout
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif key.data in self._pending:  # not evicted by an accept of this very turn
                admitted += self._advance(key.data)
        for late in [entry for entry in self._pending if entry.limit.passed]:
            self._refuse(late, f"it did not prove itself within {LIMIT_SECONDS:g} s")
        return admitted

    def close(self) -> None:
        """Stops listening and drops whoever is pending."""
        for entry in list(self._pending):
            self._forget(entry)
            entry.sock.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._make_room(listener, os.strerror(error.errno))
            return  # else the client is gone again
        self.greet(sock, _name(sock, address))

    def _make_room(self, listener: socket.socket, shortage: str) -> None:
        """The listener stays readable, so that not to do anything would be to spin."""
        if self._pending:
            self._refuse(self._most_crowding(), f"{shortage}, and it had not proved itself")
            return
        self._selector.unregister(listener)
        self._resting[listener] = Deadline(REST_SECONDS)
        refusals.note("anybody", f"{shortage}: close some, or raise the limit (ulimit -n)")

    def _listen_again(self) -> None:
        for listener in [each for each, rest in self._resting.items() if rest.passed]:
            del self._resting[listener]
            self._selector.register(listener, selectors.EVENT_READ, None)

    def greet(self, sock: socket.socket, address: str) -> None:
        """Begins the handshake on a connected socket; `address` is its name in the log."""
        if len(self._pending) >= MAX_PENDING:
            self._refuse(self._most_crowding(), "it had not proved itself while others waited")
        sock.setblocking(False)
        conversation = answer(self._job, self._secret, lambda hello: self._check(hello, sock))
        _, wanted = next(conversation)
        entry = _Pending(sock, address, conversation, wanted, Deadline(LIMIT_SECONDS))
        self._pending.append(entry)
        self._selector.register(sock, selectors.EVENT_READ, entry)

    def _most_crowding(self) -> _Pending:
        counts = Counter(entry.address for entry in self._pending)
        return max(self._pending, key=lambda entry: counts[entry.address])  # the first of equals

    def _advance(self, entry: _Pending) -> list[Admitted]:
        try:
            part = entry.sock.recv(entry.wanted - len(entry.received))
            if not part:
                raise HandshakeError("it closed the connection")
            entry.received += part
            if len(entry.received) == entry.wanted:
                reply, entry.wanted = entry.conversation.send(entry.received)
                entry.received = b""
                entry.sock.sendall(reply)
        except BlockingIOError:
            return []
        except OSError as error:
            self._refuse(entry, str(error))
        except StopIteration as proved:
            return self._admit(entry, proved.value)
        return []

    def _admit(self, entry: _Pending, hello: Hello) -> list[Admitted]:
        self._forget(entry)
        try:
            entry.sock.sendall(_WELCOME)
        except OSError:  # it gave up between its proof and our welcome
            entry.sock.close()
            return []
        entry.sock.setblocking(True)
        return [Admitted(hello, entry.sock)]

    def _refuse(self, entry: _Pending, reason: str) -> None:
        self._forget(entry)
        entry.sock.close()
        refusals.note(entry.address, reason)

    def _forget(self, entry: _Pending) -> None:
        self._pending.remove(entry)
        self._selector.unregister(entry.sock)


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def _name(sock: socket.socket, address: object) -> str:
    if sock.family == socket.AF_UNIX:
        return f"a process of user {peer_uid(sock)}"
    return str(address[0]) if isinstance(address, tuple) else str(address)
