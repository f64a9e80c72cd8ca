"""The members' side of a late join: rank 0 listens for processes that ask to join.

A signed entry in a store says where. The store is the launcher's, which lives as long as the job;
where there is none, it is one that this rank serves, at the address that rank 0 served the
rendezvous at. Who connects proves that it knows the job's secret, as everywhere, and sends
`JOIN_REQUEST`; then the listener asks the communicator for a resize, and keeps the socket until the
leader of a resize takes it. Until it has asked, a joiner stops nobody's
steps.

A thread waits for joiners, and writes the entry: at first, when it changes, and again every ten
seconds. The program's threads do nothing for it, and wait for no store. When the job has come to
its end, the entry says so, and whoever waits is told.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.texts import read_fields
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.authenticator import Authenticator, refusals
from gradwire._bootstrap.endpoints import listen
from gradwire._bootstrap.handshake import HandshakeError, Hello, Purpose, job_digest
from gradwire._bootstrap.job_secret import HOW_TO_MAKE, secret_of_store
from gradwire._bootstrap.mesh import AddressInfo, Mesh, unpack_address_info
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.survivor_links import MessageKind, View, pack_message
from gradwire._bootstrap.through_torch.torch_store import TorchStore, connect_by_url
from gradwire._errors import Error, RendezvousError, describe

# A message of `survivor_links`, so that links between a leader and its joiners carry nothing else.
JOIN_REQUEST = MessageKind.VIEW, View(frozenset({0}))
RENEW_SECONDS = 10.0  # after which the entry is written again

_STORE_SECONDS = 5.0  # in which a store answers
_PAUSE_SECONDS = 0.5  # between two looks at the limits of pending handshakes
_CLOSE_SECONDS = 2.0  # that closing waits for the thread, which may wait for a store
_BACKOFF_SHARE = 19  # pauses are so many times as long as what was lost: 1/20 of the time
_MOST_BACKOFF_SECONDS = 600.0
_LABEL = b"gradwire/1 sign "

_log = logging.getLogger("gradwire")
_open: weakref.WeakSet[JoinListener] = weakref.WeakSet()


@dataclass(frozen=True)
class ListenerEntry:
    """The listener's entry in its store, signed: whoever writes another one there joins nobody.

    HMAC-SHA256(secret, "gradwire/1 sign " ‖ job ‖ fields), in hexadecimal; a blank; fields as JSON
    """

    job: str
    secret: bytes = field(repr=False)  # of the job; it signs, and is not in the entry
    address: AddressInfo
    epoch: int  # of the job: the random number of its start
    membership: int  # the epoch of the communicator
    over: bool = False  # the communicator was closed, and nobody is left to join

    def pack(self) -> bytes:
        """Encodes and signs all fields but the secret."""
        fields = {
            "address": self.address.pack().decode(),
            "epoch": self.epoch,
            "membership": self.membership,
            "over": self.over,
        }
        body = json.dumps(fields).encode()
        return _signature(self.job, self.secret, body) + b" " + body


def unpack_entry(data: bytes, job: str, secret: bytes) -> ListenerEntry:
    """Decodes an entry of the job; raises RendezvousError for anything that it has not signed."""
    signature, _, body = data.partition(b" ")
    if not hmac.compare_digest(signature, _signature(job, secret, body)):
        raise RendezvousError(
            "what the store says of where to join is not signed with the job's secret: another "
            "secret here, or a stranger writes into the store"
        )
    try:
        found = read_fields(body, address=str, epoch=int, membership=int, over=bool)
        address = unpack_address_info(found.pop("address").encode(), 0)
        return ListenerEntry(job, secret, address, **found)
    except ValueError:
        raise RendezvousError(
            "the store does not say where to join: another gradwire version?"
        ) from None


def _signature(job: str, secret: bytes, body: bytes) -> bytes:
    return _core.hmac_sha256(secret, _LABEL + job_digest(job) + body).hex().encode()


def entry_key(job: str) -> str:
    """The key of a job's entry in its store."""
    return f"gradwire/{job}/join_listener"


def secret_key(job: str) -> str:
    """The key of a job's secret in a store on a Unix socket, where the ranks were given none."""
    return f"gradwire/{job}/secret"


class Joiner(NamedTuple):
    """A process that asks to join, by its socket."""

    sock: socket.socket
    number: int  # in the job, as its launcher says; -1: none


