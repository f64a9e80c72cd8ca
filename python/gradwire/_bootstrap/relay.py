"""Ranks of which neither reaches the other meet at a relay: a rank's host with a shared port.

A rank that waits for others registers at the relay, by a socket that proves that it belongs to the
job. The relay then listens for it, with the number of its listener, at the shared port:

    connecting   dials the relay's port with the hello that is for the other rank
    relay        keeps that socket, and sends the registered rank a number of 64 bits for it
    registered   dials the relay's port with a hello of which only that number counts
    relay        passes the bytes of the two sockets on to each other, hello first

The two ranks then prove themselves to each other and seal what they send, as on any socket: so the
relay reads nothing of it, and can only end or delay it. Nobody can guess the two numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from functools import partial

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import (
    Authenticator,
    hand_to_listener,
    open_listener,
    refusals,
    take_handed,
)
from gradwire._bootstrap.handshake import (
    HANDSHAKE_TIMEOUT,
    HELLO_BYTES,
    WELCOME_BYTES,
    HandshakeError,
    Hello,
    Purpose,
    client_handshake,
    job_digest,
    purpose_in,
    receive,
)
from gradwire._bootstrap.mesh import Job
from gradwire._bootstrap.shared_port import chosen_port
from gradwire._host.keepalive import fail_with_host

_NUMBER = struct.Struct("<Q")
# Little: bytes that wait here lengthen the way of those behind them, for which a pair that sums may
# have to wait before it sends more.
_PIPE_BYTES = 1 << 16
_MOST_NOT_SENT = 1 << 17  # of what a socket has taken
_F_SETPIPE_SZ = 1031
_TURN_SECONDS = 1.0
_AGAIN_SECONDS = 0.1  # after which a rank tries again to register
_MOST_WAITING = 256  # sockets that wait for their second ones; more would be strangers'

_LINGER_SECONDS = 2.0  # in which ranks may still say goodbye when the relay's process ends

Dial = Callable[[Deadline], socket.socket]  # connects to a relay's port; raises OSError

_log = logging.getLogger("gradwire")
_relays: dict[int, Relay] = {}  # of this process
_lock = threading.Lock()  # for the above
_passing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # that a forked child must not keep


def number_of_relay(job: Job) -> int:
    """The number of a job's relays at the ports of their hosts, which strangers cannot guess."""
    text = b"gradwire/1 relay" + job_digest(job.name) + job.epoch.to_bytes(4, "little")
    return int.from_bytes(_core.hmac_sha256(job.secret, text)[:8], "little")


def serve(job: Job) -> None:
    """Relays for ranks of the job from now on, unless another process of this host does.

    It ends when this process needs the job no longer, and no bytes of other ranks pass.
    """
    number, port = number_of_relay(job), chosen_port()
    with _lock:
        try:
            if number not in _relays:
                _relays[number] = Relay(job, open_listener(number, port), port)
            elif all(each() is not job for each in _relays[number].jobs):
                _relays[number].jobs.append(weakref.ref(job))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                _log.warning("cannot relay for ranks that do not reach each other: %s", error)


class Relay:
    """Passes bytes on between ranks of a job, in threads of its own."""

    def __init__(self, job: Job, listener: socket.socket, port: int) -> None:
        self._number, self._port = number_of_relay(job), port
        self.jobs: list[weakref.ref[Job]] = [weakref.ref(job)]  # all equal, for which it relays
        self._threads: set[threading.Thread] = set()
        self._authenticator = Authenticator([listener], job.name, job.secret, self._check)
        _sockets.add(listener)
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        AuthenticatingThread(target=self._run, name="gradwire-relay", daemon=True).start()

    def _check(self, hello: Hello, _: socket.socket) -> None:
        if hello.purpose != Purpose.RELAY:
            raise HandshakeError("this is a relay, and it wants something else")

    def _run(self) -> None:
        while not self._has_ended():
            survive(self._turn, partial(refusals.note, "the relay"))

    def _has_ended(self) -> bool:
        for each in list(self._threads):
            if not each.is_alive():
                self._threads.discard(each)
        with _lock:
            self.jobs = [each for each in self.jobs if each() is not None]
            if self.jobs or self._threads:
                return False
            _relays.pop(self._number, None)
            self._authenticator.close()
            return True

    def _turn(self) -> None:
        for _, sock in self._authenticator.poll(_TURN_SECONDS):
            self._threads.add(_start(self._serve, sock))

    def _serve(self, registered: socket.socket) -> None:
        """Listens for a rank until its socket ends."""
        with registered, contextlib.suppress(OSError):
            packed = receive(registered, _NUMBER.size, Deadline(HANDSHAKE_TIMEOUT))
            (number,) = _NUMBER.unpack(packed)
            with open_listener(number, self._port) as listener:
                _sockets.update((registered, listener))
                while registered not in (ready := _ready(registered, listener)):
                    if ready and self._waiting.acquire(timeout=_AGAIN_SECONDS):
                        self._announce(registered, listener)

    def _announce(self, registered: socket.socket, listener: socket.socket) -> None:
        """Tells a registered rank of who wants to connect to it."""
        second = secrets.randbits(64)
        with contextlib.ExitStack() as stack:
            stack.callback(self._waiting.release)
            try:
                sock, hello = take_handed(listener)
                stack.enter_context(sock)
                waits = stack.enter_context(open_listener(second, self._port))
                self._threads.add(_start(self._meet, waits, sock, hello))
            except (OSError, RuntimeError) as error:  # which no thread is left raises
                refusals.note("the relay", str(error))
                return
            stack.pop_all()  # the thread's
        registered.sendall(_NUMBER.pack(second))

    def _meet(self, waits: socket.socket, sock: socket.socket, hello: bytes) -> None:
        """Passes on what two sockets say, once the second one has come."""
        with sock, contextlib.suppress(OSError):
            try:
                with waits:
                    other = _second(waits)
            finally:
                self._waiting.release()
            with other:
                pass_on(sock, other, hello)


