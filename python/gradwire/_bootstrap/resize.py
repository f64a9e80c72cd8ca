"""resize: survivors agree as in `shrink`, and their leader lets joiners in.

Joiners have the numbers from the size of the ended communicator on, as peers of their leader.
docs/design/agreement.md says why that keeps the agreement among ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.join_listener import Joiner, JoinListener, require_given_secret
from gradwire._bootstrap.joining import Invitation
from gradwire._bootstrap.mesh import Mesh, unpack_address_info
from gradwire._bootstrap.shrink import Agreement, Made, ViewChanged
from gradwire._bootstrap.store import parse_address
from gradwire._bootstrap.survivor_links import (
    MOST_JOINERS,
    Addresses,
    Message,
    MessageKind,
    SurvivorLinks,
    View,
)
from gradwire._bootstrap.through_torch.torch_store import parse_torch_address
from gradwire._errors import InvalidArgument, RendezvousError, describe
from gradwire._host.encryption import allowed
from gradwire._host.interfaces import choose, is_loopback, route_to
from gradwire._host.transport_kinds import DEFAULTS
from gradwire._model import pack

_JOINER_SECONDS = 5.0  # in which a joiner answers an invitation
_LOOK_SECONDS = 0.05  # between two looks for joiners
_MOST_ROUNDS = 255

_log = logging.getLogger("gradwire")


@dataclass
class ResizeOptions:
    """The rules by which a resize lets processes in, the same on all ranks; and the listener."""

    open_listener: Callable[[], JoinListener]  # called on the leader
    wait: float = 0.0  # seconds, while there are fewer ranks than
    least: int | None = 1  # None: a majority of the ended communicator's ranks must be left
    most: int | None = None
    listener: JoinListener | None = None  # once this rank has been the leader


class Resize(Agreement[Made]):
    """One rank's part in a resize: the leader lets joiners in, after the survivors.

    `run` raises RendezvousError also when the survivors are no majority, or are too few at the end
    of the wait.
    """

    def __init__(
        self,
        mesh: Mesh,
        links: SurvivorLinks,
        make: Callable[[Mesh, float], Made],
        options: ResizeOptions,
        timeout: float,
    ) -> None:
        super().__init__(mesh, links, make, transports_of(mesh), timeout)
        self._view = self._view._replace(joiners=None)
        self._options = options
        self._wait_over = Deadline(options.wait)
        self._joiners: list[Joiner] = []  # that this rank has admitted, as leader
        self._told: set[int] = set()  # those that know that they are in
        self._refused: dict[int, View] = {}  # by the leader that sent TOO_FEW

    def _may_try(self, view: View) -> bool:
        """Whether so many are in the view; else waits for joiners, or for the leader.

        Raises RendezvousError for a minority, and when the time to wait is over.
        """
        self._require_majority()
        if view.joiners is not None and view.size >= (self._options.least or 1):
            return True
        if self._rank == view.leader:
            self._admit_joiners(view)
            return False
        self._wait(lambda: self._without_decision(view))
        if self._refused.get(view.leader) == view:
            raise self._too_few(view)
        return True

    def _admit_joiners(self, view: View) -> None:
        """Waits for joiners where ranks are too few, and says whom this leader admits."""
        options, ranks = self._options, len(view.ranks)
        listener = options.listener = options.listener or options.open_listener()
        most = MOST_JOINERS if options.most is None else options.most - ranks
        while True:
            room = min(most - len(self._admitted()), MOST_JOINERS - len(self._joiners))
            for joiner in listener.take(max(room, 0)):
                peer = self._peer(len(self._joiners))
                self._joiners.append(joiner)
                self._links.add(peer, joiner.sock)
                self._limits[peer] = Deadline(_JOINER_SECONDS)
            admitted = self._admitted()
            enough = ranks + len(admitted) >= (options.least or 1)
            if enough or self._wait_over.passed or view.round == _MOST_ROUNDS:
                break
            self._watch_view(view, min(_LOOK_SECONDS, self._wait_over.remaining))
        if not enough and view.joiners is not None:
            self._send(MessageKind.TOO_FEW, view)
            raise self._too_few(view)
        number = view.round + (view.joiners is not None)
        self._shrink_view(View(view.ranks, frozenset(admitted), number))

    def _admitted(self) -> set[int]:
        """The joiners that this leader has and nobody left out; also from before a rank died."""
        numbers = range(len(self._joiners))
        return {number for number in numbers if self._peer(number) in self._links.peers}

    def _too_few(self, view: View) -> RendezvousError:
        options, listener = self._options, self._options.listener
        trouble = f" ({listener.trouble})" if listener and listener.trouble else ""
        return RendezvousError(
            f"rank {self._rank}: {view.size} rank{'s are' if view.size > 1 else ' is'} here after "
            f"wait={options.wait:g} s, and min_ranks={options.least}{trouble}: the others have "
            "failed, or the network between them and this part of the ranks has; start more "
            "processes that call gradwire.join(), or wait longer"
        )

    def _without_decision(self, view: View) -> Iterable[int]:
        """The leader, until it goes on with the view or gives up."""
        self._require_view(view)
        leader = view.leader
        if self._refused.get(leader) == view or self._addresses.get(leader) == view:
            return ()
        return {leader}

    def _addresses_of_joiners(self, view: View, communicator: int) -> Addresses:
        """Asks the joiners for their addresses; leaves out those that send none."""
        peers = sorted(self._joiners_of(view))
        if not peers:
            return Addresses([])
        self._invite(view, peers, communicator)
        self._wait(lambda: self._joiners_without(view, self._addresses))
        addresses = [self._packed[each] for each in peers]
        for peer, address in zip(peers, addresses, strict=True):
            try:
                unpack_address_info(address, peer)
            except RendezvousError as error:
                self._leave_out({peer}, describe(error))
                raise ViewChanged from None
        ranks = list(map(self._mesh.job_rank, view.ranks))
        return Addresses(addresses, self._numbers_of(peers, ranks))

    def _numbers_of(self, peers: Iterable[int], taken: list[int]) -> list[int]:
        """The joiners' numbers in the job: their launcher's, where free, or others."""
        found: list[int] = []
        for peer in peers:
            number = self._joiners[peer - self._mesh.size].number
            if number < 0 or number in taken:
                number = max(taken) + 1
            taken.append(number)
            found.append(number)
        return found

    def _invite(self, view: View, peers: Sequence[int], communicator: int) -> None:
        for index, peer in enumerate(peers):
            self._limits[peer] = Deadline(_JOINER_SECONDS)
            invitation = Invitation(
                rank=len(view.ranks) + index,
                size=view.size,
                communicator=communicator,
                epoch=self._mesh.membership.epoch + 1,
                joined=len(peers),
                seconds=self._connect_timeout,
                model=None if self._mesh.model is None else pack(self._mesh.model).decode(),
            )
            self._links.send(peer, MessageKind.INVITE, view, invitation.pack())

    def _joiners_of(self, view: View) -> set[int]:
        return self._peers(view.joiners) if self._rank == view.leader else set()

    def _receive(self, message: Message) -> None:
        peer, kind, view, _ = message
        too_few = kind is MessageKind.TOO_FEW and peer < self._mesh.size
        if too_few:
            self._refused[peer] = view
        elif kind is MessageKind.DONE and peer >= self._mesh.size:
            self._told.add(peer)
        super()._receive(message)
        if too_few and not self._is_done():
            self._require_majority()

    def _require_majority(self) -> None:
        """Raises RendezvousError where a majority is needed, and the agreed view is none."""
        left, size = self._view.ranks, self._mesh.size
        if self._options.least is None and not _is_majority(left, size):
            self._send(MessageKind.TOO_FEW, self._view)
            raise _no_majority(self._rank, left, size)

    def _announce_done(self, view: View) -> None:
        """Tells joiners last, once no rank turned out to have left this one out."""
        super()._announce_done(view)
        self._tell_joiners(MessageKind.DONE, view)
        self._await_confirmations(lambda: self._joiners_of(view) - self._told)


def open_listener(mesh: Mesh) -> JoinListener:
    """Listens where those who join reach it; raises RendezvousError where nobody may."""
    require_secret_to_join(mesh)
    _listen_beyond_loopback(mesh)
    return JoinListener(mesh, transports_of(mesh))


def resize_options(
    mesh: Mesh, store: str | None, wait: float, min_ranks: int | None
) -> ResizeOptions:
    """Checks the arguments of a resize, and has the mesh listen where those who join reach it.

    Raises InvalidArgument, and RendezvousError where nobody may join.
    """
    if store is not None:
        _place_of(arguments.text(store, "store"))
    seconds = arguments.number(wait, "wait")
    if not seconds >= 0:
        raise InvalidArgument(f"wait={wait!r} is not a number of seconds")
    least, most = _ranks_in("GRADWIRE_MIN_RANKS"), _ranks_in("GRADWIRE_MAX_RANKS")
    if min_ranks is not None:
        least = arguments.whole(min_ranks, "min_ranks", least=1)
    if most is not None and least is not None and least > most:
        raise InvalidArgument(f"min_ranks={least} is more than GRADWIRE_MAX_RANKS={most}")
    if store is not None:
        mesh.membership = replace(mesh.membership, store=store)
    require_secret_to_join(mesh)
    _listen_beyond_loopback(mesh)
    return ResizeOptions(partial(open_listener, mesh), seconds, least, most)


def require_secret_to_join(mesh: Mesh) -> None:
    """Raises RendezvousError, alike on all ranks, where those who join look in torch's store.

    That needs a given secret: others read and write that store.
    """
    store = mesh.membership.store
    if store is not None and store.startswith("torch:"):
        require_given_secret(mesh, store)


def has_room(mesh: Mesh) -> bool:
    """Whether another rank may join; raises InvalidArgument for a limit that is no number."""
    most = _ranks_in("GRADWIRE_MAX_RANKS")
    return most is None or mesh.size < most


def transports_of(mesh: Mesh) -> Sequence[str]:
    """The transports that a mesh offers to those who join."""
    return mesh.membership.offered or mesh.transports or allowed(DEFAULTS)


def _place_of(store: str) -> tuple[str, int] | None:
    """A store's host and port; None for one on this host alone. Raises InvalidArgument."""
    if store.startswith("torch:"):
        return parse_torch_address(store)
    address = parse_address(store)
    return None if address.local else (address.host, address.port)


