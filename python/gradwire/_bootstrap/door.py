"""The door: where processes that want to join a communicator knock.

The lowest rank listens, and writes into a store where. The store is the launcher's, which lives as
long as the job; where there is none, it is one that this rank serves, at the address that rank 0
served the rendezvous at. Who connects proves that it knows the job's secret, as everywhere, and
knocks (`waiting_room`); then the door asks the communicator for a resize, and keeps the socket
until a sponsor takes it.

A thread waits for guests, and writes the sign: at first, when it changes, and again every ten
seconds. Nothing else happens while nobody knocks: the program's threads do nothing for it, and wait
for no store. When the job has come to its end, the sign says so, and whoever waits is told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

from gradwire._base.deadline import Deadline
from gradwire._base.loops import survive
from gradwire._base.threads import AuthenticatingThread
from gradwire._bootstrap.connect import listen
from gradwire._bootstrap.handshake import (
    Authenticator,
    HandshakeError,
    Hello,
    Purpose,
    refusals,
)
from gradwire._bootstrap.job_secret import HOW_TO_MAKE, secret_of_store
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.sign import Sign, key_of, secret_key_of, unpack_sign
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.survivor_links import MessageKind, View, pack_message
from gradwire._bootstrap.through_torch.torch_store import TorchStore
from gradwire._bootstrap.waiting_room import Guest, Quiet, WaitingRoom
from gradwire._errors import Error, InvalidArgument, RendezvousError, describe

_STORE_SECONDS = 5.0  # in which a store answers
RENEW_SECONDS = 10.0  # after which the sign is written again
_PAUSE_SECONDS = 0.5  # between two looks at the limits of pending handshakes
_CLOSE_SECONDS = 2.0  # that closing waits for the thread, which may wait for a store

_log = logging.getLogger("gradwire")
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


class Door:
    """The door of one communicator after the other, on its lowest rank.

    `trouble` says why nobody can find it; empty if it can be found.
    """

    def __init__(
        self,
        mesh: Mesh,
        transports: Sequence[str],
        store: str | None,
        request: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens it. `request` is called when somebody has knocked, on the door's thread."""
        self._mesh, self._request, self._store = mesh, request, store
        self._lock = threading.Lock()
        self._guests: list[Guest] = []  # that have knocked
        self._quiet = Quiet()
        self._asks = False  # for a resize, as soon as it may
        self._server: StoreServer | None = None
        self._renew = Deadline(0.0)  # at which the sign is to be written again; passed: it is not
        self._closing = self._over = False
        self._is_first = mesh.membership.epoch == 0  # no sign of others can be later
        self.trouble = ""
        listeners, self._address = listen(tuple(transports), mesh.interface)
        job = mesh.job
        self._authenticator = Authenticator(listeners, job.name, job.secret, self._check)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._authenticator.fileno(), selectors.EVENT_READ)
        self._waiting = WaitingRoom()
        self._selector.register(self._waiting.fileno(), selectors.EVENT_READ)
        self._thread = AuthenticatingThread(target=self._run, name="gradwire-door", daemon=True)
        _doors.add(self)
        self._thread.start()

    def announce(self, store: str | None = None) -> None:
        """Has the thread write into the store where the door is; it serves one if there is none."""
        with self._lock:
            self._store, self._renew = store, Deadline(0.0)
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def serve(self, mesh: Mesh, request: Callable[[], None]) -> None:
        """Goes on for the next communicator, whose job is the same."""
        with self._lock:
            changed = mesh.membership.epoch != self._mesh.membership.epoch
            joined = mesh.membership.joined
            self._quiet.note_joined(joined, lost_rank=mesh.size - joined < self._mesh.size)
            self._mesh, self._request = mesh, request
            self._asks = bool(self._guests)
        if changed:
            self.announce()
        self._ask()

    def take(self, most: int) -> list[Guest]:
        """Gives away up to `most` guests, in the order in which they knocked."""
        with self._lock:
            taken, self._guests = self._guests[:most], self._guests[most:]
            self._quiet.note_taken(len(taken))
        return taken

    def close(self, *, over: bool = False) -> None:
        """Ends the thread, and all connections of guests that nobody has taken.

        `over` says that the job has come to its end: then those who wait are told. A thread that
        waits for a store that does not answer ends later.
        """
        if self not in _doors:
            return
        _doors.discard(self)
        with self._lock:
            self._closing, self._over = True, over
            os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_SECONDS)

    def release_after_fork(self) -> None:
        """Closes the child's copies, so that guests notice the parent's end."""
        self._release()
        if self._server is not None:
            self._server.release_after_fork()

    def _release(self) -> None:
        self._authenticator.close()
        self._waiting.close()
        self._selector.close()
        os.close(self._wake)
        for guest in self._guests:
            guest.sock.close()
        self._guests.clear()

    def _close_server(self, reason: str) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close(reason)

    def _announce(self) -> None:
        with self._lock:
            due, store = self._renew, self._store or self._mesh.membership.store
        before, self.trouble = self.trouble, ""
        try:
            self._write_sign(store)
        except (Error, OSError) as error:
            self.trouble = f"nobody can find where to join: {describe(error)}"
        if self.trouble and self.trouble != before and not self._over:
            _log.warning("rank %d: %s", self._mesh.rank, self.trouble)
        with self._lock:
            if self._renew is due:  # nothing has changed meanwhile
                self._renew = Deadline(RENEW_SECONDS)

    def _write_sign(self, store: str | None) -> None:
        if store is None:
            raise RendezvousError(
                "this communicator knows no store: give resize(store='tcp://HOST:PORT') with an "
                "address of rank 0's host, or set GRADWIRE_STORE"
            )
        job, membership = self._mesh.job, self._mesh.membership
        sign = Sign(job.name, job.secret, self._address, job.epoch, membership.epoch, self._over)
        if store.startswith("torch:"):
            require_given_secret(self._mesh, store)
            self._replace_sign(torch_store(store, Deadline(_STORE_SECONDS), _STORE_SECONDS), sign)
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
                client.set(secret_key_of(job.name), job.secret)
            self._replace_sign(client, sign)

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

    def _replace_sign(self, store: StoreClient | TorchStore, sign: Sign) -> None:
        """Writes a sign, unless there is one of a later communicator.

        A rank that was stopped may be late, and the others have left it out meanwhile. Where it
        writes at the very moment in which they do, the sign is renewed. The sign of another start
        of the job, or what an earlier communicator of it has left, counts for nothing; nor does one
        that is not signed with the job's secret.
        """
        found = _sign_in(store, sign.job, sign.secret)
        same_start = found is not None and found.epoch == sign.epoch
        if found and same_start and found.membership > sign.membership and not self._is_first:
            return
        self._is_first = False
        store.set(key_of(sign.job), sign.pack())

    def _check(self, hello: Hello, _: socket.socket) -> None:
        if hello.purpose != Purpose.JOIN or hello.epoch != self._mesh.job.epoch:
            raise HandshakeError("it does not want to join, or another start of the job")

    def _run(self) -> None:
        while not self._closing:
            survive(self._turn, partial(refusals.note, "the door for those who join"))
        with self._lock:  # `close` has said all, and needs the eventfd no more
            over = self._over
        if over:
            self._end_job()
        self._release()
        self._close_server("the door is closed")

    def _turn(self) -> None:
        if self._renew.passed:
            self._announce()
        busy = self._authenticator.pending or self._waiting.count
        pauses = [_PAUSE_SECONDS] if busy else []
        if self._asks:
            pauses.append(self._quiet.left)
        for key, _ in self._selector.select(min([self._renew.remaining, *pauses])):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
        self._admit()
        self._ask()

    def _admit(self) -> None:
        for admitted in self._authenticator.poll(0):
            self._waiting.add(admitted)
        for guest in self._waiting.poll():
            with self._lock:
                self._guests.append(guest)
                self._asks = True

    def _ask(self) -> None:
        """Asks for a resize, if somebody has knocked, and it need not wait for that any longer."""
        with self._lock:
            if not self._asks or self._quiet.left > 0:
                return
            self._asks, request = False, self._request
        with contextlib.suppress(Error):  # the communicator has ended meanwhile
            request()

    def _end_job(self) -> None:
        """Tells all who wait at the door, or will look for it, that nobody is left to join."""
        over = pack_message(MessageKind.OVER, View(frozenset({0})))
        for guest in self._guests:
            guest.sock.setblocking(False)
            with contextlib.suppress(OSError):  # it has gone meanwhile
                guest.sock.send(over)
        self._announce()


