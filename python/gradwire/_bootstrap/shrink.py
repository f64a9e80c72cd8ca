"""shrink, resize: ranks of an ended communicator agree on who they are, and connect anew.

They talk over the control sockets that still live (`survivor_links`), without a store, since the
rank that served it may be the one that died. Every rank holds a *view*: the ranks that it takes to
be alive. A view only gets smaller: when a link ends, when a rank is silent for too long, and by
every rank that a peer within the view leaves out of its own. Each change is sent to all. For a
view V:

1. V is agreed when every rank of V has sent V. Then they exchange addresses (ADDRESS), connect,
   which gives each rank a candidate communicator, and send READY. If V shrinks meanwhile, they
   begin again.
2. A rank is done with V when all of V have sent READY while its own view is V, or when a rank of
   its view sends DONE(V) and it holds a candidate for V. It sends DONE(V) to all, then closes its
   links. It drops a candidate only when a smaller view is agreed.

It terminates: views shrink at most p - 1 times, and every wait ends with a message, with the end of
a link, or with leaving out a silent rank. A waiting rank repeats its view now and then, so that
only a rank that is connecting, for a limited time, or that is stuck, sends nothing. When connecting
fails, a rank first waits for a message of every other rank: a stuck rank is left out, then the rank
that the error names, if any. A view is tried once: a rank sends READY for it at most once.

Survivors agree: suppose that s drops its candidate for V because V' is agreed, and that t of V' is
done with V. t sent V', and not after it was done. So when it was done its view was within V'; hence
it did not count READYs, and the rank that sent DONE(V) to it is in V' too, and was done with V
before. The same holds for that rank, and so on without a first: there is no such t. And nobody
misses a DONE: a rank sends it before it closes its links, and a link keeps its order.

This holds when silence means death. A rank that lives and was left out, because it was stopped or
came late, is told so and raises. If it was done with V, it notices it as it sends DONE: the others'
last views are without it, and their links end without a DONE.
Hosts that cannot reach each other take each other to be dead. After a shrink each side goes on. A
resize goes on with a majority alone (`majority`), unless the program gives a number of ranks.

**Joiners** are processes that join in a resize. The lowest rank of a view is its *leader*: it alone
talks to them, and says in its view whom it admits; until then that part of a view is open. Think
of a view as a set of ranks, and of all joiners that any rank of it might admit in any round: what a
leader says leaves out all other joiners of its own, a joiner that dies is left out like a rank, and
when a leader leaves, its joiners leave too. So views still only get smaller (`View.intersect`), by
rounds that end with the time to wait. Joiners state nothing to ranks: a leader sends READY when its
joiners have told it that they are, so the argument above holds for ranks as it stands. When
connecting fails and names nobody, all joiners are left out before the ranks give up. A joiner is in
when its leader, done with V, tells it. One whose leader vanishes before drops its candidate and
asks again; if ranks were done with V, they have a communicator with a dead rank in it, which
fails, and the next resize leaves it out.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gradwire._base.deadline import Deadline
from gradwire._base.majority import is_majority, no_majority
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.join_listener import Joiner, JoinListener
from gradwire._bootstrap.joining import Addresses, Invitation, unpack_addresses
from gradwire._bootstrap.mesh import Mesh, unpack_address_info
from gradwire._bootstrap.survivor_links import (
    MOST_JOINERS,
    LinkEnded,
    Message,
    MessageKind,
    SurvivorLinks,
    View,
)
from gradwire._errors import Error, RendezvousError, Timeout, TransportError, describe, naming
from gradwire._model import pack

_LEAST_CONNECT_SECONDS = 5.0  # that connecting may take, however short the timeout is
_MOST_CONNECT_SECONDS = 30.0  # the same, however long it is
_REPEAT_SECONDS = 1.0  # after which a waiting rank sends its view again
_DEATH_REPORT_SECONDS = 2.0  # in which the death that made connecting fail becomes known
_DONE_SECONDS = 1.0  # for the others' DONE, at the end
_JOINER_SECONDS = 5.0  # in which a joiner answers an invitation
_LOOK_SECONDS = 0.05  # between two looks for joiners
_MOST_ROUNDS = 255

_log = logging.getLogger("gradwire")


class _Closable(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Closable)


class _ViewChanged(Exception):
    """Raised when this rank's view is no longer the one that an attempt was for."""