def _ranks_in(variable: str) -> int | None:
    given = environment.number(variable)
    return None if given is None else int(given)


def _listen_beyond_loopback(mesh: Mesh) -> None:
    """Chooses the address that reaches the store, where all ranks have been on one host so far."""
    store = mesh.membership.store
    if store is None or not mesh.interface.interface.loopback:
        return
    place = _place_of(store)
    if place is None:
        return
    try:
        source = route_to(*place).source
    except RendezvousError as error:
        _log.warning("only processes of this host can join: %s", error)
        return
    if not is_loopback(source):
        mesh.interface = choose(source, several_hosts=True)


def _is_majority(left: Set[int], size: int) -> bool:
    """Whether these of `size` ranks may go on where a network parts them.

    Ranks that cannot reach each other take each other to be dead. More than half of the ranks are a
    majority, and so is a half that has rank 0. Two parts without a rank in common are never both
    one, so at most one goes on. Processes that join do not count: each part might find some.
    """
    return 2 * len(left) + (0 in left) > size


def _no_majority(rank: int, left: Set[int], size: int) -> RendezvousError:
    """The error of a rank that is left with a minority."""
    without = " without rank 0" if 2 * len(left) == size else ""
    return RendezvousError(
        f"rank {rank}: {len(left)} of {size} ranks{without} {'are' if len(left) > 1 else 'is'} no "
        f"majority; pass min_ranks={len(left)} to go on all the same: the others have failed, or "
        "the network between them and this part of the ranks has, and then they may go on; start "
        "again from a checkpoint, or join the others"
    )
