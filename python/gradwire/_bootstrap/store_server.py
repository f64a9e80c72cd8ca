"""The store's server: one thread for as many clients as there are ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import socket
import stat
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import Authenticator, listen_at, open_listener, refusals
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose
from gradwire._bootstrap.shared_port import chosen_port, share
from gradwire._bootstrap.store import (
    ANSWER,
    MAX_KEY,
    MAX_LAST_WILL,
    MAX_TOTAL,
    MAX_VALUE,
    NO_RANK,
    REQUEST,
    Address,
    Operation,
    Status,
    number_of_store,
)
from gradwire._errors import RendezvousError, describe

_ENTRY_BYTES = 128  # that a key costs beside its text and its value
_COUNTER = 8  # bytes
_PART = 1 << 16  # bytes that are read at a time
_LOCK_SECONDS = 5.0  # for the lock of a folder, which another server holds for milliseconds
_PAUSE_SECONDS = 0.02  # between two attempts to get it


class _Client:
    """One authenticated connection, as the server sees it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.waits_for: tuple[str, Deadline] | None = None
        self.last_will: tuple[str, bytes] | None = None


class _Invalid(Exception):
    """A client broke the protocol or a limit."""


def _sum_of(counter: bytes, amount: bytes) -> bytes:
    """Adds two's complement numbers, which wrap."""
    if len(counter) != _COUNTER or len(amount) != _COUNTER:
        raise _Invalid
    total = int.from_bytes(counter, "little") + int.from_bytes(amount, "little")
    return (total % (1 << 8 * _COUNTER)).to_bytes(_COUNTER, "little")


