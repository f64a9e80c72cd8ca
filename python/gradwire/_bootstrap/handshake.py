"""The handshake: both ends of a socket prove that they know the secret, and get keys for it.

    client  hello(magic, version, way, purpose, listener, job, communicator, epoch,
                  from, to, generation)                                           52 bytes
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
import hashlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._errors import TransportError
from gradwire._host import encryption
from gradwire._host.encryption import Mismatch, Side, side_of, unpack_side
from gradwire._host.identity import host_identity
from gradwire._host.interfaces import Target
from gradwire._host.keepalive import fail_with_host
from gradwire._host.sealed_socket import SealedSocket
from gradwire._host.user_namespace import stands_for_all_unmapped

HANDSHAKE_TIMEOUT = 5.0  # seconds for a handshake, and as long again for a request that must follow
# For the welcome. A server that has the proof may have admitted the client, however late it says
# so; one that has not closes the connection.
WELCOME_TIMEOUT = 30.0

_MAGIC = b"GWJ1"
_VERSION = 6
_HELLO = struct.Struct("<4sBBBBQ16sIIiiI")
HELLO_BYTES = _HELLO.size
_ANSWER = _core.NOISE_OVERHEAD + encryption.SIDE_BYTES  # bytes of Noise's first two messages
_PROOF = 16
WELCOME_BYTES = _ANSWER + _PROOF  # that a server says at least to who has proved itself
REFUSAL = bytes(_ANSWER)  # no message of Noise: a public key of zeros leads to no secret
NOBODY = b"\1" + bytes(_ANSWER - 1)  # nor is this, which says that nobody listens there

_log = logging.getLogger("gradwire")


class HandshakeError(ConnectionError):
    """The other end could not prove that it belongs to the job, or refused us."""


class SettingsError(HandshakeError):
    """Both ends belong to the job, and its ranks were given settings that exclude each other."""


class Excluded(SettingsError):
    """The same, of a client that has proved that it belongs to the job."""

    def __init__(self, hello: Hello, reason: str) -> None:
        super().__init__(reason)
        self.hello = hello


class Refusal(HandshakeError):
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
    STREAM = 8
    RELAY = 9
    ACKNOWLEDGE = 10
    WAY = 11


_DATA = (
    Purpose.COLLECTIVE,
    Purpose.P2P,
    Purpose.STREAM,
    Purpose.ACKNOWLEDGE,
    Purpose.WAY,
)  # their readers may pause
OF_CLIENTS_THAT_MAY_STOP = (*_DATA, Purpose.SERVE, Purpose.COORDINATE)


@dataclass(frozen=True)
class Hello:
    """The client's first frame: who opens a socket to whom, and for what.

    A socket for collectives says how many streams more it will have on its way; each of these, its
    number. The first one for messages says which further ways there are, as bits; one for
    acknowledgements, the number of its lane; one of a way that is made anew, its number there.
    """

    job: str
    purpose: Purpose
    communicator: int = 0
    epoch: int = 0
    source: int = 0
    target: int = 0
    stream: int = 0
    listener: int = 0  # which of those that share a port; see `shared_port`
    way: int = 0  # the pair of interfaces
    generation: int = 0  # of the way: how often it was made anew

    def pack(self) -> bytes:
        """Encodes the frame, whose length is fixed."""
        numbers = (self.communicator, self.epoch, self.source, self.target)
        head = _MAGIC, _VERSION, self.way, self.purpose, self.stream, self.listener
        return _HELLO.pack(*head, job_digest(self.job), *numbers, self.generation)


def unpack_hello(frame: bytes, job: str) -> Hello:
    """Decodes a frame from outside; raises HandshakeError unless it is a hello of this job."""
    magic, version, way, purpose, stream, listener, digest, *rest = _HELLO.unpack(frame)
    *numbers, generation = rest
    if magic != _MAGIC:
        raise HandshakeError("it does not speak gradwire's protocol")
    if version != _VERSION:
        raise HandshakeError(f"it speaks version {version}, this is {_VERSION}")
    if not hmac.compare_digest(digest, job_digest(job)):
        raise HandshakeError(f"it belongs to another job than {job!r}")
    try:
        found = Hello(job, Purpose(purpose), *numbers)
    except ValueError:
        raise HandshakeError(f"its purpose {purpose} is unknown") from None
    return replace(found, stream=stream, listener=listener, way=way, generation=generation)


def listener_in(frame: bytes) -> int:
    """The number of the listener that a frame from outside asks for, which may be no hello."""
    return int(_HELLO.unpack(frame)[5])


def purpose_in(frame: bytes) -> int:
    """The purpose in a frame from outside, which may be no hello."""
    return int(_HELLO.unpack(frame)[3])


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


def dial(
    family: int, target: Any, seconds: float, source: Target | None = None, device: str = ""
) -> socket.socket:
    """Connects within some seconds, over TCP from the `source`, if any; raises OSError.

    By an interface named `device` alone, where the kernel lets this user ask for it.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        if device:
            bind_to_device(sock, device)
        if source is not None:
            sock.bind(source)
        sock.connect(target)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def bind_to_device(sock: socket.socket, device: str) -> None:
    """Keeps a socket to one interface, where the kernel allows it: Linux does since 5.7."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())


def client_handshake(
    sock: socket.socket, hello: Hello, secret: bytes, deadline: Deadline, patience: int = 1
) -> socket.socket:
    """Runs the client's half on a connected socket, which it closes when that fails.

    A Unix socket's server must run as the same user. Returns the socket to go on with, which is
    another one where it is sealed, and fails with the server's host (`keepalive`). The server has
    `patience` times HANDSHAKE_TIMEOUT to answer.
    """
    try:
        noise, cipher = _prove(sock, hello, secret, deadline, patience)
        return go_on(sock, noise, cipher, always_read=hello.purpose not in _DATA)
    except BaseException:
        sock.close()
        raise


def _prove(
    sock: socket.socket, hello: Hello, secret: bytes, deadline: Deadline, patience: int
) -> tuple[_core.Noise, _core.Cipher | None]:
    """Exchanges the messages, until the server has said welcome."""
    require_own_user(sock, secret)
    limit = deadline.within(patience * HANDSHAKE_TIMEOUT)
    side, noise = side_of(sock, host_identity()), _noise(True, secret, hello)
    sock.settimeout(limit.left)
    sock.sendall(hello.pack() + noise.write(side.pack()))
    answer = receive(sock, _ANSWER, limit)
    if answer == NOBODY:
        raise ConnectionRefusedError("nobody listens there any more")
    try:
        cipher = _read_answer(noise, answer, side)
    except SettingsError:
        with suppress(OSError):
            sock.sendall(noise.write(b""))  # so that the server can believe it, too
        raise
    sock.sendall(noise.write(b""))
    try:
        noise.read(receive(sock, _PROOF, deadline.within(WELCOME_TIMEOUT)))
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


def go_on(
    sock: socket.socket, noise: _core.Noise, cipher: _core.Cipher | None, *, always_read: bool
) -> socket.socket:
    """The socket after its handshake: sealed where there is a cipher; it fails with its host."""
    fail_with_host(sock, always_read=always_read)
    sock.settimeout(None)
    return sock if cipher is None else SealedSocket(sock, noise.seal(cipher))


class Proven(NamedTuple):
    """A client that has proved that it knows the secret."""

    hello: Hello
    noise: _core.Noise
    cipher: _core.Cipher | None


# Yields (bytes to send, number of bytes wanted next).
Handshake = Generator[tuple[bytes, int], bytes, Proven]


def server_handshake(
    sock: socket.socket, host: str, job: str, secret: bytes, check: Callable[[Hello], None]
) -> Handshake:
    """Runs the server's half on a host of this identity; raises OSError for a socket that ended.

    `check` raises HandshakeError for a hello that is not expected.
    """
    side = side_of(sock, host)
    first = yield b"", _HELLO.size + _ANSWER
    hello = unpack_hello(first[: _HELLO.size], job)
    check(hello)
    noise = _noise(False, secret, hello)
    try:
        theirs = noise.read(first[_HELLO.size :])
        answer = noise.write(side.pack())
    except TransportError:
        raise Refusal("it does not know the secret, or sent no public key") from None
    proof = yield answer, _PROOF
    try:
        noise.read(proof)
    except TransportError:
        raise HandshakeError("it repeats what another process has said") from None
    try:
        return Proven(hello, noise, encryption.agree(side, unpack_side(theirs)))
    except Mismatch as error:
        raise Excluded(hello, str(error)) from None


def request_of(proven: Proven, request: bytes) -> Handshake:
    """Waits until a client that has proved itself says what it must then say."""
    if (yield b"", len(request)) != request:
        raise HandshakeError("it proved itself, and then made another request than it may here")
    return proven


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
