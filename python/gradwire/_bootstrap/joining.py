"""The joiner's side of a late join: a process asks the members of a communicator to let it in.

It finds their listener in a store, connects, asks, and waits until they resize. What it then does
the leader of the resize tells it, by JSON in the messages of `survivor_links`:

    leader  INVITE   Invitation                        joiner  ADDRESS  Addresses: its own
    leader  ADDRESS  Addresses: those of all members   joiner  READY    once it is connected
    leader  DONE     it is in                          joiner  DONE     it knows

Each message has the view of its attempt; a new INVITE begins another attempt. When the link ends
before the joiner is in, the joiner asks again, until its time is over. Members do not train while
they connect to it: after attempts that failed it waits for as long as all of them took before it
asks again. When the members have closed their communicator, they say so, and the joiner gives up,
unless some of them go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import NoneType
from typing import Generic

from gradwire._base.deadline import Deadline
from gradwire._base.shortage import raise_limit
from gradwire._base.texts import read_fields
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.endpoints import open_socket
from gradwire._bootstrap.handshake import Hello, Purpose, SettingsError, client_handshake
from gradwire._bootstrap.job_secret import secret_of_store
from gradwire._bootstrap.join_listener import (
    JOIN_REQUEST,
    RENEW_SECONDS,
    ListenerEntry,
    entry_key,
    secret_key,
    unpack_entry,
)
from gradwire._bootstrap.mesh import NOWHERE, AddressInfo, Job, Membership, Mesh
from gradwire._bootstrap.shrink import Made
from gradwire._bootstrap.store import StoreClient, parse_address
from gradwire._bootstrap.survivor_links import (
    MAX_NUMBER,
    MOST_RANKS,
    LinkEnded,
    Message,
    MessageKind,
    SurvivorLinks,
    View,
    unpack_addresses,
)
from gradwire._bootstrap.through_torch.torch_store import connect_by_url
from gradwire._errors import Error, JobOver, RendezvousError, describe
from gradwire._host.identity import host_identity
from gradwire._host.interfaces import Choice, choose, is_loopback, loopback, route_to
from gradwire._model import unpack

_LEADER = MOST_RANKS  # its number as a peer
_PAUSE_SECONDS = 0.05  # before it asks again
_MOST_PAUSE_SECONDS = 60.0  # the same, where members have tried to connect to it in vain
_REPEAT_SECONDS = 1.0  # after which it tells its leader that it lives
_SILENCE_SECONDS = 10.0  # of a leader that connects, beyond the time for connecting
_CONNECT_SECONDS = 5.0  # for one attempt to reach the listener
_ANSWER_SECONDS = 2.0  # in which a store answers: members wait for a joiner no longer than 5 s
_OVER_SECONDS = 2.0  # in which members that go on after rank 0 has left open another listener
# The same where the store alone says that rank 0 has left. An earlier start may have left that
# there, or somebody who has kept it writes it again: a listener's next entry comes in this time.
_STORED_OVER_SECONDS = RENEW_SECONDS + _ANSWER_SECONDS
_LOOK_SECONDS = 0.2  # between two looks for that one

_log = logging.getLogger("gradwire")

Reader = Callable[[str, float], bytes]  # of a key, within so many seconds: see StoreClient.get


class _LeftOut(Exception):
    """Raised when this process must begin again; says why."""


class _Over(Exception):
    """Raised when rank 0 has closed its communicator."""

    def __init__(self, seconds: float) -> None:
        """Takes the time in which word may come of members that go on."""
        self.seconds = seconds


class _Invited(Exception):
    """Another attempt begins."""


@dataclass(frozen=True)
class JoinOptions:
    """The job that a process wants to join, and how, as it was told at its start."""

    job: str
    number: int  # in the job; -1: none
    store: str
    secret: bytes | None = field(repr=False)
    transports: tuple[str, ...]


@dataclass(frozen=True)
class Invitation:
    """A joiner's place in the next communicator."""

    rank: int
    size: int
    communicator: int
    epoch: int
    joined: int
    seconds: float  # for connecting
    model: str | None  # the packed cost model

    def pack(self) -> bytes:
        """Encodes all fields as JSON."""
        return json.dumps(asdict(self)).encode()