class JoinListener:
    """Listens on rank 0 for processes that ask to join, in a thread of its own.

    `resize` hands it on from one communicator to the next.

    `trouble` says why nobody can find it; empty if it can be found.
    """

    def __init__(self, mesh: Mesh, transports: Sequence[str]) -> None:
        """Opens it, with these transports for those who join."""
        self._mesh = mesh
        self._store: str | None = None  # None: the one that the mesh knows
        self._request: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._joiners: list[Joiner] = []  # that have asked
        self._backoff = Backoff()
        self._wants_resize = False  # as soon as it may
        self._server: StoreServer | None = None
        self._renew = Deadline(0.0)  # when it passes, the thread writes the entry
        self._closing = self._over = False
        self._is_first = mesh.membership.epoch == 0  # no entry of others can be later
        self.trouble = ""
        sockets, self._address = listen(tuple(transports), mesh.interface)
        job = mesh.job
        self._authenticator = Authenticator(
            sockets, job.name, job.secret, self._check, pack_message(*JOIN_REQUEST)
        )
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for each in (self._wake, self._authenticator.fileno()):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = AuthenticatingThread(target=self._run, name="gradwire-joins", daemon=True)
        _open.add(self)
        self._thread.start()

    def announce(self, store: str | None = None) -> None:
        """Has the thread write the entry into the store, which it serves itself if nobody does."""
        with self._lock:
            self._store, self._renew = store, Deadline(0.0)
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def serve(self, mesh: Mesh, request: Callable[[], None]) -> None:
        """Goes on for the next communicator, whose job is the same.

        The thread calls `request` when a process asks to join.
        """
        with self._lock:
            changed = mesh.membership.epoch != self._mesh.membership.epoch
            joined = mesh.membership.joined
            self._backoff.note_joined(joined, lost_rank=mesh.size - joined < self._mesh.size)
            self._mesh, self._request = mesh, request
            self._wants_resize = bool(self._joiners)
        if changed:
            self.announce()
        self._request_resize()

    def take(self, most: int) -> list[Joiner]:
        """Hands over up to `most` joiners, in the order in which they asked."""
        with self._lock:
            taken, self._joiners = self._joiners[:most], self._joiners[most:]
            self._backoff.note_taken(len(taken))
        return taken

    def close(self, *, over: bool = False) -> None:
        """Ends the thread, and the connections of all joiners that nobody has taken.

        `over` says that the job has come to its end: then those who wait are told. A thread that
        waits for a store that does not answer ends later.
        """
        if self not in _open:
            return
        _open.discard(self)
        with self._lock:
            self._closing, self._over = True, over
            os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_SECONDS)

    def release_after_fork(self) -> None:
        """Closes the child's copies, so that joiners notice the parent's end."""
        self._release()
        if self._server is not None:
            self._server.release_after_fork()

    def _release(self) -> None:
        self._authenticator.close()
        self._selector.close()
        os.close(self._wake)
        for joiner in self._joiners:
            joiner.sock.close()
        self._joiners.clear()

    def _close_server(self, reason: str) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close(reason)

    def _announce(self) -> None:
        with self._lock:
            due, store = self._renew, self._store or self._mesh.membership.store
        before, self.trouble = self.trouble, ""
        try:
            self._write_entry(store)
        except (Error, OSError) as error:
            self.trouble = f"nobody can find where to join: {describe(error)}"
        if self.trouble and self.trouble != before and not self._over:
            _log.warning("rank %d: %s", self._mesh.rank, self.trouble)
        with self._lock:
            if self._renew is due:  # nothing has changed meanwhile
                self._renew = Deadline(RENEW_SECONDS)

    def _write_entry(self, store: str | None) -> None:
        if store is None:
            raise RendezvousError(
                "this communicator knows no store: give resize(store='tcp://HOST:PORT') with an "
                "address of rank 0's host, or set GRADWIRE_STORE"
            )
        job, membership = self._mesh.job, self._mesh.membership
        fields = (self._address, job.epoch, membership.epoch, self._over)
        entry = ListenerEntry(job.name, job.secret, *fields)
        if store.startswith("torch:"):
            require_given_secret(self._mesh, store)
            torchs = connect_by_url(store, Deadline(_STORE_SECONDS), _STORE_SECONDS)
            self._replace_entry(torchs, entry)
            return
        address = parse_address(store)
        known = secret_of_store(address, membership.secret)
        if not address.local and job.secret != known:
            require_given_secret(self._mesh, store)
        client = self._client_of(address, known)
        if client is None:
            return
        with contextlib.closing(client):
            if address.local and membership.secret is None:  # only this user's processes read it
                client.set(secret_key(job.name), job.secret)
            self._replace_entry(client, entry)

    def _client_of(self, address: Address, secret: bytes) -> StoreClient | None:
        """A client of the store at an address, served here from now on if nobody does.

        None where that is too late.
        """
        job = self._mesh.job.name
        if self._server is not None and self._server.address != address:
            self._close_server("it moves to another store")
        if self._server is None:
            try:
                return StoreClient(address, job, secret, Deadline(_STORE_SECONDS), listens=True)
            except RendezvousError:  # nobody serves it any more
                if self._over:
                    return None
                self._server = StoreServer(address, job, secret).start()
        return StoreClient(self._server.address, job, secret, Deadline(_STORE_SECONDS))

    def _replace_entry(self, store: StoreClient | TorchStore, entry: ListenerEntry) -> None:
        """Writes an entry, unless there is one of a later communicator.

        A rank that was stopped may be late, and the others have left it out meanwhile. Where it
        writes at the very moment in which they do, theirs is renewed. The entry of another start of
        the job, or what an earlier communicator of it has left, counts for nothing; nor does one
        that is not signed with the job's secret.
        """
        found = _entry_in(store, entry.job, entry.secret)
        same_start = found is not None and found.epoch == entry.epoch
        if found and same_start and found.membership > entry.membership and not self._is_first:
            return
        self._is_first = False
        store.set(entry_key(entry.job), entry.pack())

    def _check(self, hello: Hello, _: socket.socket) -> None:
        if hello.purpose != Purpose.JOIN or hello.epoch != self._mesh.job.epoch:
            raise HandshakeError("it does not want to join, or another start of the job")

    def _run(self) -> None:
        while not self._closing:
            survive(self._turn, partial(refusals.note, "the join listener"))
        with self._lock:  # `close` has said all, and needs the eventfd no more
            over = self._over
        if over:
            self._end_job()
        self._release()
        self._close_server("the join listener is closed")

    def _turn(self) -> None:
        if self._renew.passed:
            self._announce()
        pauses = [_PAUSE_SECONDS] if self._authenticator.pending else []
        if self._wants_resize:
            pauses.append(self._backoff.left)
        for key, _ in self._selector.select(min([self._renew.remaining, *pauses])):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
        for hello, sock in self._authenticator.poll(0):
            with self._lock:
                self._joiners.append(Joiner(sock, hello.source))
                self._wants_resize = True
        self._request_resize()

    def _request_resize(self) -> None:
        """Requests a resize, if a process has asked to join, and the backoff is over."""
        with self._lock:
            if not self._wants_resize or self._backoff.left > 0:
                return
            self._wants_resize, request = False, self._request
        with contextlib.suppress(Error):  # the communicator has ended meanwhile
            request()

    def _end_job(self) -> None:
        """Tells all who have asked, or will look for the entry, that nobody is left to join."""
        over = pack_message(MessageKind.OVER, View(frozenset({0})))
        for joiner in self._joiners:
            with contextlib.suppress(OSError):  # it has gone meanwhile
                joiner.sock.send(over)
        self._announce()


