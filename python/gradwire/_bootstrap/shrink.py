"""shrink: the survivors of a failed communicator agree on who they are, and connect anew.

They speak over the control sockets that still live (`lines`), without a store: the rank that
hosted it may be the one that died. Every rank holds a view, the ranks it takes for alive. A view
only gets smaller: by a line that ended, by a rank that was silent for too long, and by whatever a
peer within the view leaves out of its own. Each change is told to all. For a view V:

1. V is agreed when every rank of V has said V. Then they tell each other their addresses (CARD),
   connect, which gives each a candidate, and say READY. If V shrinks meanwhile, they begin again.
2. A rank is done with V when all of V have said READY while its own view is V, or when a rank of
   its view says DONE(V) and it holds a candidate for V. It says DONE(V) to all, then lets go of
   its lines. It drops a candidate only when a smaller view is agreed.

It ends: views shrink at most p - 1 times; every wait ends with a message, with the end of a line,
or with leaving out who is silent. Who waits says its view again now and then, so that only a rank
that connects, for a limited time, or that is stuck says nothing. When connecting fails, a rank
first waits for a word of all others: who is stuck is left out, then who is to blame, if anyone.
A view is tried once: a rank says READY for it at most once.

Survivors agree: let s drop its candidate for V because V' is agreed, and let t of V' be done with
V. t said V', and not after it was done. So when it was done its view was within V', hence it did
not count READYs, and the rank that said DONE(V) to it is in V' too, and was done with V before. The
same holds of that rank, and so on without a first: there is no such t. And nobody misses a DONE:
who is done says so before its line ends, and a line keeps its order.

That holds where silence means death. A rank that was left out though it lives, because it was
stopped or came late, is told so and raises; where it was done with V, its communicator fails at
the first call. Hosts that cannot reach each other take each other for dead, and each side goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.lines import Gone, Kind, Lines, Message, View
from gradwire._bootstrap.mesh import Mesh
from gradwire._errors import Error, Timeout, TransportError, lost

_PATIENCE = 5.0  # seconds that connecting may take, however short the timeout is
_MOST_PATIENCE = 30.0  # and however long it is
_PULSE = 1.0  # seconds after which a rank that waits says its view again
_NEWS = 2.0  # seconds in which a death is heard of that made connecting fail
_LINGER = 1.0  # seconds for the others' DONE, at the end

_log = logging.getLogger("gradwire")


class _Closable(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Closable)


class _Narrowed(Exception):
    """The view that an attempt was for is no longer this rank's."""


def shrink(
    mesh: Mesh,
    lines: Lines,
    make: Callable[[Mesh, float], _Made],
    *,
    transports: Sequence[str],
    timeout: float,
) -> _Made:
    """What `make(mesh, seconds)` makes of the survivors' mesh; they keep their order.

    `mesh` is the failed communicator's. Who says nothing for `timeout` seconds is left out, and so
    is who falls silent later. Closes the lines. Raises TransportError on a rank that was left out,
    and RendezvousError where the survivors cannot connect to each other.
    """
    with contextlib.closing(lines):
        return _Shrink(mesh, lines, make, transports, timeout).run()


