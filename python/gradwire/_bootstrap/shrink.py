"""shrink: ranks of an ended communicator agree on who they are, and connect anew.

They talk over the control sockets that still live (`survivor_links`), without a store, since the
rank that served it may be the one that died. docs/design/agreement.md has the protocol, and why it
terminates and survivors agree. `resize` is the same agreement with joiners, in its own file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.survivor_links import (
    Addresses,
    LinkEnded,
    Message,
    MessageKind,
    SurvivorLinks,
    View,
    unpack_addresses,
)
from gradwire._errors import Error, Timeout, TransportError, naming

_LEAST_CONNECT_SECONDS = 5.0  # that connecting may take, however short the timeout is
_MOST_CONNECT_SECONDS = 30.0  # the same, however long it is
_REPEAT_SECONDS = 1.0  # after which a waiting rank sends its view again
_DEATH_REPORT_SECONDS = 2.0  # in which the death that made connecting fail becomes known
_DONE_SECONDS = 1.0  # for the others' DONE, at the end

_log = logging.getLogger("gradwire")


class _Closable(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=_Closable)


class ViewChanged(Exception):
    """Raised when this rank's view is no longer the one that an attempt was for."""


class Agreement(Generic[Made]):
    """One rank's part; ranks have the ended communicator's numbers, joiners those above.

    It takes the `mesh` of the ended communicator, and closes the `links`. `make(mesh, seconds)`
    makes the communicator of the survivors' mesh; `seconds` is the time for links. A rank that
    sends nothing for `timeout` seconds is left out, and so is one that falls silent later.
    """

    def __init__(
        self,
        mesh: Mesh,
        links: SurvivorLinks,
        make: Callable[[Mesh, float], Made],
        transports: Sequence[str],
        timeout: float,
    ) -> None:
        self._mesh, self._rank, self._links = mesh, mesh.rank, links
        self._make, self._transports = make, transports
        self._connect_timeout = min(max(timeout, _LEAST_CONNECT_SECONDS), _MOST_CONNECT_SECONDS)
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._active: set[int] = set()  # ranks that sent anything since connecting failed
        self._exclusion: TransportError | None = None  # raised when the others left this rank out
        self._view = View(links.peers | {mesh.rank})
        self._limits = dict.fromkeys(links.peers, Deadline(timeout))  # of silence
        # The last message of each kind by peer, and the view that it was for.
        self._views: dict[int, View] = {}
        self._addresses: dict[int, View] = {}
        self._packed: dict[int, bytes] = {}  # what came with these
        self._ready: dict[int, View] = {}
        self._done: dict[int, View] = {}
        self._candidate: tuple[View, Made] | None = None
        self._job_ranks: list[int] = []  # of the members that connect

    def run(self) -> Made:
        """Connects the survivors, in their old order; returns what `make` does.

        Raises TransportError on a rank that was left out, and RendezvousError when the survivors
        cannot connect to each other.
        """
        with contextlib.closing(self._links):
            try:
                self._send(MessageKind.VIEW, self._view)
                view, made = self._regroup()
                self._announce_done(view)
            except BaseException:
                self._drop_candidate()
                raise
        _log.log(
            logging.INFO if view.size == self._mesh.size else logging.WARNING,
            "rank %d goes on as rank %d of %d: ranks %s of %d survived%s",
            *(self._rank, sorted(view.ranks).index(self._rank), view.size),
            *(", ".join(map(str, sorted(view.ranks))), self._mesh.size),
            f", and {len(view.joiners)} joined" if view.joiners else "",
        )
        return made

    def _regroup(self) -> tuple[View, Made]:
        while True:
            self._wait(self._without_agreement)
            if self._candidate is not None and self._is_done():
                return self._candidate
            with contextlib.suppress(ViewChanged):
                if self._may_try(self._view):
                    self._drop_candidate()
                    return self._try(self._view)

    def _may_try(self, _: View) -> bool:
        """Whether the agreed view is one to connect; another one may be agreed then."""
        return True

    def _try(self, view: View) -> tuple[View, Made]:
        self._candidate = found = view, self._connect(view)
        self._wait(lambda: self._joiners_without(view, self._ready))
        self._ready[self._rank] = view
        self._send(MessageKind.READY, view)
        self._wait(lambda: self._not_ready(view))
        return found

    def _connect(self, view: View) -> Made:
        members = [*sorted(view.ranks), *sorted(self._peers(view.joiners))]
        name = f"{self._mesh.communicator}/shrink/{members}/{view.round}"
        communicator = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        self._job_ranks = [self._mesh.job_rank(self._rank)]  # until the others' are known
        try:
            mesh = connect_mesh(
                self._mesh.job,
                lambda own, _: self._exchange(own, view, communicator),
                rank=members.index(self._rank),
                size=len(members),
                communicator=communicator,
                deadline=Deadline(self._connect_timeout),
                transports=self._transports,
                interface=self._mesh.interface,
                raise_if_peer_failed=lambda within: self._watch_view(view, within),
            )
            mesh.job_ranks = tuple(self._job_ranks)
            mesh.membership = self._mesh.membership.next(joined=len(view.joiners or ()))
            self._send_view()  # `make` takes a while too
            return self._make(mesh, self._connect_timeout)
        except Error as error:
            if error is not self._exclusion:
                self._find_stuck_ranks(view, _ranks_named_by(error, members))
            raise

    def _find_stuck_ranks(self, view: View, named: set[int]) -> None:
        """Leaves out stuck ranks, and those that the error names, after connecting failed.

        Leaves out all joiners where it names nobody. Raises ViewChanged when the view has become
        smaller.
        """
        self._watch_view(
            view, _DEATH_REPORT_SECONDS
        )  # the end of a dead rank's link may come later
        self._active.clear()
        self._wait(lambda: self._silent(view))
        if blamed := named - {self._rank} or self._peers(view.joiners):
            self._leave_out(blamed, "it kept the others waiting when they connected")
            self._require_view(view)

    def _exchange(self, own: bytes, view: View, communicator: int) -> list[bytes]:
        """All members' addresses, in their order; notes their numbers in the job."""
        admitted = self._addresses_of_joiners(view, communicator)
        brought = Addresses([own, *admitted.addresses], admitted.job_ranks).pack()
        self._addresses[self._rank], self._packed[self._rank] = view, brought
        self._send(MessageKind.ADDRESS, view, brought)
        self._wait(lambda: self._without_address(view))
        found = {rank: self._addresses_of(rank, view) for rank in sorted(view.ranks)}
        leader = found[view.leader]
        self._job_ranks = [*map(self._mesh.job_rank, found), *leader.job_ranks]
        addresses = [each.addresses[0] for each in found.values()] + leader.addresses[1:]
        self._tell_joiners(MessageKind.ADDRESS, view, Addresses(addresses, self._job_ranks).pack())
        return addresses

    def _addresses_of_joiners(self, _: View, __: int) -> Addresses:
        """The addresses and numbers in the job of this leader's joiners."""
        return Addresses([])

    def _addresses_of(self, rank: int, view: View) -> Addresses:
        """Decodes what a rank sent; leaves it out, and raises ViewChanged, if that is wrong."""
        joiners = len(view.joiners or ()) if rank == view.leader else 0
        try:
            return unpack_addresses(self._packed[rank], 1 + joiners, joiners)
        except ValueError as error:
            self._leave_out({rank}, f"it sent no addresses ({error})")
            raise ViewChanged from None

    # Joiners have the numbers from the size of the ended communicator on, as peers.

    def _peer(self, joiner: int) -> int:
        return self._mesh.size + joiner

    def _peers(self, joiners: Iterable[int] | None) -> set[int]:
        return set(map(self._peer, joiners or ()))

    def _joiners_of(self, _: View) -> set[int]:
        """The joiners of a view as peers, if this rank has admitted them."""
        return set()

    def _in_view(self, peer: int) -> bool:
        return peer in self._view.ranks or peer in self._joiners_of(self._view)

    # The ranks that this rank waits for; none when it is done.

    def _without_agreement(self) -> Iterable[int]:
        return () if self._is_done() else self._without(self._view, self._views)

    def _without_address(self, view: View) -> Iterable[int]:
        self._require_view(view)
        return self._without(view, self._addresses)

    def _joiners_without(self, view: View, last: Mapping[int, View]) -> Iterable[int]:
        """The joiners of this rank whose view in `last` is another one."""
        if self._is_done():
            return ()
        self._require_view(view)
        return {peer for peer in self._joiners_of(view) if last.get(peer) != view}

    def _not_ready(self, view: View) -> Iterable[int]:
        if self._is_done():
            return ()
        self._require_view(view)
        return self._without(view, self._ready)

    def _silent(self, view: View) -> Iterable[int]:
        self._require_view(view)
        return (view.ranks | self._joiners_of(view)) - self._active - {self._rank}

    def _without(self, view: View, last: Mapping[int, View]) -> set[int]:
        """The other ranks of the view whose view in `last` is another one."""
        return {peer for peer in view.ranks - {self._rank} if last.get(peer) != view}

    def _is_done(self) -> bool:
        if self._candidate is None:
            return False
        view, _ = self._candidate
        own = self._ready.get(self._rank) == view  # a leader waits for its joiners before
        everybody = own and self._view == view and not self._without(view, self._ready)
        return everybody or view in self._done.values()

    def _require_view(self, view: View) -> None:
        if self._view != view:
            raise ViewChanged

    def _wait(self, whom: Callable[[], Iterable[int]]) -> None:
        """Listens until `whom()` is empty; leaves out ranks that are silent for too long."""
        while waiting := set(whom()):
            late = {peer for peer in waiting if self._limits[peer].passed}
            self._listen_and_repeat(min(self._limits[peer].remaining for peer in waiting))
            # Messages that came while this rank was stopped count.
            late = {peer for peer in late if self._limits[peer].passed}
            if late:
                self._leave_out(late, "it sent nothing in time")

    def _watch_view(self, view: View, within: float) -> None:
        """Listens for this many seconds; raises ViewChanged when the view becomes smaller."""
        limit = Deadline(within)
        while True:
            self._listen_and_repeat(limit.remaining)
            self._require_view(view)
            if limit.passed:
                return

    def _listen_and_repeat(self, seconds: float) -> None:
        """Listens, and repeats the own view so that the others know that this rank lives."""
        if self._repeat_at.passed:
            self._send_view()
        self._listen(min(seconds, self._repeat_at.remaining))

    def _send_view(self) -> None:
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._send(MessageKind.VIEW, self._view)
        self._tell_joiners(MessageKind.VIEW, self._view)

    def _listen(self, seconds: float) -> None:
        for event in self._links.poll(seconds):
            if not self._in_view(event.peer):
                continue
            if isinstance(event, LinkEnded):
                self._leave_out({event.peer}, event.reason)
            else:
                self._receive(event)

    def _receive(self, message: Message) -> None:
        peer, kind, view, payload = message
        self._limits[peer] = Deadline(self._connect_timeout + _LEAST_CONNECT_SECONDS)
        self._active.add(peer)
        if kind is MessageKind.ADDRESS:
            self._addresses[peer], self._packed[peer] = view, payload
        elif kind is MessageKind.READY:
            self._ready[peer] = view
        if peer >= self._mesh.size:  # a joiner, which says nothing about others
            return
        self._views[peer] = view
        if kind is MessageKind.DONE:
            self._done[peer] = view
        if self._rank not in view.ranks and not self._is_done():
            self._exclusion = self._excluded_by(peer)
            raise self._exclusion
        self._shrink_view(self._view.intersect(view))

    def _leave_out(self, peers: Iterable[int], reason: str) -> None:
        out = set(peers)
        _log.info("rank %d leaves out %s: %s", self._rank, self._named(out), reason)
        before, size = self._view, self._mesh.size
        without = before._replace(
            joiners=before.joiners and before.joiners - {p - size for p in out}
        )
        self._shrink_view(without.intersect(View(before.ranks - out, None)))

    def _named(self, peers: Iterable[int]) -> str:
        size = self._mesh.size
        names = [
            f"rank {each}" if each < size else f"joiner {each - size}" for each in sorted(peers)
        ]
        return ", ".join(names)

    def _shrink_view(self, view: View) -> None:
        if view != self._view and not self._is_done():
            before, self._view = self._view, view
            self._send(MessageKind.VIEW, view, whom=before)  # also those that are left out
            for peer in self._joiners_of(before) - self._joiners_of(view):
                self._links.end(peer)

    def _send(
        self, kind: MessageKind, view: View, payload: bytes = b"", whom: View | None = None
    ) -> None:
        for peer in (whom or view).ranks - {self._rank}:
            self._links.send(peer, kind, view, payload)

    def _tell_joiners(self, kind: MessageKind, view: View, payload: bytes = b"") -> None:
        for peer in self._joiners_of(view):
            self._links.send(peer, kind, view, payload)

    def _announce_done(self, view: View) -> None:
        """Sends DONE and awaits the others': closing a link with unread data may lose messages."""
        self._send(MessageKind.DONE, view)
        self._await_confirmations(lambda: self._without(view, self._done))
        if leavers := self._leavers(self._without(view, self._done)):
            raise self._excluded_by(min(leavers))

    def _await_confirmations(self, whom: Callable[[], set[int]]) -> None:
        """Waits for DONE of `whom()`, while they are connected.

        It waits longer for ranks that left this one out, which finish its view or end their links.
        """
        limit = Deadline(_DONE_SECONDS)
        while waiting := whom() & self._links.peers:
            limits = [limit, *(self._limits[peer] for peer in self._leavers(waiting))]
            late = all(each.passed for each in limits)
            # At last once more, since what came while this rank was stopped counts.
            self._listen(max(each.remaining for each in limits))
            if late:
                return

    def _leavers(self, peers: Iterable[int]) -> set[int]:
        """The peers whose last view is without this rank."""
        return {
            peer
            for peer in peers
            if peer in self._views and self._rank not in self._views[peer].ranks
        }

    def _excluded_by(self, peer: int) -> TransportError:
        error = TransportError(
            f"rank {self._rank}: the other survivors, rank {peer} among them, have left this rank "
            "out of the new communicator, because it came to shrink() too late or was silent: end "
            "this process, or give all ranks more time with timeout=",
        )
        return naming(error, peer, self._mesh.job_rank(peer))

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            _, made = self._candidate
            self._candidate = None
            made.close()


def _ranks_named_by(error: Error, members: Sequence[int]) -> set[int]:
    """The peer that an error names, in the ended communicator's numbers; empty for none."""
    if isinstance(error, Timeout | TransportError) and 0 <= error.peer < len(members):
        return {members[error.peer]}
    return set()