def _sign_in(store: StoreClient | TorchStore, job: str, secret: bytes) -> Sign | None:
    """The job's sign in a store, which must answer; None if there is none that the job signed."""
    try:
        found = store.get(key_of(job), 0)
    except TimeoutError:
        return None
    with contextlib.suppress(RendezvousError):
        return unpack_sign(found, job, secret)
    return None


def require_given_secret(mesh: Mesh, store: str) -> None:
    """Raises RendezvousError where the user gave no secret, and others can read the store."""
    if mesh.membership.secret is None:
        raise RendezvousError(
            f"rank {mesh.rank}: whoever joins through the store at {store} needs a secret that is "
            "not in it, since others can read it, and the ranks were given none: "
            f"`{HOW_TO_MAKE}` once, and start all ranks, and whoever joins, with it"
        )


def torch_store(store: str, deadline: Deadline, answer: float) -> TorchStore:
    """A client of torch's store at torch://HOST:PORT, which another process serves."""
    return TorchStore(*parse_torch_address(store), 1, 2, deadline, answer)


def parse_torch_address(store: str) -> tuple[str, int]:
    """The host and port in torch://HOST:PORT; raises InvalidArgument for anything else."""
    try:
        parts = urlsplit(store)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise InvalidArgument(f"store={store!r} is not torch://HOST:PORT")
    return host, port


@contextlib.contextmanager
def reader_of(
    store: str, job: str, secret: bytes | None, deadline: Deadline, answer: float
) -> Iterator[Reader]:
    """A function that waits for the value of a key in a store.

    Raises RendezvousError without a secret that the store needs. So does the function when the
    store is lost, or says nothing for `answer` seconds.
    """
    if store.startswith("torch:"):
        if secret is None:
            raise RendezvousError(
                f"join() needs the job's secret, which is not in the store at {store}, since "
                "others can read it: give secret=, or set GRADWIRE_SECRET to that of the ranks"
            )
        yield torch_store(store, deadline, answer).get
        return
    address = parse_address(store)
    known = secret_of_store(address, secret)
    client = StoreClient(address, job, known, deadline, margin=answer)
    with contextlib.closing(client):
        yield client.get


Reader = Callable[[str, float], bytes]  # of a key, within so many seconds: see StoreClient.get


def _let_go_in_child() -> None:
    for door in list(_doors):
        door.release_after_fork()
    _doors.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