def unpack_invitation(data: bytes) -> Invitation:
    """Decodes a leader's invitation; raises ValueError for anything else."""
    counts = dict.fromkeys(("rank", "size", "communicator", "epoch", "joined"), int)
    fields = read_fields(data, **counts, seconds=(float, int), model=(str, NoneType))
    if not all(0 <= fields[name] < 1 << 32 for name in counts):
        raise ValueError("a number in it is out of range")
    if not fields["rank"] < fields["size"] < MAX_NUMBER:
        raise ValueError("its rank is not within its size")
    if not 0 < fields["seconds"] < 1e6:
        raise ValueError("its time is out of range")
    return Invitation(**fields)


def join(options: JoinOptions, make: Callable[[Mesh, float], Made], deadline: Deadline) -> Made:
    """Waits until members let this process in; returns `make(mesh, seconds)`.

    `seconds` is the time for making links. Raises RendezvousError when nobody has by the deadline,
    and JobOver, at once, when the members have come to the end.
    """
    raise_limit()
    reason = "no communicator of the job lets processes in yet"
    lost = 0.0  # seconds of the members' time, in all attempts
    over: Deadline | None = None  # for word of members that go on
    while True:
        request: _Request[Made] | None = None
        try:
            limit = deadline if over is None else deadline.within(over.remaining)
            with reader_of(
                options.store, options.job, options.secret, limit, _ANSWER_SECONDS
            ) as read:
                entry = _read_entry(options, read, limit)
                over = None
                with _ask(options, entry, deadline) as links:
                    watch = _EntryWatch(read, entry)
                    request = _Request(options, entry, links, make, deadline, watch.is_current)
                    return request.run()
        except TimeoutError:
            if request is not None:
                reason = "it has asked to join, and the ranks have not resized since"
        except _Over as end:
            over = over or Deadline(end.seconds)
            reason = "its ranks have ended"
        except _LeftOut as error:
            reason = str(error)
        except SettingsError as error:
            raise RendezvousError(f"cannot join job {options.job!r}: {error}") from error
        except OSError as error:  # HandshakeError is one
            reason = f"its join listener does not answer ({error})"
        except RendezvousError:  # the store is gone, with those who said so
            if over is None:
                raise
        if over is not None and over.passed:
            raise JobOver(
                f"there is nobody left to join in job {options.job!r}: its ranks have come to the "
                "end, and closed their communicator"
            )
        if deadline.passed:
            raise RendezvousError(
                f"timed out: nobody let this process into job {options.job!r} within "
                f"{deadline.seconds:g} s ({reason}): is it running, does rank 0 call "
                "should_resize() and do all ranks call resize() then, and is store= the same? Or "
                "give more time with timeout="
            )
        _log.info("asking again: %s", reason)
        lost += request.seconds if request is not None else 0.0
        pause = min(max(_PAUSE_SECONDS, lost), _MOST_PAUSE_SECONDS, deadline.remaining)
        threading.Event().wait(pause if over is None else _LOOK_SECONDS)


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
        yield connect_by_url(store, deadline, answer).get
        return
    address = parse_address(store)
    known = secret_of_store(address, secret)
    client = StoreClient(address, job, known, deadline, margin=answer)
    with contextlib.closing(client):
        yield client.get


def _read_entry(options: JoinOptions, read: Reader, deadline: Deadline) -> ListenerEntry:
    """The listener's entry; waits for it in pieces, so that Ctrl-C gets through."""
    try:
        found = read(entry_key(options.job), min(deadline.remaining, 0.5))
        entry = unpack_entry(found, options.job, _secret_of(options, read))
    except RendezvousError as error:  # such as that of the rendezvous at the same address
        raise _LeftOut(f"its store closed: {error}") from None
    if entry.over:
        raise _Over(_STORED_OVER_SECONDS)
    return entry


