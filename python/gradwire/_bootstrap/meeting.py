"""What the ranks tell each other through a store before they are connected.

Also where one of them gives up: then the others hear why at once, and not at their deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gradwire._base.deadline import Deadline
from gradwire._bootstrap.mesh import host_identity, process_name
from gradwire._bootstrap.store import StoreClient
from gradwire._bootstrap.world import World
from gradwire._errors import Error, RendezvousError, TransportError, describe, lost
from gradwire._host.interfaces import Route, is_loopback

WARN_SECONDS = 30.0
_NEWS = 0.5  # seconds between looks at how the others fare
_NO_STORE = (
    RendezvousError,
    TransportError,
)  # what a store's client raises where the store is gone

_log = logging.getLogger("gradwire")


class Hosts(NamedTuple):
    """What a rank needs to know of the others before it chooses an address."""

    several: bool
    reached: tuple[str, ...]  # addresses at which other hosts reach the store


class Meeting:
    """One rank's part in one rendezvous; its keys are its own."""

    def __init__(self, store: StoreClient, world: World, prefix: str, deadline: Deadline) -> None:
        self.world = world
        self._store, self._prefix, self._deadline = store, prefix, deadline

    def exchange(self, card: bytes, deadline: Deadline) -> list[bytes]:
        """Every rank's card, in rank order."""
        return self._all_gather("card", card, deadline)

    def compare_hosts(self, route: Route | None) -> Hosts:
        """Where the ranks are; `route` is this rank's to the store, None for a Unix socket."""
        here = host_identity()
        own = json.dumps([here, "" if route is None else route.target]).encode()
        said = [
            _unpack_host(each, rank)
            for rank, each in enumerate(self._all_gather("host", own, self._deadline))
        ]
        beyond = [target for host, target in said if host != here]
        usable = (target for target in beyond if target and not is_loopback(target))
        return Hosts(bool(beyond), tuple(dict.fromkeys(usable)))

    def agree_on_secret(self) -> bytes:
        """Rank 0 makes a secret for this communicator; it is as private as the store."""
        return self.from_rank_0("secret", lambda: secrets.token_bytes(32))

    def from_rank_0(self, what: str, own: Callable[[], bytes]) -> bytes:
        """What rank 0 says, which alone calls `own` for it."""
        if self.world.rank == 0:
            self._store.set(f"{self._prefix}/{what}/0", own())
        return self._get(what, 0, self._deadline)

    @contextlib.contextmanager
    def together(self, *, hosting: bool) -> Iterator[None]:
        """A block in which the others hear of it where this rank fails, or its process ends.

        The first failure counts, so that all raise the root cause. The rank that hosts the store
        stays until all are through. Raises as `hear` does.
        """
        ended = _pack_failure(self.world.rank, f"{self._who} ended while the ranks met")
        self._store.bequeath(self._failure, ended)
        try:
            yield
        except TransportError as error:  # of a peer, which may only have followed another
            self.hear(_NEWS)
            self._tell(error)
            raise
        except BaseException as error:
            self._tell(error)
            raise
        self._leave(hosting)

    def hear(self, within: float) -> None:
        """Raises where another rank has given up, or does so within seconds.

        It is TransportError where that was because a rank is lost, which it names, and else
        RendezvousError.
        """
        if (failure := self._told(within)) is not None:
            raise _unpack_failure(failure, self.world.size)

    def _told(self, within: float) -> bytes | None:
        try:
            return self._store.get(self._failure, within)
        except (TimeoutError, RendezvousError):  # nothing is, or the launcher's store is gone
            return None

    @property
    def _failure(self) -> str:
        return f"{self._prefix}/failure"

    @property
    def _who(self) -> str:
        return f"rank {self.world.rank} ({process_name()})"

    def _tell(self, error: BaseException) -> None:
        with contextlib.suppress(Error, OSError):
            # What a process left when it ended is not counted, but came first.
            if self._told(0) is None and self._store.add(f"{self._prefix}/failures") == 1:
                culprit = error.peer if isinstance(error, TransportError) else None
                failure = _pack_failure(culprit, f"{self._who} gave up: {describe(error)}")
                self._store.set(self._failure, failure)

    def _leave(self, hosting: bool) -> None:
        if hosting:
            self._all_gather("through", b"", self._deadline)
            return
        with contextlib.suppress(*_NO_STORE):  # its host may be through before
            self._store.set(f"{self._prefix}/through/{self.world.rank}", b"")
            self._store.bequeath("", b"")

    def _all_gather(self, what: str, own: bytes, deadline: Deadline) -> list[bytes]:
        self._store.set(f"{self._prefix}/{what}/{self.world.rank}", own)
        return [self._get(what, peer, deadline) for peer in range(self.world.size)]

    def _get(self, what: str, peer: int, deadline: Deadline) -> bytes:
        def get(seconds: float) -> bytes:
            try:
                return self._store.get(f"{self._prefix}/{what}/{peer}", seconds)
            except TimeoutError:
                self.hear(0)
                raise

        def missing() -> list[int]:
            return [rank for rank in range(self.world.size) if not self._present(what, rank)]

        return await_rank(peer, self.world, deadline, get, missing)

    def _present(self, what: str, rank: int) -> bool:
        try:
            self._store.get(f"{self._prefix}/{what}/{rank}", 0)
        except TimeoutError:
            return False
        except _NO_STORE:  # the store's host is at its deadline too: nothing more is known
            return True
        return True


def await_rank(
    peer: int,
    world: World,
    deadline: Deadline,
    get: Callable[[float], bytes],
    missing: Callable[[], Sequence[int]] = tuple,
) -> bytes:
    """What a rank says: `get` waits for it for some seconds, and raises TimeoutError.

    Raises RendezvousError at the deadline, which names those that are `missing` then.
    """
    warning = deadline.within(WARN_SECONDS)
    while True:
        with contextlib.suppress(TimeoutError):
            return get(min(_NEWS, warning.remaining))
        if deadline.passed:
            raise _missing(missing() or [peer], world, deadline)
        if warning.passed:
            _log.warning("still waiting for rank %d of %d to appear", peer, world.size)
            warning = deadline


def _missing(ranks: Sequence[int], world: World, deadline: Deadline) -> RendezvousError:
    return RendezvousError(
        f"timed out: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of "
        f"{world.size} did not appear within {deadline.seconds:g} s; look at their output for "
        f"the reason, check that all {world.size} were started, or give more time with timeout="
    )


def _pack_failure(culprit: int | None, text: str) -> bytes:
    """Why a rank gives up, and which rank it has lost, if it has."""
    return f"{'-' if culprit is None else culprit} {text}".encode()


def _unpack_failure(data: bytes, size: int) -> Error:
    culprit, _, text = data.decode(errors="replace").partition(" ")
    if culprit in map(str, range(size)):
        return lost(int(culprit), text)
    return RendezvousError(text)


def _unpack_host(data: bytes, rank: int) -> tuple[str, str]:
    try:
        found: Any = json.loads(data)
        host, target = found
        if not (isinstance(host, str) and isinstance(target, str)):
            raise TypeError
        if target:
            is_loopback(target)
    except (ValueError, TypeError, RecursionError):
        raise RendezvousError(
            f"rank {rank} did not say which host it is on: another gradwire version?"
        ) from None
    return host, target
