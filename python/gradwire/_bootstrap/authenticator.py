"""The authenticator: it listens, and hands out sockets whose other ends have proved themselves."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import handshake
from gradwire._bootstrap.handshake import (
    HELLO_BYTES,
    OF_CLIENTS_THAT_MAY_STOP,
    REFUSAL,
    Excluded,
    Handshake,
    HandshakeError,
    Hello,
    Proven,
    Refusal,
    go_on,
    listener_in,
    peer_uid,
    request_of,
    require_own_user,
    server_handshake,
)
from gradwire._host import encryption
from gradwire._host.identity import host_identity
from gradwire._host.keepalive import host_timeout

MAX_PENDING = 64
# Connections that a listener queues. When the queue is full, the kernel drops attempts to connect,
# and clients repeat them after 1, 2, 4, ... 32 seconds.
BACKLOG = 1024
_HANDED_SECONDS = 1.0  # in which the port's process sends the socket that it has announced
PAUSE_SECONDS = 0.1  # in which a listener pauses when no descriptor is left to accept with
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger("gradwire")


class Admitted(NamedTuple):
    """A socket whose other end has proved that it knows the secret; it fails with its host."""

    hello: Hello
    sock: socket.socket


@dataclass(eq=False)
class Pending:
    """A connection in the middle of its handshake, or of the request that follows."""

    sock: socket.socket
    address: str
    handshake: Handshake
    wanted: int
    limit: Deadline
    received: bytes = b""
    is_welcome: bool = False  # it has proved itself, and owes its request

    @property
    def missed(self) -> str:
        """What it had not done, where it is refused for that."""
        return "made its request" if self.is_welcome else "proved itself"


class RefusalLog:
    """Logs refused connections: one line per address and minute, for all listeners together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}

    def release_after_fork(self) -> None:
        """Renews the lock, which another thread of the parent may have had."""
        self._lock = threading.Lock()

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
os.register_at_fork(after_in_child=refusals.release_after_fork)


class Authenticator:
    """Listens, and hands out only sockets whose handshake succeeded; one thread owns it.

    At a Unix socket it refuses processes of other users before these say a word.

    Where a `request` must follow the handshake, a client that does not make it is refused alike.
    At most 64 connections are in their handshake, each for at most 5 s, and 64 others owe their
    request, for 5 s more. A new one replaces the oldest of the address that has most, so that a
    crowd of strangers evicts its own. The same happens when the process has no descriptor left;
    when that frees none, the listener pauses for 0.1 s.
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
        self._pending: list[Pending] = []
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
            self._refuse(late, f"it had not {late.missed} within {handshake.HANDSHAKE_TIMEOUT:g} s")
        return admitted

    def use_secret(self, secret: bytes) -> None:
        """Asks for this secret from now on; any thread may call it."""
        self._secret = secret

    def close(self) -> None:
        """Stops listening and drops all pending connections; in a forked child, its copies."""
        self._selector.close()  # first, since to unregister would do so in the parent, too
        for entry in self._pending:
            entry.sock.close()
        self._pending.clear()
        for listener in self._listeners:
            listener.close()

    def release(self) -> tuple[socket.socket, ...]:
        """Closes it, but for its listeners, which it returns."""
        released, self._listeners = self._listeners, ()
        self.close()
        return released

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address, received = _accepted(listener)
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
        self.begin_handshake(sock, name, received)

    def _make_room(self, listener: socket.socket, error: OSError) -> None:
        """Evicts a pending connection, or pauses the listener, which would stay readable."""
        shortage = os.strerror(error.errno or 0)
        if self._pending:
            self._evict([each for each in self._pending if not each.is_welcome], shortage)
            return
        self.shortage = error
        self._selector.unregister(listener)
        self._paused[listener] = Deadline(PAUSE_SECONDS)
        refusals.note("anybody", f"{shortage}: close some, or raise the limit (ulimit -n)")

    def _resume_listeners(self) -> None:
        for listener in [each for each, rest in self._paused.items() if rest.passed]:
            del self._paused[listener]
            self._selector.register(listener, selectors.EVENT_READ, None)

    def begin_handshake(self, sock: socket.socket, address: str, received: bytes = b"") -> None:
        """Begins the handshake on a connected socket, which the log calls `address`.

        Its first bytes may have been `received` before.
        """
        self._make_place(is_welcome=False)
        sock.setblocking(False)
        with suppress(OSError):  # it is gone again
            self._await(sock, address, self._handshake_with(sock)).received = received

    def _handshake_with(self, sock: socket.socket) -> Handshake:
        return server_handshake(
            sock, self._host, self._job, self._secret, lambda hello: self._check(hello, sock)
        )

    def _await(self, sock: socket.socket, address: str, begun: Handshake) -> Pending:
        try:
            _, wanted = next(begun)
            entry = Pending(sock, address, begun, wanted, Deadline(handshake.HANDSHAKE_TIMEOUT))
            self._selector.register(sock, selectors.EVENT_READ, entry)
        except OSError:
            sock.close()
            raise
        self._pending.append(entry)
        return entry

    def _make_place(self, *, is_welcome: bool) -> None:
        alike = [each for each in self._pending if each.is_welcome == is_welcome]
        if len(alike) >= MAX_PENDING:
            self._evict(alike, "others waited")

    def _evict(self, entries: Sequence[Pending], why: str) -> None:
        """Refuses the oldest of the address that has most of these, or of all if these are none."""
        entries = entries or self._pending
        counts = Counter(entry.address for entry in entries)
        oldest = max(entries, key=lambda entry: counts[entry.address])  # the first of equals
        self._refuse(oldest, f"{why}, and it had not {oldest.missed}")

    def _advance(self, entry: Pending) -> list[Admitted]:
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
        except Refusal as refusal:
            with suppress(OSError):
                entry.sock.sendall(REFUSAL)
            self._refuse(entry, str(refusal))
        except Excluded as error:
            self.excluded = error.hello.source, f"{entry.address}: {error}"
            self._refuse(entry, str(error))
        except OSError as error:
            self._refuse(entry, str(error))
        except StopIteration as proved:
            return self._admit(entry, proved.value)
        return []

    def _admit(self, entry: Pending, proven: Proven) -> list[Admitted]:
        self._forget(entry)
        if entry.is_welcome:
            return [Admitted(proven.hello, entry.sock)]
        try:
            entry.sock.sendall(proven.noise.write(b""))
        except OSError:  # it gave up between its proof and our welcome
            entry.sock.close()
            return []
        always_read = proven.hello.purpose not in OF_CLIENTS_THAT_MAY_STOP
        sock = go_on(entry.sock, proven.noise, proven.cipher, always_read=always_read)
        if not self._request:
            return [Admitted(proven.hello, sock)]
        self._make_place(is_welcome=True)
        sock.setblocking(False)
        self._await(sock, entry.address, request_of(proven, self._request)).is_welcome = True
        return []

    def _refuse(self, entry: Pending, reason: str) -> None:
        self._forget(entry)
        entry.sock.close()
        refusals.note(entry.address, reason)

    def _forget(self, entry: Pending) -> None:
        self._pending.remove(entry)
        self._selector.unregister(entry.sock)


def listen_at(family: socket.AddressFamily, target: Any) -> socket.socket:
    """Listens at an address of this host; raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _accepted(listener: socket.socket) -> tuple[socket.socket, object, bytes]:
    """The next client, its address, and what was read from it; raises OSError."""
    if listener.type != socket.SOCK_SEQPACKET:
        return *listener.accept(), b""
    sock, received = take_handed(listener)
    return sock, sock.getpeername(), received