@dataclass
class ResizeOptions:
    """The rules by which a resize lets processes in, the same on all ranks; and the listener."""

    open_listener: Callable[[], JoinListener]  # called on the leader
    wait: float = 0.0  # seconds, while there are fewer ranks than
    least: int | None = 1  # None: a majority of the ended communicator's ranks must be left
    most: int | None = None
    listener: JoinListener | None = None  # once this rank has been the leader


def shrink(
    mesh: Mesh,
    links: SurvivorLinks,
    make: Callable[[Mesh, float], _Made],
    *,
    transports: Sequence[str],
    timeout: float,
    options: ResizeOptions | None = None,
) -> _Made:
    """Connects the survivors, in their old order, then joiners; returns `make(mesh, seconds)`.

    `mesh` is the ended communicator's; without `options` nobody joins. A rank that sends nothing
    for `timeout` seconds is left out, and so is one that falls silent later. Closes the links.
    Raises TransportError on a rank that was left out, and RendezvousError when the survivors cannot
    connect to each other, are no majority, or are too few at the end of the wait. `seconds` is the
    time for links.
    """
    with contextlib.closing(links):
        return _Shrink(mesh, links, make, transports, timeout, options).run()


class _Shrink(Generic[_Made]):
    """One rank's part; ranks have the numbers of the ended communicator, joiners those above."""

    def __init__(
        self,
        mesh: Mesh,
        links: SurvivorLinks,
        make: Callable[[Mesh, float], _Made],
        transports: Sequence[str],
        timeout: float,
        options: ResizeOptions | None,
    ) -> None:
        self._mesh, self._rank, self._links = mesh, mesh.rank, links
        self._make, self._transports = make, transports
        self._connect_timeout = min(max(timeout, _LEAST_CONNECT_SECONDS), _MOST_CONNECT_SECONDS)
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._active: set[int] = set()  # ranks that sent anything since connecting failed
        self._exclusion: TransportError | None = None  # raised when the others left this rank out
        self._options = options
        self._wait_over = Deadline(options.wait if options else 0.0)
        self._joiners: list[Joiner] = []  # that this rank has admitted, as leader
        self._told: set[int] = set()  # those that know that they are in
        opened = None if options else frozenset[int]()
        self._view = View(links.peers | {mesh.rank}, opened)
        self._limits = dict.fromkeys(links.peers, Deadline(timeout))  # of silence
        # The last message of each kind by peer, and the view that it was for.
        self._views: dict[int, View] = {}
        self._addresses: dict[int, tuple[View, bytes]] = {}
        self._ready: dict[int, View] = {}
        self._done: dict[int, View] = {}
        self._refused: dict[int, View] = {}
        self._candidate: tuple[View, _Made] | None = None

    def run(self) -> _Made:
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
            self._rank,
            sorted(view.ranks).index(self._rank),
            view.size,
            _names(view.ranks),
            self._mesh.size,
            f", and {len(view.joiners)} joined" if view.joiners else "",
        )
        return made

    def _regroup(self) -> tuple[View, _Made]:
        while True:
            self._wait(self._without_agreement)
            if self._candidate is not None and self._is_done():
                return self._candidate
            self._require_majority()
            with contextlib.suppress(_ViewChanged):
                if self._options and not self._are_enough(self._options):
                    continue
                self._drop_candidate()
                return self._try(self._view)

    def _are_enough(self, options: ResizeOptions) -> bool:
        """Whether the agreed view is one to try; otherwise waits for joiners, or for the leader.

        Raises RendezvousError when the time to wait is over.
        """
        view = self._view
        if view.joiners is not None and view.size >= (options.least or 1):
            return True
        if self._rank == view.leader:
            self._admit_joiners(view, options)
            return False
        self._wait(lambda: self._without_decision(view))
        if self._refused.get(view.leader) == view:
            raise self._too_few(view, options)
        return True

    def _admit_joiners(self, view: View, options: ResizeOptions) -> None:
        """Waits for joiners where ranks are too few, and says whom this leader admits."""
        if options.listener is None:
            options.listener = options.open_listener()
        while True:
            most = MOST_JOINERS if options.most is None else options.most - len(view.ranks)
            room = min(most - len(self._admitted()), MOST_JOINERS - len(self._joiners))
            for joiner in options.listener.take(max(room, 0)):
                self._add_joiner(joiner)
            admitted = self._admitted()
            enough = len(view.ranks) + len(admitted) >= (options.least or 1)
            if enough or self._wait_over.passed or view.round == _MOST_ROUNDS:
                break
            self._watch_view(view, min(_LOOK_SECONDS, self._wait_over.remaining))
        if not enough and view.joiners is not None:
            self._send(MessageKind.TOO_FEW, view)
            raise self._too_few(view, options)
        number = view.round + (view.joiners is not None)
        self._shrink_view(View(view.ranks, frozenset(admitted), number))

    def _admitted(self) -> set[int]:
        """The joiners that this leader has and nobody left out; also from before a rank died."""
        return {
            number
            for number in range(len(self._joiners))
            if self._peer(number) in self._links.peers
        }

    def _add_joiner(self, joiner: Joiner) -> None:
        peer = self._peer(len(self._joiners))
        self._joiners.append(joiner)
        self._links.add(peer, joiner.sock)
        self._limits[peer] = Deadline(_JOINER_SECONDS)

    def _too_few(self, view: View, options: ResizeOptions) -> RendezvousError:
        trouble = (
            f" ({options.listener.trouble})"
            if options.listener and options.listener.trouble
            else ""
        )
        return RendezvousError(
            f"rank {self._rank}: {view.size} rank{'s are' if view.size > 1 else ' is'} here after "
            f"wait={options.wait:g} s, and min_ranks={options.least}{trouble}: the others have "
            "failed, or the network between them and this part of the ranks has; start more "
            "processes that call gradwire.join(), or wait longer"
        )

    def _try(self, view: View) -> tuple[View, _Made]:
        self._candidate = found = view, self._connect(view)
        self._wait(lambda: self._without_answer(view, self._ready))
        self._ready[self._rank] = view
        self._send(MessageKind.READY, view)
        self._wait(lambda: self._not_ready(view))
        return found

    def _connect(self, view: View) -> _Made:
        members = [*sorted(view.ranks), *sorted(self._peers(view.joiners))]
        name = f"{self._mesh.communicator}/shrink/{members}/{view.round}"
        communicator = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        job_ranks: list[int] = []
        try:
            mesh = connect_mesh(
                self._mesh.job,
                lambda own, _: self._exchange(own, view, communicator, job_ranks),
                rank=members.index(self._rank),
                size=len(members),
                communicator=communicator,
                deadline=Deadline(self._connect_timeout),
                transports=self._transports,
                interface=self._mesh.interface,
                raise_if_peer_failed=lambda within: self._watch_view(view, within),
            )
            mesh.job_ranks = tuple(job_ranks) or (self._mesh.job_rank(self._rank),)
            mesh.membership = self._mesh.membership.next(joined=len(view.joiners or ()))
            self._send_view()  # `make` takes a while too
            return self._make(mesh, self._connect_timeout)
        except Error as error:
            if error is not self._exclusion:
                self._find_stuck_ranks(view, _ranks_named_by(error, members))
            raise

    def _find_stuck_ranks(self, view: View, named: set[int]) -> None:
        """Leaves out stuck ranks, and those that the error names, after connecting failed.

        Leaves out all joiners where it names nobody. Raises _ViewChanged when the view has become
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

    def _exchange(
        self, own: bytes, view: View, communicator: int, job_ranks: list[int]
    ) -> list[bytes]:
        """All members' addresses, in their order; fills in their numbers in the job.

        The leader asks its joiners for theirs first, and passes all on to them.
        """
        ranks = sorted(view.ranks)
        numbers = [self._mesh.job_rank(rank) for rank in ranks]
        joiners = sorted(self._joiners_of(view))
        if joiners:
            numbers = _job_ranks(
                numbers, [self._joiners[each - self._mesh.size] for each in joiners]
            )
            self._invite(view, joiners, communicator)
            self._wait(lambda: self._without_answer(view, self._address_views()))
            self._require_addresses(joiners)
        admitted = [own, *(self._addresses[each][1] for each in joiners)]
        self._addresses[self._rank] = view, Addresses(admitted, numbers[len(ranks) :]).pack()
        self._send(MessageKind.ADDRESS, view, self._addresses[self._rank][1])
        self._wait(lambda: self._without_address(view))
        found = {rank: self._addresses_of(rank, view) for rank in ranks}
        leader = found[view.leader]
        job_ranks[:] = numbers[: len(ranks)] + leader.job_ranks
        addresses = [found[rank].addresses[0] for rank in ranks] + leader.addresses[1:]
        for each in joiners:
            packed = Addresses(addresses, job_ranks).pack()
            self._links.send(each, MessageKind.ADDRESS, view, packed)
        return addresses

    def _require_addresses(self, joiners: Iterable[int]) -> None:
        """Leaves out joiners that sent no address, and raises _ViewChanged then."""
        for each in joiners:
            try:
                unpack_address_info(self._addresses[each][1], each)
            except RendezvousError as error:
                self._leave_out({each}, describe(error))
                raise _ViewChanged from None

    def _addresses_of(self, rank: int, view: View) -> Addresses:
        """Decodes what a rank sent; leaves it out, and raises _ViewChanged, if that is wrong."""
        joiners = len(view.joiners or ()) if rank == view.leader else 0
        try:
            return unpack_addresses(self._addresses[rank][1], 1 + joiners, joiners)
        except ValueError as error:
            self._leave_out({rank}, f"it sent no addresses ({error})")
            raise _ViewChanged from None

    def _invite(self, view: View, joiners: Sequence[int], communicator: int) -> None:
        for index, peer in enumerate(joiners):
            self._limits[peer] = Deadline(_JOINER_SECONDS)
            invitation = Invitation(
                rank=len(view.ranks) + index,
                size=view.size,
                communicator=communicator,
                epoch=self._mesh.membership.epoch + 1,
                joined=len(joiners),
                seconds=self._connect_timeout,
                model=None if self._mesh.model is None else pack(self._mesh.model).decode(),
            )
            self._links.send(peer, MessageKind.INVITE, view, invitation.pack())

    # Joiners have the numbers from the size of the ended communicator on, as peers.

    def _peer(self, joiner: int) -> int:
        return self._mesh.size + joiner

    def _peers(self, joiners: Iterable[int] | None) -> set[int]:
        return set(map(self._peer, joiners or ()))

    def _joiners_of(self, view: View) -> set[int]:
        """The joiners of a view as peers, if this rank has admitted them."""
        return self._peers(view.joiners) if self._rank == view.leader else set()

    def _in_view(self, peer: int) -> bool:
        return peer in self._view.ranks or peer in self._joiners_of(self._view)

    # The ranks that this rank waits for; none when it is done.

    def _without_agreement(self) -> Iterable[int]:
        return () if self._is_done() else self._without(self._view, self._views)

    def _without_decision(self, view: View) -> Iterable[int]:
        """The leader, until it goes on with the view or gives up."""
        self._require_view(view)
        leader = view.leader
        if self._refused.get(leader) == view or self._address_views().get(leader) == view:
            return ()
        return {leader}

    def _without_address(self, view: View) -> Iterable[int]:
        self._require_view(view)
        return self._without(view, self._address_views())

    def _without_answer(self, view: View, last: Mapping[int, View]) -> Iterable[int]:
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

    def _address_views(self) -> dict[int, View]:
        return {peer: of for peer, (of, _) in self._addresses.items()}

    def _is_done(self) -> bool:
        if self._candidate is None:
            return False
        view, _ = self._candidate
        own = self._ready.get(self._rank) == view  # a leader waits for its joiners before
        everybody = own and self._view == view and not self._without(view, self._ready)
        return everybody or view in self._done.values()

    def _require_view(self, view: View) -> None:
        if self._view != view:
            raise _ViewChanged

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
        """Listens for this many seconds; raises _ViewChanged when the view becomes smaller."""
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
            self._addresses[peer] = view, payload
        elif kind is MessageKind.READY:
            self._ready[peer] = view
        if peer >= self._mesh.size:  # a joiner, which says nothing about others
            if kind is MessageKind.DONE:
                self._told.add(peer)
            return
        self._views[peer] = view
        if kind is MessageKind.DONE:
            self._done[peer] = view
        elif kind is MessageKind.TOO_FEW:
            self._refused[peer] = view
        if self._rank not in view.ranks and not self._is_done():
            self._exclusion = self._excluded_by(peer)
            raise self._exclusion
        self._shrink_view(self._view.intersect(view))
        if kind is MessageKind.TOO_FEW and not self._is_done():
            self._require_majority()

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

    def _require_majority(self) -> None:
        """Raises RendezvousError where a majority is needed, and the agreed view is none."""
        left, size = self._view.ranks, self._mesh.size
        if self._options and self._options.least is None and not is_majority(left, size):
            self._send(MessageKind.TOO_FEW, self._view)
            raise no_majority(self._rank, left, size)

    def _send(
        self, kind: MessageKind, view: View, payload: bytes = b"", whom: View | None = None
    ) -> None:
        for peer in (whom or view).ranks - {self._rank}:
            self._links.send(peer, kind, view, payload)

    def _tell_joiners(self, kind: MessageKind, view: View) -> None:
        for peer in self._joiners_of(view):
            self._links.send(peer, kind, view)

    def _announce_done(self, view: View) -> None:
        """Sends DONE and awaits the others': closing a link with unread data may lose messages.

        Joiners learn it last, once no rank turned out to have left this one out.
        """
        self._send(MessageKind.DONE, view)
        self._await_confirmations(lambda: self._without(view, self._done))
        if leavers := self._leavers(self._without(view, self._done)):
            raise self._excluded_by(min(leavers))
        self._tell_joiners(MessageKind.DONE, view)
        self._await_confirmations(lambda: self._joiners_of(view) - self._told)

    def _await_confirmations(self, whom: Callable[[], set[int]]) -> None:
        """Listens to those that are still connected; longer to ranks that left this one out.

        These are either still to be done with its view, or end their links.
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
        return naming(_left_out(self._rank, peer), peer, self._mesh.job_rank(peer))

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            _, made = self._candidate
            self._candidate = None
            made.close()


def _job_ranks(ranks: Sequence[int], joiners: Sequence[Joiner]) -> list[int]:
    """Numbers in the job, with joiners': their launcher's, where free, or others."""
    numbers = list(ranks)
    for joiner in joiners:
        free = joiner.number >= 0 and joiner.number not in numbers
        numbers.append(joiner.number if free else max(numbers) + 1)
    return numbers


def _left_out(rank: int, by: int) -> TransportError:
    return TransportError(
        f"rank {rank}: the other survivors, rank {by} among them, have left this rank out of the "
        "new communicator, because it came to shrink() too late or was silent: end this process, "
        "or give all ranks more time with timeout=",
    )


def _ranks_named_by(error: Error, members: Sequence[int]) -> set[int]:
    """The peer that an error names, in the ended communicator's numbers; empty for none."""
    if isinstance(error, Timeout | TransportError) and 0 <= error.peer < len(members):
        return {members[error.peer]}
    return set()


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
