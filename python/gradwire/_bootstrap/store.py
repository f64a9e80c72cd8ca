"""A small key-value store where the ranks meet: bytes under names, and nothing that needs parsing.

The server is one thread; every client authenticates first (`handshake`). Sizes are limited, so that
a wrong client cannot fill the memory.

    request   operation, key length, value length, milliseconds to wait; key; value
    answer    status, value length; value
"""

from __future__ import annotations

import enum
import hashlib
import ipaddress
import math
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gradwire._base.deadline import Deadline
from gradwire._base.shortage import describe_shortage
from gradwire._bootstrap.handshake import (
    HandshakeError,
    Hello,
    Purpose,
    SettingsError,
    client_handshake,
    dial,
    job_digest,
    receive,
)
from gradwire._errors import Error, InvalidArgument, RendezvousError
from gradwire._host.interfaces import Route

MAX_KEY = 512
MAX_VALUE = 1 << 20
MAX_TOTAL = 64 << 20
MAX_LAST_WILL = 4096
NO_RANK = -1  # of a client that takes part in no rendezvous

REQUEST = struct.Struct("<BHII")
ANSWER = struct.Struct("<BI")
_MARGIN = 5.0  # seconds that a client grants the server beyond the wait it asked for
_RETRY = 0.05  # seconds between attempts to reach a store that is not there yet
_ANSWER = 5.0  # seconds that one attempt to connect may take
_NOBODY_LISTENS = (ConnectionRefusedError, FileNotFoundError)  # the second: no file of a socket
_RECONNECT = 1.0  # seconds in which an interrupted rank connects again to report its failure


class Operation(enum.IntEnum):
    """A client's request."""

    SET = 1
    GET = 2
    ADD = 3
    LAST_WILL = 4


class Status(enum.IntEnum):
    """The server's answer."""

    OK = 0
    LATE = 1  # nobody set the key in time
    FULL = 2
    CLOSED = 3  # the host gave up; the value says why


class Address(NamedTuple):
    """tcp://HOST:PORT; unix://NAME in the abstract namespace of this host, or unix:///PATH."""

    scheme: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether this is a Unix socket, which only this host's processes reach."""
        return self.scheme == "unix"

    @property
    def named(self) -> bool:
        """Whether the host is a name, which may mean another address on another host."""
        if self.local or self.host == "localhost":
            return False
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return True
        return False

    @property
    def path(self) -> str:
        """The file of a Unix socket; empty for one in the abstract namespace, and for TCP."""
        return self.host if self.local and self.host.startswith("/") else ""

    def resolve(self) -> list[tuple[socket.AddressFamily, Any]]:
        """Resolves the host to socket addresses, best first; raises OSError for an unknown one."""
        if self.local:
            return [(socket.AF_UNIX, self.path or "\0" + self.host)]
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [(family, target) for family, _, _, _, target in found]


def parse_address(url: str, *, any_port: bool = False) -> Address:
    """Parses a store's URL; raises InvalidArgument for anything else.

    `any_port` is for a server, which takes a free port for 0.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme == "unix" and (parts.netloc or len(parts.path) > 1):
        return Address("unix", parts.netloc + parts.path)
    if parts.scheme == "tcp" and parts.hostname and (port or (any_port and port == 0)):
        return Address("tcp", parts.hostname, port)
    raise InvalidArgument(
        f"store={url!r} is neither tcp://HOST:PORT nor unix://NAME nor unix:///PATH"
    )


def number_of_store(job: str) -> int:
    """The number of a job's store at a shared port, which clients know before they can ask."""
    return int.from_bytes(hashlib.sha256(b"store" + job_digest(job)).digest()[:8], "little")