def _secret_of(options: JoinOptions, read: Reader) -> bytes:
    """The job's secret: the given one, else what a store has that serves this user's processes.

    Empty where everybody may join (GRADWIRE_INSECURE).
    """
    if options.secret is not None:
        return options.secret
    return read(secret_key(options.job), 0) if parse_address(options.store).local else b""


class _EntryWatch:
    """Looks into the store for whether the entry is still the one that this process followed.

    A rank that is stopped keeps its joiners' links, while the others go on and listen elsewhere.
    """

    def __init__(self, read: Reader, entry: ListenerEntry) -> None:
        self._read, self._entry = read, entry
        self._is_lost = False  # the store: asking it again would take as long again

    def is_current(self) -> bool:
        """Whether the entry is the same, as far as the store knows."""
        if self._is_lost:
            return True
        try:
            found = self._read(entry_key(self._entry.job), 0)
        except TimeoutError:
            return True
        except Error:
            self._is_lost = True
            return True
        with contextlib.suppress(RendezvousError):  # not signed, so it says nothing
            return unpack_entry(found, self._entry.job, self._entry.secret) == self._entry
        return True


@contextlib.contextmanager
def _ask(options: JoinOptions, entry: ListenerEntry, deadline: Deadline) -> Iterator[SurvivorLinks]:
    """Connects to the listener, and asks to join; yields the link to the leader-to-be."""
    limit = deadline.within(_CONNECT_SECONDS)
    info, own = entry.address, _interface(entry.address)
    here = info.host == host_identity() and info.unix
    sock = open_socket(info, "shm" if here else "tcp", own.interface, limit)
    to = {"epoch": entry.epoch, "listener": info.listener}
    hello = Hello(options.job, Purpose.JOIN, source=options.number, **to)
    sock = client_handshake(sock, hello, entry.secret, limit)
    with contextlib.closing(SurvivorLinks((), MOST_RANKS)) as links:
        links.add(_LEADER, sock)
        links.send(_LEADER, *JOIN_REQUEST)
        yield links


def _interface(info: AddressInfo) -> Choice:
    """The address to listen on, of a network that leads to the members."""
    if is_loopback(info.address):
        return loopback()
    host = info.advertised if info.advertised not in ("", NOWHERE) else info.address
    source = route_to(host, info.port or 9).source
    return choose(source, several_hosts=True)


