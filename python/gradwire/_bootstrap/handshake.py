"""The handshake: both ends of a socket prove that they know the secret, and get keys for it.

    client  hello(magic, version, purpose, job, communicator, epoch, from, to)    40 bytes
            Noise -> psk, e: the client's Side                                    60 bytes
    server  Noise <- e, ee: the server's Side                                     60 bytes
    client  Noise transport message: nothing                                      16 bytes
    server  Noise transport message: nothing, which is the welcome                16 bytes

The pattern is Noise_NNpsk0_25519_AESGCM_SHA256, with the hello as prologue; docs/design/joins.md
says what that keeps out. The third message proves that the client answers now, also where the two
Sides exclude each other: so the server believes that, and nobody else can tell it so. The welcome
lets a client retry when its server gave up meanwhile. A server that cannot read the first message
answers with 60 zeros.

Both ends of a Unix socket first compare user ids, as the kernel reports them. What follows is
sealed with keys of its own (`sealed_socket`) where both Sides ask for it (`encryption`).
"""

from __future__ import annotations

import enum
import errno
import hashlib
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.host_info import host_identity
from gradwire._bootstrap.keepalive import fail_with_host, host_timeout
from gradwire._errors import TransportError
from gradwire._host import encryption
from gradwire._host.encryption import Mismatch, Side, side_of, unpack_side
from gradwire._host.interfaces import Target
from gradwire._host.sealed_socket import SealedSocket
from gradwire._host.user_namespace import stands_for_all_unmapped

LIMIT_SECONDS = 5.0
MAX_PENDING = 64
# Connections that a listener queues. When the queue is full, the kernel drops attempts to connect,
# and clients repeat them after 1, 2, 4, ... 32 seconds.
BACKLOG = 1024
PAUSE_SECONDS = 0.1  # in which a listener pauses when no descriptor is left to accept with

_MAGIC = b"GWJ1"
_VERSION = 2
_HELLO = struct.Struct("<4sHBx16sIIii")
_ANSWER = _core.NOISE_OVERHEAD + encryption.SIDE_BYTES  # bytes of Noise's first two messages
_PROOF = 16
_REFUSAL = bytes(_ANSWER)  # no message of Noise: a public key of zeros leads to no secret
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger("gradwire")


class HandshakeError(ConnectionError):
    """The other end could not prove that it belongs to the job, or refused us."""


class SettingsError(HandshakeError):
    """Both ends belong to the job, and its ranks were given settings that exclude each other."""


class _Excluded(SettingsError):
    """The same, of a client that has proved that it belongs to the job."""

    def __init__(self, hello: Hello, reason: str) -> None:
        super().__init__(reason)
        self.hello = hello


class _Refusal(HandshakeError):
    """A refusal of which the client is told."""


class Purpose(enum.IntEnum):
    """The use of an authenticated socket; each has a key of its own."""

    STORE = 1
    CONTROL = 2
    COLLECTIVE = 3
    P2P = 4
    SERVE = 5
    COORDINATE = 6
    JOIN = 7


_DATA = (Purpose.COLLECTIVE, Purpose.P2P)  # their readers may pause
_OF_CLIENTS_THAT_MAY_STOP = (*_DATA, Purpose.SERVE, Purpose.COORDINATE)


@dataclass(frozen=True)
class Hello:
    """The client's first frame: who opens a socket to whom, and for what."""

    job: str
    purpose: Purpose
    communicator: int = 0
    epoch: int = 0
    source: int = 0
    target: int = 0

    def pack(self) -> bytes:
        """Encodes the frame, whose length is fixed."""
        numbers = (self.communicator, self.epoch, self.source, self.target)
        return _HELLO.pack(_MAGIC, _VERSION, self.purpose, job_digest(self.job), *numbers)


def unpack_hello(frame: bytes, job: str) -> Hello:
    """Decodes a frame from outside; raises HandshakeError unless it is a hello of this job."""
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


def _psk(secret: bytes, purpose: Purpose, job: str) -> bytes:
    label = b"gradwire/2 " + purpose.name.lower().encode() + job_digest(job)
    return _core.hmac_sha256(secret, label)