def _second(waits: socket.socket) -> socket.socket:
    """What this user's process hands over within 5 s, whatever others do; raises OSError."""
    limit = Deadline(HANDSHAKE_TIMEOUT)
    while True:
        waits.settimeout(limit.left)
        with contextlib.suppress(HandshakeError):
            return take_handed(waits)[0]


def pass_on(sock: socket.socket, other: socket.socket, first: bytes) -> None:
    """Passes bytes on in both directions, until both have ended; `first` go to the other before."""
    always_read = purpose_in(first) == Purpose.CONTROL
    for each in (sock, other):
        _sockets.add(each)
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_NOT_SENT)
        fail_with_host(each, always_read=always_read)
    other.sendall(first)
    # Who did not get as far as the welcome is a stranger, and may never end the socket.
    back = _start(_pump, other, sock, WELCOME_BYTES)
    _passing.add(back)
    _pump(sock, other)
    back.join()


def _linger() -> None:
    """Lets pairs finish that end at the same time as this process."""
    limit = Deadline(_LINGER_SECONDS)
    for thread in list(_passing):
        thread.join(limit.remaining)


def _pump(source: socket.socket, target: socket.socket, least: int = 0) -> None:
    """Passes bytes on until the source ends, and then ends the target.

    A reset ends both, as does the source's end after fewer than `least` bytes.
    """
    reading, writing = os.pipe()
    passed = 0
    try:
        with contextlib.suppress(OSError):  # it stays smaller
            fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
        while count := os.splice(source.fileno(), writing, _PIPE_BYTES):
            passed += count
            while count:
                count -= os.splice(reading, target.fileno(), count)
        if passed < least:
            raise ConnectionAbortedError
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(reading)
        os.close(writing)


class Registration:
    """A rank's registration at a relay, in a thread of its own, until it is closed.

    What comes by the relay is handed to the listener of this number, as what comes in at a port.
    """

    def __init__(self, job: Job, rank: int, dial: Dial, number: int) -> None:
        self._job, self._rank, self._dial, self._number = job, rank, dial, number
        self._port = chosen_port()
        self._closed = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = _start(self._run)

    def close(self) -> None:
        """Ends it; sockets that came by the relay stay."""
        self._closed.set()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_TURN_SECONDS)  # it may wait for a relay that does not answer

    def _run(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # the relay is not there yet, or has ended
                self._register()
            self._closed.wait(_AGAIN_SECONDS)

    def _register(self) -> None:
        limit = Deadline(HANDSHAKE_TIMEOUT)
        to = {"epoch": self._job.epoch, "listener": number_of_relay(self._job)}
        hello = Hello(self._job.name, Purpose.RELAY, source=self._rank, **to)
        with client_handshake(self._dial(limit), hello, self._job.secret, limit) as self._sock:
            self._sock.sendall(_NUMBER.pack(self._number))
            while not self._closed.is_set():
                if self._sock in _ready(self._sock):
                    number = receive(self._sock, _NUMBER.size, Deadline(HANDSHAKE_TIMEOUT))
                    self._fetch(*_NUMBER.unpack(number))

    def _fetch(self, number: int) -> None:
        """Connects to the relay for who wants to connect to this rank."""
        limit = Deadline(HANDSHAKE_TIMEOUT)
        with contextlib.suppress(OSError), self._dial(limit) as sock:
            sock.sendall(Hello(self._job.name, Purpose.RELAY, listener=number).pack())
            hand_to_listener(sock, receive(sock, HELLO_BYTES, limit), self._port)


def _ready(*sockets: socket.socket) -> list[socket.socket]:
    """Those that have something to read, or have ended; waits for a second."""
    poller = select.poll()
    for each in sockets:
        poller.register(each, select.POLLIN)
    found = {number for number, _ in poller.poll(_TURN_SECONDS * 1000)}
    return [each for each in sockets if each.fileno() in found]


def _start(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = AuthenticatingThread(target=target, args=args, name="gradwire-relay", daemon=True)
    thread.start()
    return thread


def _release_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it
    for sock in list(_sockets):
        sock.close()
    _relays.clear()
    _passing.clear()


os.register_at_fork(after_in_child=_release_in_child)
atexit.register(_linger)