class StoreServer:
    """A store that a thread of its own serves between start() and close().

    The server listens from construction on, so that a process forked in between finds it. Port 0
    takes a free port, see `address`. The server listens at every own address that the host's name
    stands for, and at those in `also`. With `one_rendezvous` a rank whose settings exclude the
    server's ends all waits, with that reason; else the rank alone learns of it.
    """

    def __init__(
        self,
        address: Address,
        job: str,
        secret: bytes,
        also: Sequence[Address] = (),
        *,
        one_rendezvous: bool = False,
    ) -> None:
        self._values: dict[str, bytes] = {}
        self._total = 0
        self._waiting: dict[str, list[_Client]] = defaultdict(list)
        self._clients: set[_Client] = set()
        self._departed = threading.Condition()
        self._closing = False
        self._one_rendezvous, self._is_over = one_rendezvous, False
        self._reason = b""
        listeners = _listen([address, *also], number_of_store(job))
        self.address = _bound(address, listeners[0])
        self._made_by = os.getpid()  # the only process that removes the socket's file
        self._authenticator = Authenticator(listeners, job, secret, self._check)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = AuthenticatingThread(target=self._run, name="gradwire-store", daemon=True)

    def start(self) -> StoreServer:
        """Begins to serve; returns itself."""
        self._thread.start()
        return self

    def await_departures(self, timeout: float) -> None:
        """Returns when no client is left, or after `timeout` seconds."""
        with self._departed:
            self._departed.wait_for(lambda: not self._clients, timeout)

    def close(self, reason: str = "") -> None:
        """Stops listening, tells waiting clients the reason, and ends all connections."""
        self._reason = reason.encode()[:MAX_VALUE]
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        if self.address.path and self._made_by == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)
        self.release_after_fork()

    def release_after_fork(self) -> None:
        """Closes the copies of a forked child, in which no thread serves."""
        self._authenticator.close()
        for client in self._clients:
            client.sock.close()
        self._selector.close()
        os.close(self._wake)

    def __enter__(self) -> StoreServer:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close("" if error is None else describe(error))

    def _check(self, hello: Hello, _: socket.socket) -> None:
        if hello.purpose != Purpose.STORE:
            raise HandshakeError("this is the store, and the client wants something else")

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._authenticator.fileno(), selectors.EVENT_READ)
        while not self._closing:
            survive(self._turn, partial(refusals.note, "the store"))
        self._refuse_waiting()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._pause()):
            if key.fileobj == self._wake:
                self._closing = True
                return
            if key.data is not None:
                self._handle(key.data)
        for admitted in self._authenticator.poll(0):
            self._add_client(_Client(admitted.sock))
        self._end_if_excluded()
        self._expire()

    def _end_if_excluded(self) -> None:
        rank, why = self._authenticator.excluded or (NO_RANK, "")
        if self._one_rendezvous and rank != NO_RANK and not self._is_over:
            self._is_over = True
            self._reason = f"it cannot admit rank {rank} at {why}".encode()
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        for client in list(self._clients):
            if client.waits_for:
                self._stop_waiting(client)
                self._release(client, Status.CLOSED, self._reason)

    def _pause(self) -> float | None:
        limits = [client.waits_for[1].remaining for client in self._clients if client.waits_for]
        if self._authenticator.pending:
            limits.append(0.5)
        return min(limits) if limits else None

    def _add_client(self, client: _Client) -> None:
        try:
            self._selector.register(client.sock, selectors.EVENT_READ, client)
        except OSError:
            client.sock.close()
            raise
        self._clients.add(client)

    def _drop(self, client: _Client) -> None:
        self._stop_waiting(client)
        with self._departed:
            self._clients.remove(client)
            self._departed.notify_all()
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.last_will and client.last_will[0] not in self._values:
            self._put(*client.last_will)

    def _handle(self, client: _Client) -> None:
        try:
            self._read(client)
            self._flush(client)
            # One answer at a time: a client that never reads cannot fill the memory.
            while not client.waits_for and not client.outbox and self._serve(client):
                self._flush(client)
        except (OSError, _Invalid):
            if client in self._clients:
                self._drop(client)

    def _read(self, client: _Client) -> None:
        try:
            part = client.sock.recv(_PART)
        except BlockingIOError:
            return
        if not part or len(client.inbox) > MAX_KEY + 2 * MAX_VALUE:
            raise _Invalid
        client.inbox += part

    def _serve(self, client: _Client) -> bool:
        """Executes the first request in the inbox; returns whether there was a whole one."""
        if len(client.inbox) < REQUEST.size:
            return False
        operation, key_size, value_size, milliseconds = REQUEST.unpack_from(client.inbox)
        if key_size > MAX_KEY or value_size > MAX_VALUE:
            raise _Invalid
        middle = REQUEST.size + key_size
        if len(client.inbox) < middle + value_size:
            return False
        key = client.inbox[REQUEST.size : middle].decode(errors="replace")
        value = bytes(client.inbox[middle : middle + value_size])
        del client.inbox[: middle + value_size]
        self._execute(client, operation, key, value, milliseconds / 1000)
        return True

    def _execute(
        self, client: _Client, operation: int, key: str, value: bytes, wait: float
    ) -> None:
        if operation == Operation.SET:
            self._answer(client, self._put(key, value))
        elif operation == Operation.ADD:
            total = _sum_of(self._values.get(key, bytes(_COUNTER)), value)
            self._answer(client, self._put(key, total), total)
        elif operation == Operation.GET and key in self._values:
            self._answer(client, Status.OK, self._values[key])
        elif operation == Operation.GET and self._is_over:
            self._answer(client, Status.CLOSED, self._reason)
        elif operation == Operation.GET:
            client.waits_for = (key, Deadline(wait))
            self._waiting[key].append(client)
        elif operation == Operation.LAST_WILL and len(value) <= MAX_LAST_WILL:
            client.last_will = (key, value) if key else None
            self._answer(client, Status.OK)
        else:
            raise _Invalid

    def _put(self, key: str, value: bytes) -> int:
        growth = len(value) - len(self._values.get(key, b""))
        if key not in self._values:
            growth += len(key) + _ENTRY_BYTES
        if self._total + growth > MAX_TOTAL:
            return Status.FULL
        self._total += growth
        self._values[key] = value
        for client in self._waiting.pop(key, []):
            self._release(client, Status.OK, value)
        return Status.OK

    def _release(self, client: _Client, status: int, value: bytes = b"") -> None:
        client.waits_for = None
        self._answer(client, status, value)
        try:
            self._flush(client)
        except OSError:
            self._drop(client)

    def _answer(self, client: _Client, status: int, value: bytes = b"") -> None:
        client.outbox += ANSWER.pack(status, len(value)) + value

    def _flush(self, client: _Client) -> None:
        if client.outbox:
            with contextlib.suppress(BlockingIOError):
                del client.outbox[: client.sock.send(client.outbox)]
        events = selectors.EVENT_READ
        if client.outbox:
            events |= selectors.EVENT_WRITE
        self._selector.modify(client.sock, events, client)

    def _expire(self) -> None:
        for client in list(self._clients):
            if client.waits_for and client.waits_for[1].passed:
                self._stop_waiting(client)
                self._release(client, Status.LATE)

    def _stop_waiting(self, client: _Client) -> None:
        if client.waits_for:
            key = client.waits_for[0]
            self._waiting[key].remove(client)
            if not self._waiting[key]:
                del self._waiting[key]