class _Shrink(Generic[_Made]):
    """One rank's part. Ranks have the numbers of the failed communicator."""

    def __init__(
        self,
        mesh: Mesh,
        lines: Lines,
        make: Callable[[Mesh, float], _Made],
        transports: Sequence[str],
        timeout: float,
    ) -> None:
        self._mesh, self._rank, self._lines = mesh, mesh.rank, lines
        self._make, self._transports = make, transports
        self._patience = min(max(timeout, _PATIENCE), _MOST_PATIENCE)
        self._pulse = Deadline(_PULSE)
        self._heard: set[int] = set()  # who said anything since connecting failed
        self._verdict: TransportError | None = None  # that the others left this rank out
        self._view: View = lines.peers | {mesh.rank}
        self._limits = dict.fromkeys(lines.peers, Deadline(timeout))  # of each peer's silence
        # What each peer said last, and for which view.
        self._views: dict[int, View] = {}
        self._cards: dict[int, tuple[View, bytes]] = {}
        self._ready: dict[int, View] = {}
        self._done: dict[int, View] = {}
        self._candidate: tuple[View, _Made] | None = None

    def run(self) -> _Made:
        try:
            self._tell(Kind.VIEW, self._view)
            view, made = self._regroup()
        except BaseException:
            self._drop_candidate()
            raise
        self._take_leave(view)
        _log.warning(
            "rank %d goes on as rank %d of %d: ranks %s of %d survived",
            self._rank,
            sorted(view).index(self._rank),
            len(view),
            _names(view),
            self._mesh.size,
        )
        return made

    def _regroup(self) -> tuple[View, _Made]:
        while True:
            self._wait(self._disagreeing)
            if self._candidate is not None and self._is_done():
                return self._candidate
            self._drop_candidate()
            with contextlib.suppress(_Narrowed):
                return self._try(self._view)

    def _try(self, view: View) -> tuple[View, _Made]:
        self._candidate = found = view, self._connect(view)
        self._tell(Kind.READY, view)
        self._wait(lambda: self._not_ready(view))
        return found

    def _connect(self, view: View) -> _Made:
        members = sorted(view)
        name = f"{self._mesh.communicator}/shrink/{members}"
        try:
            mesh = connect_mesh(
                self._mesh.job,
                lambda card, _: self._exchange(card, view),
                rank=members.index(self._rank),
                size=len(members),
                communicator=int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"),
                deadline=Deadline(self._patience),
                transports=self._transports,
                interface=self._mesh.interface,
                hear=lambda within: self._hear(view, within),
            )
            self._speak()  # to make it takes a while, again
            return self._make(mesh, self._patience)
        except Error as error:
            if error is not self._verdict:
                self._call_roll(view, _blamed(error, members))
            raise

    def _call_roll(self, view: View, blamed: set[int]) -> None:
        """Connecting failed: raises _Narrowed where somebody is left out for it."""
        self._hear(view, _NEWS)  # did a rank die, the end of whose line is heard later?
        self._heard.clear()
        self._wait(lambda: self._unheard(view))
        if blamed - {self._rank}:
            self._leave_out(blamed, "it kept the others waiting when they connected")
            self._require(view)

    def _exchange(self, card: bytes, view: View) -> list[bytes]:
        self._cards[self._rank] = view, card
        self._tell(Kind.CARD, view, card)
        self._wait(lambda: self._without_card(view))
        return [self._cards[rank][1] for rank in sorted(view)]

    # Whom this rank waits for; nobody where it is done.

    def _disagreeing(self) -> Iterable[int]:
        return () if self._is_done() else self._lacking(self._view, self._views)

    def _without_card(self, view: View) -> Iterable[int]:
        self._require(view)
        return self._lacking(view, {peer: of for peer, (of, _) in self._cards.items()})

    def _not_ready(self, view: View) -> Iterable[int]:
        if self._is_done():
            return ()
        self._require(view)
        return self._lacking(view, self._ready)

    def _unheard(self, view: View) -> Iterable[int]:
        self._require(view)
        return view - self._heard - {self._rank}

    def _lacking(self, view: View, said: Mapping[int, View]) -> set[int]:
        """The peers of the view that did not say `view`."""
        return {peer for peer in view - {self._rank} if said.get(peer) != view}

    def _is_done(self) -> bool:
        if self._candidate is None:
            return False
        view, _ = self._candidate
        everybody = self._view == view and not self._lacking(view, self._ready)
        return everybody or view in self._done.values()

    def _require(self, view: View) -> None:
        if self._view != view:
            raise _Narrowed

    def _wait(self, whom: Callable[[], Iterable[int]]) -> None:
        """Until there is nobody to wait for; leaves out who is silent for too long."""
        while waiting := set(whom()):
            late = {peer for peer in waiting if self._limits[peer].passed}
            self._attend(min(self._limits[peer].remaining for peer in waiting))
            # What was said while this rank was stopped counts.
            late = {peer for peer in late if self._limits[peer].passed}
            if late:
                self._leave_out(late, "nothing was heard of it in time")

    def _hear(self, view: View, within: float) -> None:
        """Raises _Narrowed where the view is smaller within so many seconds."""
        limit = Deadline(within)
        while True:
            self._attend(limit.remaining)
            self._require(view)
            if limit.passed:
                return

    def _attend(self, seconds: float) -> None:
        """Listens, and is heard meanwhile; of one who is not done."""
        if self._pulse.passed:
            self._speak()
        self._listen(min(seconds, self._pulse.remaining))

    def _speak(self) -> None:
        self._pulse = Deadline(_PULSE)
        self._tell(Kind.VIEW, self._view)

    def _listen(self, seconds: float) -> None:
        for event in self._lines.poll(seconds):
            if event.peer not in self._view:
                continue
            if isinstance(event, Gone):
                self._leave_out({event.peer}, event.reason)
            else:
                self._take(event)

    def _take(self, message: Message) -> None:
        peer, kind, view, payload = message
        self._limits[peer] = Deadline(self._patience + _PATIENCE)
        self._heard.add(peer)
        self._views[peer] = view
        if kind is Kind.CARD:
            self._cards[peer] = view, payload
        elif kind is Kind.READY:
            self._ready[peer] = view
        elif kind is Kind.DONE:
            self._done[peer] = view
        if self._rank not in view and not self._is_done():
            self._verdict = _left_out(self._rank, peer)
            raise self._verdict
        self._narrow(self._view & view)

    def _leave_out(self, peers: Iterable[int], reason: str) -> None:
        _log.info("rank %d leaves out rank %s: %s", self._rank, _names(peers), reason)
        self._narrow(self._view.difference(peers))

    def _narrow(self, view: View) -> None:
        if view != self._view and not self._is_done():
            told, self._view = self._view, view
            self._tell(Kind.VIEW, view, whom=told)  # those that are left out, too

    def _tell(self, kind: Kind, view: View, payload: bytes = b"", whom: View | None = None) -> None:
        for peer in (whom or view) - {self._rank}:
            self._lines.send(peer, kind, view, payload)

    def _take_leave(self, view: View) -> None:
        """Says DONE, and lets the others say it: a line that is closed unread may lose words."""
        self._tell(Kind.DONE, view)
        limit = Deadline(_LINGER)
        while not limit.passed and self._lacking(view, self._done) & self._lines.peers:
            self._listen(limit.remaining)

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            _, made = self._candidate
            self._candidate = None
            made.close()


def _left_out(rank: int, by: int) -> TransportError:
    return lost(
        by,
        f"rank {rank}: the other survivors, rank {by} among them, have left this rank out of the "
        "new communicator, because it came to shrink() too late or was silent: end this process, "
        "or give all ranks more time with timeout=",
    )


def _blamed(error: Error, members: Sequence[int]) -> set[int]:
    """Whom an error of the candidate names, by the old numbers."""
    if isinstance(error, Timeout | TransportError) and 0 <= error.peer < len(members):
        return {members[error.peer]}
    return set()


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
