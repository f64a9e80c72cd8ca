"""shrink: the survivors of a failed communicator agree on who they are, and connect anew.

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
came late, is before so and raises; if it was done with V, its communicator fails at the first call.
Hosts that cannot reach each other take each other to be dead, and each side goes on.
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
from gradwire._bootstrap.survivor_links import LinkEnded, Message, MessageKind, SurvivorLinks, View
from gradwire._errors import Error, Timeout, TransportError, naming

_LEAST_CONNECT_SECONDS = 5.0  # that connecting may take, however short the timeout is
_MOST_CONNECT_SECONDS = 30.0  # the same, however long it is
_REPEAT_SECONDS = 1.0  # after which a waiting rank sends its view again
_DEATH_REPORT_SECONDS = 2.0  # in which the death that made connecting fail becomes known
_DONE_SECONDS = 1.0  # for the others' DONE, at the end

_log = logging.getLogger("gradwire")


class _Closable(Protocol):
    def close(self) -> None: ...


_Made = TypeVar("_Made", bound=_Closable)


class _ViewChanged(Exception):
    """Raised when this rank's view is no longer the one that an attempt was for."""


def shrink(
    mesh: Mesh,
    links: SurvivorLinks,
    make: Callable[[Mesh, float], _Made],
    *,
    transports: Sequence[str],
    timeout: float,
) -> _Made:
    """Connects the survivors, in their old order; returns `make(mesh, connect_timeout)`.

    `mesh` is the failed communicator's. A rank that sends nothing for `timeout` seconds is left
    out, and so is one that falls silent later. Closes the links. Raises TransportError on a rank
    that was left out, and RendezvousError when the survivors cannot connect to each other.
    """
    with contextlib.closing(links):
        return _Shrink(mesh, links, make, transports, timeout).run()