class _Request(Generic[Made]):
    """One request to join, until the end of the link or the word that it is in."""

    def __init__(
        self,
        options: JoinOptions,
        entry: ListenerEntry,
        links: SurvivorLinks,
        make: Callable[[Mesh, float], Made],
        deadline: Deadline,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self._options, self._links, self._make, self._deadline = options, links, make, deadline
        self._is_current = is_current  # the entry that was followed
        self._interface = _interface(entry.address)
        privacy = "who joins needs the job's secret"
        self._job = Job(options.job, entry.secret, entry.epoch, privacy)
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._silent_at: Deadline | None = None  # once invited
        self._invited: tuple[View, Invitation] | None = None
        self._invited_at: float | None = None  # for the first time
        self._addresses: tuple[View, bytes] | None = None
        self._job_ranks: list[int] = []  # of the members that connect
        self._is_in: View | None = None
        self._candidate: tuple[View, Made] | None = None

    @property
    def seconds(self) -> float:
        """The time since its first invitation; 0 before."""
        return 0.0 if self._invited_at is None else time.monotonic() - self._invited_at

    def run(self) -> Made:
        try:
            while True:
                with contextlib.suppress(_Invited):
                    return self._attempt()
        except BaseException:
            self._drop_candidate()
            raise

    def _attempt(self) -> Made:
        self._wait(lambda: self._invited is not None)
        assert self._invited is not None
        view, invitation = self._invited
        self._drop_candidate()
        try:
            made = self._connect(view, invitation)
        except Error as error:
            _log.info("could not connect: %s", describe(error))
            self._wait(lambda: False, view)  # the leader invites again, or ends the link
            raise AssertionError("unreachable") from None
        self._candidate = view, made
        self._say(MessageKind.READY, view)
        self._wait(lambda: self._is_in == view, view)
        self._candidate = None
        self._say(MessageKind.DONE, view)
        return made

    def _connect(self, view: View, invitation: Invitation) -> Made:
        mesh = connect_mesh(
            self._job,
            lambda own, _: self._exchange(own, view, invitation.size),
            rank=invitation.rank,
            size=invitation.size,
            communicator=invitation.communicator,
            deadline=Deadline(invitation.seconds),
            transports=self._options.transports,
            interface=self._interface,
            raise_if_peer_failed=lambda within: self._listen(within, view),
        )
        options = self._options
        mesh.job_ranks = tuple(self._job_ranks)
        mesh.membership = Membership(
            invitation.epoch, invitation.joined, options.store, options.secret, options.transports
        )
        try:
            mesh.model = None if invitation.model is None else unpack(invitation.model.encode())
            self._say(MessageKind.VIEW, view)
        except BaseException:
            mesh.close()
            raise
        return self._make(mesh, invitation.seconds)

    def _exchange(self, own: bytes, view: View, size: int) -> list[bytes]:
        self._say(MessageKind.ADDRESS, view, own)
        self._wait(lambda: self._addresses is not None and self._addresses[0] == view, view)
        assert self._addresses is not None
        try:
            found = unpack_addresses(self._addresses[1], size, size)
        except ValueError as error:
            raise _LeftOut(f"the leader sent no addresses ({error})") from None
        self._job_ranks = found.job_ranks
        return found.addresses

    def _wait(self, condition: Callable[[], bool], view: View | None = None) -> None:
        """Listens until the condition holds; see `_listen` for what it raises."""
        while not condition():
            self._listen(_REPEAT_SECONDS, view)
            if self._silent_at is None and self._deadline.passed:
                raise TimeoutError
            if self._silent_at is None and not self._is_current():
                raise _LeftOut("another rank lets processes in now")
            if self._silent_at is not None and self._silent_at.passed:
                raise _LeftOut("the rank that had let it in fell silent")

    def _listen(self, seconds: float, view: View | None) -> None:
        """Receives messages for up to some seconds.

        Raises _Invited when an attempt for another than this view begins, and _LeftOut when the
        link ends.
        """
        if self._invited is not None and self._repeat_at.passed:
            self._say(MessageKind.VIEW, self._invited[0])
        limit = seconds if self._invited else min(seconds, self._deadline.left)
        for event in self._links.poll(limit):
            self._receive(event)
        if view is not None and self._invited is not None and self._invited[0] != view:
            raise _Invited

    def _receive(self, event: Message | LinkEnded) -> None:
        if isinstance(event, LinkEnded):
            raise _LeftOut("the members went on without it, or the rank that knew of it ended")
        _, kind, view, payload = event
        if kind is MessageKind.OVER:
            raise _Over(_OVER_SECONDS)
        if kind is MessageKind.INVITE:
            try:
                self._invited = view, unpack_invitation(payload)
                self._invited_at = self._invited_at or time.monotonic()
            except ValueError as error:
                raise _LeftOut(f"it got no invitation ({error})") from None
        elif kind is MessageKind.ADDRESS:
            self._addresses = view, payload
        elif kind is MessageKind.DONE:
            self._is_in = view
        if self._invited is not None:
            self._silent_at = Deadline(self._invited[1].seconds + _SILENCE_SECONDS)

    def _say(self, kind: MessageKind, view: View, payload: bytes = b"") -> None:
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._links.send(_LEADER, kind, view, payload)

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            _, made = self._candidate
            self._candidate = None
            made.close()