class Backoff:
    """A pause in which joiners cannot request a resize, after one fell silent in a resize.

    A silent joiner costs the ranks five seconds. The pause keeps that below 5 % of the time, and
    grows with each silent joiner.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken = 0
        self._seconds, self._until = 0.0, 0.0  # of the last pause

    @property
    def left(self) -> float:
        """Seconds; 0 when joiners may stop the steps again."""
        return max(0.0, self._until - self._clock())

    def note_taken(self, joiners: int) -> None:
        """Starts the clock of a resize that takes so many more joiners."""
        if joiners and not self._taken:
            self._since = self._clock()
        self._taken += joiners

    def note_joined(self, joiners: int, *, lost_rank: bool = False) -> None:
        """Ends a resize in which so many of them joined.

        The time of a resize that lost a rank does not count: it may have waited for that rank.
        """
        taken, self._taken = self._taken, 0
        if lost_rank or not taken:
            return
        grown = max(_BACKOFF_SHARE * (self._clock() - self._since), 2 * self._seconds)
        self._seconds = min(grown, _MOST_BACKOFF_SECONDS) if taken > joiners else 0.0
        self._until = self._clock() + self._seconds


def _entry_in(store: StoreClient | TorchStore, job: str, secret: bytes) -> ListenerEntry | None:
    """The job's entry in a store, which must answer; None if there is none that the job signed."""
    try:
        found = store.get(entry_key(job), 0)
    except TimeoutError:
        return None
    with contextlib.suppress(RendezvousError):
        return unpack_entry(found, job, secret)
    return None


def require_given_secret(mesh: Mesh, store: str) -> None:
    """Raises RendezvousError where the user gave no secret, and others can read the store."""
    if mesh.membership.secret is None:
        raise RendezvousError(
            f"rank {mesh.rank}: whoever joins through the store at {store} needs a secret that is "
            "not in it, since others can read it, and the ranks were given none: "
            f"`{HOW_TO_MAKE}` once, and start all ranks, and whoever joins, with it"
        )


def _release_in_child() -> None:
    for listener in list(_open):
        listener.release_after_fork()
    _open.clear()


os.register_at_fork(after_in_child=_release_in_child)