class _Shrink(Generic[_Made]):
    """One rank's part; ranks have the numbers of the failed communicator."""

    def __init__(
        self,
        mesh: Mesh,
        links: SurvivorLinks,
        make: Callable[[Mesh, float], _Made],
        transports: Sequence[str],
        timeout: float,
    ) -> None:
        self._mesh, self._rank, self._links = mesh, mesh.rank, links
        self._make, self._transports = make, transports
        self._connect_timeout = min(max(timeout, _LEAST_CONNECT_SECONDS), _MOST_CONNECT_SECONDS)
        self._repeat_at = Deadline(_REPEAT_SECONDS)
        self._active: set[int] = set()  # ranks that sent anything since connecting failed
        self._exclusion: TransportError | None = None  # raised when the others left this rank out
        self._view: View = links.peers | {mesh.rank}
        self._limits = dict.fromkeys(links.peers, Deadline(timeout))  # of silence
        # The last message of each kind by peer, and the view that it was for.
        self._views: dict[int, View] = {}
        self._addresses: dict[int, tuple[View, bytes]] = {}
        self._ready: dict[int, View] = {}
        self._done: dict[int, View] = {}
        self._candidate: tuple[View, _Made] | None = None

    def run(self) -> _Made:
        try:
            self._send(MessageKind.VIEW, self._view)
            view, made = self._regroup()
        except BaseException:
            self._drop_candidate()
            raise
        self._announce_done(view)
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
            self._wait(self._without_agreement)
            if self._candidate is not None and self._is_done():
                return self._candidate
            self._drop_candidate()
            with contextlib.suppress(_ViewChanged):
                return self._try(self._view)

    def _try(self, view: View) -> tuple[View, _Made]:
        self._candidate = found = view, self._connect(view)
        self._send(MessageKind.READY, view)
        self._wait(lambda: self._not_ready(view))
        return found

    def _connect(self, view: View) -> _Made:
        members = sorted(view)
        name = f"{self._mesh.communicator}/shrink/{members}"
        try:
            mesh = connect_mesh(
                self._mesh.job,
                lambda own, _: self._exchange(own, view),
                rank=members.index(self._rank),
                size=len(members),
                communicator=int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"),
                deadline=Deadline(self._connect_timeout),
                transports=self._transports,
                interface=self._mesh.interface,
                raise_if_peer_failed=lambda within: self._watch_view(view, within),
                job_ranks=map(self._mesh.job_rank, members),
            )
            self._send_view()  # `make` takes a while too
            return self._make(mesh, self._connect_timeout)
        except Error as error:
            if error is not self._exclusion:
                self._find_stuck_ranks(view, _ranks_named_by(error, members))
            raise

    def _find_stuck_ranks(self, view: View, named: set[int]) -> None:
        """Leaves out stuck ranks, and those that the error names, after connecting failed.

        Raises _ViewChanged when the view has become smaller.
        """
        self._watch_view(
            view, _DEATH_REPORT_SECONDS
        )  # the end of a dead rank's link may come later
        self._active.clear()
        self._wait(lambda: self._silent(view))
        if named - {self._rank}:
            self._leave_out(named, "it kept the others waiting when they connected")
            self._require_view(view)

    def _exchange(self, own: bytes, view: View) -> list[bytes]:
        self._addresses[self._rank] = view, own
        self._send(MessageKind.ADDRESS, view, own)
        self._wait(lambda: self._without_address(view))
        return [self._addresses[rank][1] for rank in sorted(view)]

    # The ranks that this rank waits for; none when it is done.

    def _without_agreement(self) -> Iterable[int]:
        return () if self._is_done() else self._without(self._view, self._views)

    def _without_address(self, view: View) -> Iterable[int]:
        self._require_view(view)
        return self._without(view, {peer: of for peer, (of, _) in self._addresses.items()})

    def _not_ready(self, view: View) -> Iterable[int]:
        if self._is_done():
            return ()
        self._require_view(view)
        return self._without(view, self._ready)

    def _silent(self, view: View) -> Iterable[int]:
        self._require_view(view)
        return view - self._active - {self._rank}

    def _without(self, view: View, last: Mapping[int, View]) -> set[int]:
        """The peers of the view whose view in `last` is another one."""
        return {peer for peer in view - {self._rank} if last.get(peer) != view}

    def _is_done(self) -> bool:
        if self._candidate is None:
            return False
        view, _ = self._candidate
        everybody = self._view == view and not self._without(view, self._ready)
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

    def _listen(self, seconds: float) -> None:
        for event in self._links.poll(seconds):
            if event.peer not in self._view:
                continue
            if isinstance(event, LinkEnded):
                self._leave_out({event.peer}, event.reason)
            else:
                self._receive(event)

    def _receive(self, message: Message) -> None:
        peer, kind, view, payload = message
        self._limits[peer] = Deadline(self._connect_timeout + _LEAST_CONNECT_SECONDS)
        self._active.add(peer)
        self._views[peer] = view
        if kind is MessageKind.ADDRESS:
            self._addresses[peer] = view, payload
        elif kind is MessageKind.READY:
            self._ready[peer] = view
        elif kind is MessageKind.DONE:
            self._done[peer] = view
        if self._rank not in view and not self._is_done():
            self._exclusion = naming(_left_out(self._rank, peer), peer, self._mesh.job_rank(peer))
            raise self._exclusion
        self._shrink_view(self._view & view)

    def _leave_out(self, peers: Iterable[int], reason: str) -> None:
        _log.info("rank %d leaves out rank %s: %s", self._rank, _names(peers), reason)
        self._shrink_view(self._view.difference(peers))

    def _shrink_view(self, view: View) -> None:
        if view != self._view and not self._is_done():
            before, self._view = self._view, view
            self._send(MessageKind.VIEW, view, whom=before)  # also those that are left out

    def _send(
        self, kind: MessageKind, view: View, payload: bytes = b"", whom: View | None = None
    ) -> None:
        for peer in (whom or view) - {self._rank}:
            self._links.send(peer, kind, view, payload)

    def _announce_done(self, view: View) -> None:
        """Sends DONE and awaits the others': closing a link with unread data may lose messages."""
        self._send(MessageKind.DONE, view)
        limit = Deadline(_DONE_SECONDS)
        while not limit.passed and self._without(view, self._done) & self._links.peers:
            self._listen(limit.remaining)

    def _drop_candidate(self) -> None:
        if self._candidate is not None:
            _, made = self._candidate
            self._candidate = None
            made.close()


def _left_out(rank: int, by: int) -> TransportError:
    return TransportError(
        f"rank {rank}: the other survivors, rank {by} among them, have left this rank out of the "
        "new communicator, because it came to shrink() too late or was silent: end this process, "
        "or give all ranks more time with timeout=",
    )


def _ranks_named_by(error: Error, members: Sequence[int]) -> set[int]:
    """The rank that an error names, in the failed communicator's numbers; empty for none."""
    if isinstance(error, Timeout | TransportError) and 0 <= error.peer < len(members):
        return {members[error.peer]}
    return set()


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