def _noise(initiator: bool, secret: bytes, hello: Hello) -> _core.Noise:
    return _core.Noise(initiator, hello.pack(), _psk(secret, hello.purpose, hello.job))


def receive(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Receives exactly `count` bytes; raises ConnectionError or TimeoutError."""
    data = b""
    while len(data) < count:
        sock.settimeout(deadline.left)
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        data += part
    return data


def dial(family: int, target: Any, seconds: float, source: Target | None = None) -> socket.socket:
    """Connects within some seconds, over TCP from the `source`, if any; raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        if source is not None:
            sock.bind(source)
        sock.connect(target)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def client_handshake(
    sock: socket.socket, hello: Hello, secret: bytes, deadline: Deadline
) -> socket.socket:
    """Runs the client's half on a connected socket, which it closes when that fails.

    A Unix socket's server must run as the same user. Returns the socket to go on with, which is
    another one where it is sealed, and fails with the server's host (`keepalive`).
    """
    try:
        noise, cipher = _prove(sock, hello, secret, deadline)
        return _go_on(sock, noise, cipher, always_read=hello.purpose not in _DATA)
    except BaseException:
        sock.close()
        raise


def _prove(
    sock: socket.socket, hello: Hello, secret: bytes, deadline: Deadline
) -> tuple[_core.Noise, _core.Cipher | None]:
    """Exchanges the messages, until the server has said welcome."""
    require_own_user(sock, secret)
    limit = deadline.within(LIMIT_SECONDS)
    side, noise = side_of(sock, host_identity()), _noise(True, secret, hello)
    sock.settimeout(limit.left)
    sock.sendall(hello.pack() + noise.write(side.pack()))
    answer = receive(sock, _ANSWER, limit)
    try:
        cipher = _read_answer(noise, answer, side)
    except SettingsError:
        with suppress(OSError):
            sock.sendall(noise.write(b""))  # so that the server can believe it, too
        raise
    sock.sendall(noise.write(b""))
    try:
        noise.read(receive(sock, _PROOF, limit))
    except TransportError:
        raise HandshakeError("it did not say welcome") from None
    return noise, cipher


def _read_answer(noise: _core.Noise, answer: bytes, side: Side) -> _core.Cipher | None:
    """Reads the server's Side; returns what both agree on."""
    try:
        return encryption.agree(side, unpack_side(noise.read(answer)))
    except TransportError:
        raise HandshakeError("it answered with another secret: give all ranks the same one") from (
            None
        )
    except Mismatch as error:
        raise SettingsError(str(error)) from None


def _go_on(
    sock: socket.socket, noise: _core.Noise, cipher: _core.Cipher | None, *, always_read: bool
) -> socket.socket:
    fail_with_host(sock, always_read=always_read)
    sock.settimeout(None)
    return sock if cipher is None else SealedSocket(sock, noise.seal(cipher))


class _Proven(NamedTuple):
    """A client that has proved that it knows the secret."""

    hello: Hello
    noise: _core.Noise
    cipher: _core.Cipher | None


# Yields (bytes to send, number of bytes wanted next).
_Handshake = Generator[tuple[bytes, int], bytes, _Proven]


def server_handshake(
    job: str, secret: bytes, check: Callable[[Hello], None], side: Side
) -> _Handshake:
    """Runs the server's half; `check` raises HandshakeError for a hello that is not expected."""
    first = yield b"", _HELLO.size + _ANSWER
    hello = unpack_hello(first[: _HELLO.size], job)
    check(hello)
    noise = _noise(False, secret, hello)
    try:
        theirs = noise.read(first[_HELLO.size :])
        answer = noise.write(side.pack())
    except TransportError:
        raise _Refusal("it does not know the secret, or sent no public key") from None
    proof = yield answer, _PROOF
    try:
        noise.read(proof)
    except TransportError:
        raise HandshakeError("it repeats what another process has said") from None
    try:
        return _Proven(hello, noise, encryption.agree(side, unpack_side(theirs)))
    except Mismatch as error:
        raise _Excluded(hello, str(error)) from None


def _request_of(proven: _Proven, request: bytes) -> _Handshake:
    """Waits until a client that has proved itself says what it must then say."""
    if (yield b"", len(request)) != request:
        raise HandshakeError("it proved itself, and then made another request than it may here")
    return proven


class Admitted(NamedTuple):
    """A socket whose other end has proved that it knows the secret; it fails with its host."""

    hello: Hello
    sock: socket.socket


@dataclass(eq=False)
class _Pending:
    """A connection in the middle of its handshake, or of the request that follows."""

    sock: socket.socket
    address: str
    handshake: _Handshake
    wanted: int
    limit: Deadline
    received: bytes = b""
    is_welcome: bool = False  # it has proved itself, and owes its request


class RefusalLog:
    """Logs refused connections: one line per address and minute, for all listeners together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}

    def note(self, address: str, reason: str) -> None:
        """Logs that `address` was refused, unless that was logged within the last minute."""
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


refusals = RefusalLog()  # of all authenticators of this process


class Authenticator:
    """Listens, and hands out only sockets whose handshake succeeded; one thread owns it.

    At a Unix socket it refuses processes of other users before these say a word.

    Where a `request` must follow the handshake, a client that does not make it is refused alike.
    At most 64 connections are pending, each for at most 5 s. A new one replaces the oldest of the
    address that has most, so that a crowd of strangers evicts its own. The same happens when the
    process has no descriptor left; when that frees none, the listener pauses for 0.1 s.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        job: str,
        secret: bytes,
        check: Callable[[Hello, socket.socket], None],
        request: bytes = b"",
    ) -> None:
        _core.libcrypto_version()  # these raise here, not in the thread that polls
        encryption.setting()
        host_timeout()
        self._job, self._secret, self._check, self._request = job, secret, check, request
        self._host = host_identity()  # here, since it takes a descriptor
        self._listeners = tuple(listeners)
        self._pending: list[_Pending] = []
        self._paused: dict[socket.socket, Deadline] = {}
        self.shortage: OSError | None = None  # for which the last connection could not be accepted
        self.excluded: tuple[int, str] | None = None  # a rank whose settings exclude ours, and why
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """An epoll descriptor, which is readable when poll() has something to do."""
        return self._selector.fileno()

    @property
    def pending(self) -> int:
        """The number of pending handshakes and paused listeners; poll() checks their limits."""
        return len(self._pending) + len(self._paused)

    def poll(self, timeout: float) -> list[Admitted]:
        """Advances all handshakes; waits at most `timeout` seconds for something to arrive."""
        admitted = []
        self._resume_listeners()
        wait = min(timeout, PAUSE_SECONDS) if self._paused else timeout
        for key, _ in self._selector.select(wait):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif key.data in self._pending:  # not evicted by an accept of this very turn
                admitted += self._advance(key.data)
        for late in [entry for entry in self._pending if entry.limit.passed]:
            missed = "make its request" if late.is_welcome else "prove itself"
            self._refuse(late, f"it did not {missed} within {LIMIT_SECONDS:g} s")
        return admitted

    def use_secret(self, secret: bytes) -> None:
        """Asks for this secret from now on; any thread may call it."""
        self._secret = secret

    def close(self) -> None:
        """Stops listening and drops all pending connections."""
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
                self._make_room(listener, error)
            return  # else the client is gone again
        self.shortage = None
        name = _name(sock, address)
        try:
            require_own_user(sock, self._secret)
        except HandshakeError as error:
            sock.close()
            refusals.note(name, str(error))
            return
        self.begin_handshake(sock, name)

    def _make_room(self, listener: socket.socket, error: OSError) -> None:
        """Evicts a pending connection, or pauses the listener, which would stay readable."""
        shortage = os.strerror(error.errno or 0)
        if self._pending:
            self._refuse(
                self._oldest_of_busiest_address(), f"{shortage}, and it had not proved itself"
            )
            return
        self.shortage = error
        self._selector.unregister(listener)
        self._paused[listener] = Deadline(PAUSE_SECONDS)
        refusals.note("anybody", f"{shortage}: close some, or raise the limit (ulimit -n)")

    def _resume_listeners(self) -> None:
        for listener in [each for each, rest in self._paused.items() if rest.passed]:
            del self._paused[listener]
            self._selector.register(listener, selectors.EVENT_READ, None)

    def begin_handshake(self, sock: socket.socket, address: str) -> None:
        """Begins the handshake on a connected socket, which the log calls `address`."""
        if len(self._pending) >= MAX_PENDING:
            self._refuse(
                self._oldest_of_busiest_address(), "it had not proved itself while others waited"
            )
        sock.setblocking(False)
        try:
            side = side_of(sock, self._host)
        except OSError:  # it is gone again
            sock.close()
            return
        handshake = server_handshake(
            self._job, self._secret, lambda hello: self._check(hello, sock), side
        )
        self._await(sock, address, handshake)

    def _await(self, sock: socket.socket, address: str, handshake: _Handshake) -> _Pending:
        _, wanted = next(handshake)
        entry = _Pending(sock, address, handshake, wanted, Deadline(LIMIT_SECONDS))
        self._pending.append(entry)
        self._selector.register(sock, selectors.EVENT_READ, entry)
        return entry

    def _oldest_of_busiest_address(self) -> _Pending:
        counts = Counter(entry.address for entry in self._pending)
        return max(self._pending, key=lambda entry: counts[entry.address])  # the first of equals

    def _advance(self, entry: _Pending) -> list[Admitted]:
        try:
            part = entry.sock.recv(entry.wanted - len(entry.received))
            if not part:
                raise HandshakeError("it closed the connection")
            entry.received += part
            if len(entry.received) == entry.wanted:
                reply, entry.wanted = entry.handshake.send(entry.received)
                entry.received = b""
                entry.sock.sendall(reply)
        except BlockingIOError:
            return []
        except _Refusal as refusal:
            with suppress(OSError):
                entry.sock.sendall(_REFUSAL)
            self._refuse(entry, str(refusal))
        except _Excluded as error:
            self.excluded = error.hello.source, f"{entry.address}: {error}"
            self._refuse(entry, str(error))
        except OSError as error:
            self._refuse(entry, str(error))
        except StopIteration as proved:
            return self._admit(entry, proved.value)
        return []

    def _admit(self, entry: _Pending, proven: _Proven) -> list[Admitted]:
        self._forget(entry)
        if entry.is_welcome:
            return [Admitted(proven.hello, entry.sock)]
        try:
            entry.sock.sendall(proven.noise.write(b""))
        except OSError:  # it gave up between its proof and our welcome
            entry.sock.close()
            return []
        always_read = proven.hello.purpose not in _OF_CLIENTS_THAT_MAY_STOP
        sock = _go_on(entry.sock, proven.noise, proven.cipher, always_read=always_read)
        if not self._request:
            return [Admitted(proven.hello, sock)]
        sock.setblocking(False)
        self._await(sock, entry.address, _request_of(proven, self._request)).is_welcome = True
        return []

    def _refuse(self, entry: _Pending, reason: str) -> None:
        self._forget(entry)
        entry.sock.close()
        refusals.note(entry.address, reason)

    def _forget(self, entry: _Pending) -> None:
        self._pending.remove(entry)
        self._selector.unregister(entry.sock)


def peer_uid(sock: socket.socket) -> int:
    """The user id at the other end of a Unix socket, as the kernel reports it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", raw)
    return int(uid)


def require_own_user(sock: socket.socket, secret: bytes) -> None:
    """Raises HandshakeError for a Unix socket whose other end runs as another user.

    Also where that cannot be told, and there is no secret that would tell it.
    """
    if sock.family != socket.AF_UNIX:
        return
    if peer_uid(sock) != os.geteuid():
        raise HandshakeError(f"it runs as user {peer_uid(sock)}, this as {os.geteuid()}")
    if not secret and stands_for_all_unmapped():
        raise HandshakeError(
            f"this process runs as user {os.geteuid()}, which in its user namespace stands for all "
            "users without a number there, so that it may run as any of them: set GRADWIRE_SECRET, "
            "or run as a user with a number (/proc/self/uid_map)"
        )


def _name(sock: socket.socket, address: object) -> str:
    if sock.family == socket.AF_UNIX:
        return f"a process of user {peer_uid(sock)}"
    return str(address[0]) if isinstance(address, tuple) else str(address)