# Sockets that one process of a host hands over to another: see `shared_port`. A listener has a
# number, and a Unix socket whose name follows from it and from the port.


def open_listener(number: int, port: int) -> socket.socket:
    """Listens for what comes in at this shared port with this number; raises OSError.

    The port is 0 where this process has none, and only hands sockets over to itself.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_name_of(number, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def take_handed(listener: socket.socket) -> tuple[socket.socket, bytes]:
    """A socket that the port's process hands over, and the hello that it has read from it.

    Raises OSError.
    """
    carrier, _ = listener.accept()
    with carrier:
        if peer_uid(carrier) != os.geteuid():
            raise HandshakeError(f"user {peer_uid(carrier)} hands sockets over")
        carrier.settimeout(_HANDED_SECONDS)
        flags = socket.MSG_CMSG_CLOEXEC
        hello, descriptors, message, _ = socket.recv_fds(carrier, HELLO_BYTES, 1, flags)
    if message & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not descriptors:
        raise ConnectionError("the port's process handed nothing over")
    return socket.socket(fileno=descriptors[0]), hello


def hand_to_listener(sock: socket.socket, hello: bytes, port: int) -> bool:
    """Hands a client's socket over to the listener that its hello wants; False where none is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as carrier:
        carrier.setblocking(False)  # a listener whose queue is full is busy: the client comes again
        try:
            carrier.connect(_name_of(listener_in(hello), port))
        except ConnectionRefusedError:
            return False
        if peer_uid(carrier) != os.geteuid():
            return False
        socket.send_fds(carrier, [hello], [sock.fileno()])
    return True


def _name_of(number: int, port: int) -> str:
    """The name of a Unix socket, which all users of the host see, and which hides the number."""
    return f"\0gradwire-listener-{sha256(f'{port} {number}'.encode()).hexdigest()}"


def _name(sock: socket.socket, address: object) -> str:
    if sock.family == socket.AF_UNIX:
        return f"a process of user {peer_uid(sock)}"
    return str(address[0]) if isinstance(address, tuple) else str(address)
