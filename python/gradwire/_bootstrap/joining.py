"""join: a process asks the members of a communicator to let it into the next one.

It finds their door in a store, connects, and waits until they resize. What it then does its sponsor
tells it, see `guests`. Whenever that link ends before it is in, it begins again, until the time is
over. Members that try to connect to it wait meanwhile: so if that was in vain, it lets them work
for as long as all its attempts took. When the members have closed their communicator, they say so,
and it gives up, unless some of them turn out to go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._base.shortage import raise_limit
from gradwire._bootstrap.connect import connect_mesh, open_socket
from gradwire._bootstrap.door import RENEW_SECONDS, Reader, reader_of
from gradwire._bootstrap.guests import Invitation, unpack_addresses, unpack_invitation
from gradwire._bootstrap.handshake import Hello, Purpose, SettingsError, client_handshake
from gradwire._bootstrap.host_info import host_identity
from gradwire._bootstrap.keepalive import fail_with_host
from gradwire._bootstrap.mesh import AddressInfo, Job, Membership, Mesh
from gradwire._bootstrap.sign import Sign, key_of, secret_key_of, unpack_sign
from gradwire._bootstrap.store import parse_address
from gradwire._bootstrap.survivor_links import (
    MOST_RANKS,
    LinkEnded,
    Message,
    MessageKind,
    SurvivorLinks,
    View,
)
from gradwire._bootstrap.waiting_room import KNOCK
from gradwire._errors import Error, JobOver, RendezvousError, describe
from gradwire._host.interfaces import Choice, choose, is_loopback, loopback, route_to
from gradwire._model import unpack

_SPONSOR = MOST_RANKS  # its number as a peer
_PAUSE_SECONDS = 0.05  # before it knocks again
_MOST_PAUSE_SECONDS = 60.0  # the same, where members have tried to connect to it in vain
_REPEAT_SECONDS = 1.0  # after which it tells its sponsor that it lives
_SILENCE_SECONDS = 10.0  # of a sponsor that connects, beyond the time for connecting
_CONNECT_SECONDS = 5.0  # for one attempt to reach the door
_ANSWER_SECONDS = 2.0  # in which a store answers: members wait for a guest no longer than 5 s
_OVER_SECONDS = 2.0  # in which members that go on after rank 0 has left open another door
# The same where the store alone says that rank 0 has left. An earlier start may have left that
# there, or somebody who has kept it writes it again: an open door's next sign comes in this time.
_STORED_OVER_SECONDS = RENEW_SECONDS + _ANSWER_SECONDS
_LOOK_SECONDS = 0.2  # between two looks for that one

_log = logging.getLogger("gradwire")


class _Closable(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Closable)


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
class Asking:
    """A process that wants to join: what it was told at its start."""

    job: str
    number: int  # in the job; -1: none
    store: str
    secret: bytes | None = field(repr=False)
    transports: tuple[str, ...]


def join(asking: Asking, make: Callable[[Mesh, float], _Made], deadline: Deadline) -> _Made:
    """Waits until members let this process in; returns `make(mesh, seconds)`.

    `seconds` is the time for making links. Raises RendezvousError when nobody has by the deadline,
    and JobOver, at once, when the members have come to the end.
    """
    raise_limit()
    reason = "no communicator of the job lets processes in yet"
    lost = 0.0  # seconds of the members' time, in all attempts
    over: Deadline | None = None  # for word of members that go on
    while True:
        guest: _Guest[_Made] | None = None
        try:
            limit = deadline if over is None else deadline.within(over.remaining)
            with reader_of(asking.store, asking.job, asking.secret, limit, _ANSWER_SECONDS) as read:
                sign = _read_sign(asking, read, limit)
                over = None
                with _knock(asking, sign, deadline) as links:
                    looks = _Looks(asking, read, sign)
                    guest = _Guest(asking, sign, links, make, deadline, looks.is_there)
                    return guest.run()
        except TimeoutError:
            if guest is not None:
                reason = "it has knocked, and the ranks have not resized since"
        except _Over as end:
            over = over or Deadline(end.seconds)
            reason = "its ranks have ended"
        except _LeftOut as error:
            reason = str(error)
        except SettingsError as error:
            raise RendezvousError(f"cannot join job {asking.job!r}: {error}") from error
        except OSError as error:  # HandshakeError is one
            reason = f"its door does not answer ({error})"
        except RendezvousError:  # the store is gone, with those who said so
            if over is None:
                raise
        if over is not None and over.passed:
            raise JobOver(
                f"there is nobody left to join in job {asking.job!r}: its ranks have come to the "
                "end, and closed their communicator"
            )
        if deadline.passed:
            raise RendezvousError(
                f"timed out: nobody let this process into job {asking.job!r} within "
                f"{deadline.seconds:g} s ({reason}): is it running, does rank 0 call "
                "should_resize() and do all ranks call resize() then, and is store= the same?"
            )
        _log.info("knocking again: %s", reason)
        lost += guest.seconds if guest is not None else 0.0
        pause = min(max(_PAUSE_SECONDS, lost), _MOST_PAUSE_SECONDS, deadline.remaining)
        threading.Event().wait(pause if over is None else _LOOK_SECONDS)


def _read_sign(asking: Asking, read: Reader, deadline: Deadline) -> Sign:
    """The sign of the door; waits for it in pieces, so that Ctrl-C gets through."""
    try:
        found = read(key_of(asking.job), min(deadline.remaining, 0.5))
        sign = unpack_sign(found, asking.job, _secret_of(asking, read))
    except RendezvousError as error:  # such as that of the rendezvous at the same address
        raise _LeftOut(f"its store closed: {error}") from None
    if sign.over:
        raise _Over(_STORED_OVER_SECONDS)
    return sign


def _secret_of(asking: Asking, read: Reader) -> bytes:
    """The job's secret: the given one, else what a store has that serves this user's processes.

    Empty where everybody may join (GRADWIRE_INSECURE).
    """
    if asking.secret is not None:
        return asking.secret
    return read(secret_key_of(asking.job), 0) if parse_address(asking.store).local else b""


class _Looks:
    """Looks into the store for whether the door is where it was.

    A rank that is stopped keeps its guests' links, while the others go on and open another door.
    """

    def __init__(self, asking: Asking, read: Reader, sign: Sign) -> None:
        self._key, self._read, self._sign = key_of(asking.job), read, sign
        self._is_lost = False  # the store: asking it again would take as long again

    def is_there(self) -> bool:
        """Whether the door is where it was, as far as the store knows."""
        if self._is_lost:
            return True
        try:
            found = self._read(self._key, 0)
        except TimeoutError:
            return True
        except Error:
            self._is_lost = True
            return True
        with contextlib.suppress(RendezvousError):  # not signed, so it says nothing
            return unpack_sign(found, self._sign.job, self._sign.secret) == self._sign
        return True


@contextlib.contextmanager
def _knock(asking: Asking, sign: Sign, deadline: Deadline) -> Iterator[SurvivorLinks]:
    """Connects to the door; yields the link to the sponsor-to-be."""
    limit = deadline.within(_CONNECT_SECONDS)
    info, own = sign.address, _interface(sign.address)
    here = info.host == host_identity() and info.unix
    sock = open_socket(info, "shm" if here else "tcp", own.interface, limit)
    try:
        hello = Hello(asking.job, Purpose.JOIN, epoch=sign.epoch, source=asking.number)
        sock = client_handshake(sock, hello, sign.secret, limit)
        fail_with_host(sock, always_read=True)
        sock.sendall(KNOCK)
    except BaseException:
        sock.close()
        raise
    links = SurvivorLinks((), MOST_RANKS)
    links.add(_SPONSOR, sock)
    with contextlib.closing(links):
        yield links


def _interface(info: AddressInfo) -> Choice:
    """The address to listen on, of a network that leads to the members."""
    if is_loopback(info.address):
        return loopback()
    source = route_to(info.address, info.port or 9).source
    pattern = environment.text("GRADWIRE_SOCKET_IFNAME")
    return choose(source, pattern=pattern, several_hosts=True)


class _Guest(Generic[_Made]):
    """One knock, from the first invitation to the end of the link or the word that it is in."""

    def __init__(
        self,
        asking: Asking,
        sign: Sign,
        links: SurvivorLinks,
        make: Callable[[Mesh, float], _Made],
        deadline: Deadline,
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        self._asking, self._links, self._make, self._deadline = asking, links, make, deadline
        self._is_there = is_there  # the door, still
        self._interface = _interface(sign.address)
        privacy = "who joins needs the job's secret"
        self._job = Job(asking.job, sign.secret, sign.epoch, privacy)
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._silent_at: Deadline | None = None  # once invited
        self._invited: tuple[View, Invitation] | None = None
        self._invited_at: float | None = None  # for the first time
        self._addresses: tuple[View, bytes] | None = None
        self._is_in: View | None = None
        self._candidate: tuple[View, _Made] | None = None

    @property
    def seconds(self) -> float:
        """The time since its first invitation; 0 before."""
        return 0.0 if self._invited_at is None else time.monotonic() - self._invited_at

    def run(self) -> _Made:
        try:
            while True:
                with contextlib.suppress(_Invited):
                    return self._attempt()
        except BaseException:
            self._drop_candidate()
            raise

    def _attempt(self) -> _Made:
        self._wait(lambda: self._invited is not None)
        assert self._invited is not None
        view, invitation = self._invited
        self._drop_candidate()
        try:
            made = self._connect(view, invitation)
        except Error as error:
            _log.info("could not connect: %s", describe(error))
            self._wait(lambda: False, view)  # the sponsor invites again, or ends the link
            raise AssertionError("unreachable") from None
        self._candidate = view, made
        self._say(MessageKind.READY, view)
        self._wait(lambda: self._is_in == view, view)
        self._candidate = None
        self._say(MessageKind.DONE, view)
        return made

    def _connect(self, view: View, invitation: Invitation) -> _Made:
        job_ranks: list[int] = []
        mesh = connect_mesh(
            self._job,
            lambda own, _: self._exchange(own, view, invitation, job_ranks),
            rank=invitation.rank,
            size=invitation.size,
            communicator=invitation.communicator,
            deadline=Deadline(invitation.seconds),
            transports=self._asking.transports,
            interface=self._interface,
            raise_if_peer_failed=lambda within: self._listen(within, view),
        )
        asking = self._asking
        mesh.job_ranks = tuple(job_ranks)
        mesh.membership = Membership(
            invitation.epoch, invitation.joined, asking.store, asking.secret, asking.transports
        )
        try:
            mesh.model = None if invitation.model is None else unpack(invitation.model.encode())
            self._say(MessageKind.VIEW, view)
        except BaseException:
            mesh.close()
            raise
        return self._make(mesh, invitation.seconds)

    def _exchange(
        self, own: bytes, view: View, invitation: Invitation, job_ranks: list[int]
    ) -> list[bytes]:
        self._say(MessageKind.ADDRESS, view, own)
        self._wait(lambda: self._addresses is not None and self._addresses[0] == view, view)
        assert self._addresses is not None
        try:
            found = unpack_addresses(self._addresses[1], invitation.size, invitation.size)
        except ValueError as error:
            raise _LeftOut(f"the sponsor sent no addresses ({error})") from None
        job_ranks[:] = found.job_ranks
        return found.addresses

    def _wait(self, condition: Callable[[], bool], view: View | None = None) -> None:
        """Listens until the condition holds; see `_listen` for what it raises."""
        while not condition():
            self._listen(_REPEAT_SECONDS, view)
            if self._silent_at is None and self._deadline.passed:
                raise TimeoutError
            if self._silent_at is None and not self._is_there():
                raise _LeftOut("another rank has the door now")
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
        self._links.send(_SPONSOR, kind, view, payload)

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            _, made = self._candidate
            self._candidate = None
            made.close()
