"""One TCP port for all listeners of a host (GRADWIRE_PORT).

Each listener has a number, and a Unix socket whose name follows from it. Who connects to the port
begins with a hello, which has the number of the listener that it wants. The process that has the
port reads the hello, and hands the socket over to that listener, which reads the rest: so the port
proves nothing, and knows no secret. Who does not say hello in time is refused as by
`Authenticator`.

The first process that needs the port has it until it ends. Each other one that needs it stays
connected with that one, to see its end and to take the port then.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import (
    BACKLOG,
    Authenticator,
    Pending,
    hand_to_listener,
    listen_at,
    refusals,
)
from gradwire._bootstrap.handshake import (
    HELLO_BYTES,
    NOBODY,
    peer_uid,
)
from gradwire._host.interfaces import Target

_TURN_SECONDS = 1.0  # after which it looks at the limits of silent clients
_AGAIN_SECONDS = 0.5  # after which a process tries again to take a port that is not free
_HOLDER_SECONDS = 5.0  # for the process that has the port to take this one's connection
_PAUSE_SECONDS = 0.01

_log = logging.getLogger("gradwire")
_REST_BYTES = 1024  # what a client may have sent after its hello

_lock = threading.Lock()
_ports: dict[tuple[str, int], _Port] = {}  # that this process has, or will take


def chosen_port() -> int:
    """The port that all listeners of this host share; 0 where each has its own."""
    _, forwarded = environment.place("GRADWIRE_ADVERTISE")
    return int(environment.number("GRADWIRE_PORT") or forwarded)


def advertised_host() -> str:
    """The host at which others reach this one: a name or an address.

    Empty where that is the interface's address; NOWHERE where nobody does.
    """
    return environment.place("GRADWIRE_ADVERTISE")[0]


def advertised_port() -> int:
    """The port there, which a router may forward to another one here; 0 where each has its own."""
    return environment.place("GRADWIRE_ADVERTISE")[1] or chosen_port()


def share(family: socket.AddressFamily, target: Target) -> None:
    """Has a process of this host listen at the address from now on, this one or another.

    Raises OSError where the address is not this host's, or a program has it that does not share.
    """
    with _lock:
        key = str(target[0]), target[1]
        if key not in _ports:
            _ports[key] = _Port(family, target)


class _Port:
    """One address that this process has, or takes as soon as the process ends that has it."""

    def __init__(self, family: socket.AddressFamily, target: Target) -> None:
        self._family, self._target = family, target
        self._name = f"\0gradwire-port-{target[0]}-{target[1]}"
        self._turn_taking = socket.socket()  # the owner's listener, or a connection to it
        self._others: list[socket.socket] = []  # of processes that wait for this one's end
        self._dispatcher: _Dispatcher | None = None
        self._take()
        name = f"gradwire-port-{target[1]}"
        AuthenticatingThread(target=self._run, name=name, daemon=True).start()

    def release_after_fork(self) -> None:
        """Closes the child's copies, so that others notice the parent's end."""
        for each in (self._turn_taking, *self._others):
            each.close()
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _take(self) -> None:
        """Takes the port, or finds the process that has it; raises OSError."""
        try:
            if self._is_first():
                self._dispatcher = _Dispatcher(listen_at(self._family, self._target))
        except OSError:
            self._turn_taking.close()
            raise

    def _is_first(self) -> bool:
        """Whether this process may take the port; else it is connected with the one that has it."""
        limit, pause = Deadline(_HOLDER_SECONDS), threading.Event()
        while not self._take_turn():
            try:
                self._meet_holder()
                return False
            except ConnectionRefusedError:  # it has ended meanwhile, or does not listen yet
                if limit.passed:
                    raise
            pause.wait(_PAUSE_SECONDS)
        return True

    def _take_turn(self) -> bool:
        """Listens for the processes that wait for this one's end; False where another does."""
        self._turn_taking.close()
        self._turn_taking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._turn_taking.bind(self._name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._turn_taking.listen(BACKLOG)
        self._turn_taking.setblocking(False)
        return True

    def _meet_holder(self) -> None:
        """Connects with the process that has the port; raises OSError for another user's."""
        limit = struct.pack("ll", *divmod(int(_HOLDER_SECONDS * 1e6), 10**6))
        self._turn_taking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._turn_taking.connect(self._name)
        if (owner := peer_uid(self._turn_taking)) != os.geteuid():
            raise OSError(
                errno.EADDRINUSE, f"a job of user {owner} has it: choose another GRADWIRE_PORT"
            )

    def _run(self) -> None:
        while True:
            if self._dispatcher is not None:
                survive(self._turn, lambda why: refusals.note("the shared port", why))
                continue
            with suppress(OSError):  # a reset is an end, too
                self._turn_taking.recv(1)
            try:
                self._take()
            except OSError as error:
                _log.warning("cannot listen at %s port %d: %s", *self._target[:2], error)
                threading.Event().wait(_AGAIN_SECONDS)

    def _turn(self) -> None:
        assert self._dispatcher is not None
        self._dispatcher.poll(_TURN_SECONDS)
        self._take_others()

    def _take_others(self) -> None:
        """Keeps the connections of this user's processes, so that their queue is never full."""
        for _ in range(BACKLOG):
            try:
                other, _ = self._turn_taking.accept()
            except OSError:  # nobody waits, or no descriptor is left
                return
            self._others = [each for each in self._others if not _has_ended(each)]
            if peer_uid(other) == os.geteuid():
                self._others.append(other)
            else:
                other.close()


class _Dispatcher(Authenticator):
    """Reads each client's hello, and hands its socket over; it leaves the proof to the listener."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__([listener], "", b"", lambda *_: None)
        self._port = listener.getsockname()[1]

    def _handshake_with(self, _: socket.socket) -> Any:
        def hear() -> Generator[tuple[bytes, int], bytes, bytes]:
            return (yield b"", HELLO_BYTES)

        return hear()

    def _admit(self, entry: Pending, proven: Any) -> list[Any]:
        self._forget(entry)
        with entry.sock, suppress(OSError):  # the client sees the end, and comes again
            if not hand_to_listener(entry.sock, proven, self._port):
                entry.sock.sendall(NOBODY)
                entry.sock.recv(_REST_BYTES)  # unread bytes could end the socket before the answer
        return []


def _has_ended(sock: socket.socket) -> bool:
    """Whether the process at the other end, which says nothing, has closed it; closes it, too."""
    try:
        sock.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    sock.close()
    return True


def _release_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it
    for port in _ports.values():
        port.release_after_fork()
    _ports.clear()


os.register_at_fork(after_in_child=_release_in_child)