class StoreClient:
    """A connection to a StoreServer. Any thread may use it; one request is under way at a time.

    `lost_error` makes the error for a server that is gone. The constructor waits until there is a
    server; with `listens` there has been one, and a refused connection means that it is gone. A
    server is lost when it answers `margin` seconds late. Ranks of a rendezvous give their `rank`:
    settings that keep one of them from the store end the rendezvous of all.
    """

    def __init__(
        self,
        address: Address,
        job: str,
        secret: bytes,
        deadline: Deadline,
        lost_error: Callable[[str], Error] = RendezvousError,
        *,
        listens: bool = False,
        margin: float = _MARGIN,
        rank: int = NO_RANK,
    ) -> None:
        self._rank = rank
        self.address, self._lost_error, self._margin = address, lost_error, margin
        self._job, self._secret = job, secret
        self._lock = threading.Lock()
        self._interrupted: list[socket.socket] = []  # on which an answer is still to come
        try:
            self._sock = self._connect(deadline, listens)
        except _NOBODY_LISTENS as error:
            raise lost_error(f"the store at {address} is gone ({error})") from error

    def set(self, key: str, value: bytes) -> None:
        """Stores up to 1 MiB under a key; a later value replaces it."""
        self._ask(Operation.SET, key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a key's value and returns it; raises TimeoutError after `timeout` seconds."""
        return self._ask(Operation.GET, key, b"", timeout)

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter that starts at 0; returns the sum."""
        answer = self._ask(Operation.ADD, key, amount.to_bytes(8, "little", signed=True))
        return int.from_bytes(answer, "little", signed=True)

    def wait(self, keys: Iterable[str], timeout: float) -> None:
        """Returns when all keys are there; raises TimeoutError after `timeout` seconds."""
        deadline = Deadline(timeout)
        for key in keys:
            self.get(key, deadline.remaining)

    def set_last_will(self, key: str, value: bytes) -> None:
        """Asks the server to set a key when this connection ends, unless it has a value by then.

        A later will replaces an earlier one; an empty key withdraws it. The value has up to 4 KiB.
        (MQTT 5.0, sec. 3.1.2.5, "Will Flag", is the same mechanism.)
        """
        self._ask(Operation.LAST_WILL, key, value)

    def wait_closed(self, timeout: float) -> None:
        """Returns when the server has closed the connection, or after `timeout` seconds."""
        self._sock.settimeout(max(Deadline(timeout).seconds, 1e-3))
        try:
            self._sock.recv(1)
        except OSError:
            return

    def gone(self) -> bool:
        """Whether the server has closed the connection."""
        with self._lock:
            poller = select.poll()
            poller.register(self._sock, select.POLLIN | select.POLLRDHUP)
            return bool(poller.poll(0))

    def route(self) -> Route | None:
        """The own and the server's address of the connection; None for a Unix socket."""
        if self.address.local:
            return None
        return Route(str(self._sock.getsockname()[0]), str(self._sock.getpeername()[0]))

    def close(self) -> None:
        """Closes the connection; stored values stay."""
        for sock in (self._sock, *self._interrupted):
            sock.close()

    def _connect(self, deadline: Deadline, listens: bool) -> socket.socket:
        number = number_of_store(self._job)
        hello = Hello(self._job, Purpose.STORE, source=self._rank, listener=number)
        return _connect(self.address, hello, self._secret, deadline, listens)

    def _ask(self, operation: int, key: str, value: bytes, wait: float = 0.0) -> bytes:
        name = key.encode()
        if len(name) > MAX_KEY or len(value) > MAX_VALUE:
            raise InvalidArgument(
                f"a store takes keys to {MAX_KEY} bytes and values to {MAX_VALUE}; "
                f"these have {len(name)} and {len(value)}"
            )
        milliseconds = math.ceil(Deadline(wait).seconds * 1000)
        request = REQUEST.pack(operation, len(name), len(value), milliseconds)
        with self._lock:
            try:
                status, answer = self._exchange(request + name + value, wait + self._margin)
            except OSError as error:
                raise self._lost_error(
                    f"lost the store at {self.address} ({error}): "
                    "the process that hosts it, rank 0 or the launcher, has probably ended"
                ) from error
        if status == Status.LATE:
            raise TimeoutError(f"nobody set {key!r} within {wait:g} s")
        if status == Status.CLOSED:
            why = answer.decode(errors="replace") or "its rendezvous is over"
            raise RendezvousError(
                f"the host of the store at {self.address}, rank 0 or the launcher, gave up: {why}"
            )
        if status == Status.FULL:
            raise RendezvousError(f"the store at {self.address} is full ({MAX_TOTAL} bytes)")
        return answer

    def _exchange(self, request: bytes, seconds: float) -> tuple[Status, bytes]:
        deadline = Deadline(seconds)
        if self._sock in self._interrupted:
            self._sock = self._connect(Deadline(_RECONNECT), listens=True)
        self._sock.settimeout(deadline.seconds)
        try:
            self._sock.sendall(request)
            return receive_answer(self._sock, deadline)
        except BaseException as error:
            # After Ctrl-C or a timeout the answer may still come, to no later request. The socket
            # stays open: if it closed, this rank would count as ended.
            if isinstance(error, TimeoutError) or not isinstance(error, OSError):
                self._interrupted.append(self._sock)
            raise


def receive_answer(sock: socket.socket, deadline: Deadline) -> tuple[Status, bytes]:
    """Receives the server's answer; raises ConnectionError for anything else."""
    status, size = ANSWER.unpack(receive(sock, ANSWER.size, deadline))
    if status not in list(Status) or size > MAX_VALUE:
        raise ConnectionError(f"it answered with status {status} and {size} bytes")
    return Status(status), receive(sock, size, deadline)


def _connect(
    address: Address, hello: Hello, secret: bytes, deadline: Deadline, listens: bool
) -> socket.socket:
    pause = threading.Event()
    turn = 0
    while True:
        try:
            targets = address.resolve()  # all addresses that the host's name stands for, in turn
            sock = dial(*targets[turn % len(targets)], deadline.within(_ANSWER).left)
            return client_handshake(sock, hello, secret, deadline)
        except SettingsError as error:
            raise RendezvousError(f"cannot use the store at {address}: {error}") from error
        except HandshakeError as error:
            raise RendezvousError(f"the store at {address} is not ours: {error}") from error
        except OSError as error:
            if shortage := describe_shortage(error):
                raise RendezvousError(
                    f"cannot connect to the store at {address}: {shortage}"
                ) from error
            if listens and isinstance(error, _NOBODY_LISTENS):
                raise
            if deadline.passed:
                name = f" Does {address.host} mean loopback on rank 0's host? Then give an address."
                raise RendezvousError(
                    f"timed out: could not reach the store at {address} within "
                    f"{deadline.seconds:g} s ({error}): is rank 0 running, and is it "
                    "the same job (GRADWIRE_JOB)? Or give more time with timeout=."
                    + (name if address.named else "")
                ) from error
        turn += 1
        pause.wait(min(_RETRY, deadline.remaining))
