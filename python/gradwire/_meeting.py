"""What the ranks tell each other through a store before they are connected.

Also where one of them gives up: then the others hear why at once, and not at their deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradwire._deadline import Deadline
from gradwire._errors import Error, RendezvousError, TransportError
from gradwire._interfaces import Route, is_loopback
from gradwire._mesh import host_identity, process_name
from gradwire._store import Store
from gradwire._world import World

WARN_SECONDS = 30.0
_NEWS = 0.5  # seconds between looks at how the others fare

_log = logging.getLogger("gradwire")


class Hosts(NamedTuple):
    """What a rank needs to know of the others before it chooses an address."""

    several: bool
    reached: tuple[str, ...]  # addresses at which other hosts reach the store


class Meeting:
    """One rank's part in one rendezvous; its keys are its own."""

    def __init__(self, store: Store, world: World, prefix: str, deadline: Deadline) -> None:
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
        if self.world.rank == 0:
            self._store.set(f"{self._prefix}/secret/0", secrets.token_bytes(32))
        return self._get("secret", 0, self._deadline)

    @contextlib.contextmanager
    def together(self, *, hosting: bool) -> Iterator[None]:
        """A block in which the others hear of it where this rank fails, or its process ends.

        The first failure counts, so that all raise the root cause. The rank that hosts the store
        stays until all are through.
        """
        self._store.bequeath(self._failure, f"{self._who} ended while the ranks met".encode())
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
        """Raises RendezvousError where another rank has given up, or does so within seconds."""
        if (reason := self._told(within)) is not None:
            raise RendezvousError(reason.decode(errors="replace"))

    def _told(self, within: float) -> bytes | None:
        try:
            return self._store.get(self._failure, within)
        except (TimeoutError, RendezvousError):  # nothing is, or the store is gone
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
                self._store.set(self._failure, f"{self._who} gave up: {error}".encode())

    def _leave(self, hosting: bool) -> None:
        if hosting:
            self._all_gather("through", b"", self._deadline)
            return
        with contextlib.suppress(RendezvousError):  # its host may be through before
            self._store.set(f"{self._prefix}/through/{self.world.rank}", b"")
            self._store.bequeath("", b"")

    def _all_gather(self, what: str, own: bytes, deadline: Deadline) -> list[bytes]:
        self._store.set(f"{self._prefix}/{what}/{self.world.rank}", own)
        return [self._get(what, peer, deadline) for peer in range(self.world.size)]

    def _get(self, what: str, peer: int, deadline: Deadline) -> bytes:
        warning = deadline.within(WARN_SECONDS)
        while True:
            try:
                turn = min(_NEWS, warning.remaining)
                return self._store.get(f"{self._prefix}/{what}/{peer}", turn)
            except TimeoutError:
                self.hear(0)
            if deadline.passed:
                raise self._missing(what, peer, deadline)
            if warning.passed:
                _log.warning("still waiting for rank %d of %d to appear", peer, self.world.size)
                warning = deadline

    def _missing(self, what: str, peer: int, deadline: Deadline) -> RendezvousError:
        ranks = [rank for rank in range(self.world.size) if not self._present(what, rank)]
        names = ", ".join(map(str, ranks or [peer]))
        return RendezvousError(
            f"rank{'s' if len(ranks) > 1 else ''} {names} of {self.world.size} did not appear "
            f"within {deadline.seconds:g} s; look at their output for the reason, check that all "
            f"{self.world.size} were started, or give more time with timeout="
        )

    def _present(self, what: str, rank: int) -> bool:
        try:
            self._store.get(f"{self._prefix}/{what}/{rank}", 0)
        except TimeoutError:
            return False
        except RendezvousError:  # the store's host is at its deadline too: nothing more is known
            return True
        return True


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