def _listen(addresses: Sequence[Address], number: int = 0) -> list[socket.socket]:
    """Listens at all addresses that are this host's; with this number where others share them.

    Raises RendezvousError when none is, or a port is taken.
    """
    listeners: list[socket.socket] = []
    shared = False
    try:
        found = [each for address in addresses for each in address.resolve()]
        for family, target in dict.fromkeys(found):
            try:
                if family != socket.AF_UNIX and target[1] and target[1] == chosen_port():
                    share(family, target)
                    shared = True
                else:
                    listeners.append(_listen_at(family, target))
            except OSError as error:
                none = (family, target) == found[-1] and not (listeners or shared)
                if none or error.errno != errno.EADDRNOTAVAIL:
                    raise
        if shared:
            listeners.append(open_listener(number, chosen_port()))
    except OSError as error:
        for listener in listeners:
            listener.close()
        remedy = "name rank 0's own host and a port that is free there"
        if addresses[0].local:
            remedy = "give another name, or a path in a folder of this user's own"
        raise RendezvousError(
            f"rank 0 cannot host the store at {addresses[0]} ({error}): {remedy}"
        ) from error
    return listeners


def _listen_at(family: socket.AddressFamily, target: Any) -> socket.socket:
    with _without_leftover(family, target):
        return listen_at(family, target)


@contextlib.contextmanager
def _without_leftover(family: socket.AddressFamily, target: Any) -> Iterator[None]:
    """Removes a socket's file that a killed server has left; meanwhile no other server does so."""
    if family != socket.AF_UNIX or target.startswith("\0"):
        yield
        return
    folder = os.open(os.path.dirname(target), os.O_DIRECTORY)
    try:
        _lock(folder, os.path.dirname(target))
        if _is_leftover(target):
            os.unlink(target)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, name: str) -> None:
    """Locks a folder; raises TimeoutError, since whoever can open it may hold the lock for ever."""
    deadline, pause = Deadline(_LOCK_SECONDS), threading.Event()
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline.passed:
                raise TimeoutError(
                    f"another process has locked the folder {name} for {deadline.seconds:g} s"
                ) from None
        pause.wait(_PAUSE_SECONDS)


def _is_leftover(path: str) -> bool:
    """Whether this is a socket at which nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return stat.S_ISSOCK(os.lstat(path).st_mode)
        except OSError:
            return False
    return False


def _bound(address: Address, listener: socket.socket) -> Address:
    if address.local or address.port:
        return address
    return address._replace(port=listener.getsockname()[1])
