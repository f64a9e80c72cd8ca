"""Messages between ranks, through a store, before they are connected.

A rank that gives up reports it here, so that the others raise the reason at once instead of
waiting for their deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gradwire._base.deadline import Deadline
from gradwire._base.texts import encodable
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.store import StoreClient
from gradwire._errors import Error, RendezvousError, TransportError, describe, lost
from gradwire._host.identity import host_identity, process_name
from gradwire._host.interfaces import Route, is_loopback

WARN_SECONDS = 30.0
_POLL_SECONDS = 0.5  # between two looks at whether a peer has failed
# What a client raises when the store is gone.
_STORE_GONE = (RendezvousError, TransportError)

_log = logging.getLogger("gradwire")


class Hosts(NamedTuple):
    """Facts about the other ranks' hosts that the choice of an address depends on."""

    several: bool
    reached: tuple[str, ...]  # addresses at which other hosts reach the store


class Start(NamedTuple):
    """A start of a launch, as rank 0 tells it to the others."""

    number: int  # a random one that rank 0 has made; the same as long as its process lives
    generation: int  # how many times rank 0 has met the others before, in this start
    size: int


def another_job(what: str) -> RendezvousError:
    """The error where ranks of two jobs, or of two starts of one, meet at one store."""
    return RendezvousError(
        f"{what}: another job uses this store: set GRADWIRE_JOB, to another name in each job and "
        "the same on all of its ranks, or give each job a store of its own"
    )


class RendezvousExchange:
    """One rank's part in one rendezvous; all its keys have a prefix of their own."""

    def __init__(
        self, store: StoreClient, launch: LaunchInfo, prefix: str, deadline: Deadline
    ) -> None:
        self.launch, self.deadline = launch, deadline
        self._store, self._prefix = store, prefix

    def exchange_addresses(self, own: bytes, deadline: Deadline) -> list[bytes]:
        """All ranks' packed AddressInfo, in rank order."""
        return self._all_gather("address", own, deadline)

    def compare_hosts(self, route: Route | None) -> Hosts:
        """Finds where the ranks are; `route` leads to the store, None for a Unix socket."""
        here = host_identity()
        own = json.dumps([here, "" if route is None else route.target]).encode()
        hosts = [
            _unpack_host(each, rank)
            for rank, each in enumerate(self._all_gather("host", own, self.deadline))
        ]
        beyond = [target for host, target in hosts if host != here]
        usable = (target for target in beyond if target and not is_loopback(target))
        return Hosts(bool(beyond), tuple(dict.fromkeys(usable)))

    def agree_on_secret(self) -> bytes:
        """A secret that rank 0 makes for this communicator, where only its user reads the store."""
        return self.broadcast_from_rank_0("secret", lambda: secrets.token_bytes(32))

    def claim_rank(self) -> None:
        """Takes this rank's number; raises, here and on all ranks, where another process has it.

        The error is a RendezvousError.
        """
        rank, own = self.launch.rank, process_name()
        if self._store.add(f"{self._prefix}/claims/{rank}") == 1:
            self._store.set(f"{self._prefix}/claimant/{rank}", own.encode())
            return
        other = "another process"
        with contextlib.suppress(TimeoutError):
            other = self._store.get(f"{self._prefix}/claimant/{rank}", _POLL_SECONDS).decode()
        raise another_job(
            f"{own} is rank {rank} of job {self.launch.job!r}, and so is {other}: that rank was "
            "given twice, or"
        )

    def agree_on_start(self, own: Start) -> Start:
        """Rank 0's start; raises RendezvousError where the job has another size there."""
        packed = json.dumps(own).encode()
        try:
            found = Start(
                *map(int, json.loads(self.broadcast_from_rank_0("start", lambda: packed)))
            )
        except (ValueError, TypeError, RecursionError):
            raise RendezvousError(
                "rank 0 did not say which start of the job this is: another gradwire version?"
            ) from None
        if found.size != own.size:
            raise another_job(
                f"rank 0 has {found.size} ranks in job {self.launch.job!r}, and rank "
                f"{self.launch.rank} ({process_name()}) has {own.size}"
            )
        return found

    def broadcast_from_rank_0(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Rank 0's bytes, on all ranks; only rank 0 calls `make`."""
        if self.launch.rank == 0:
            self._store.set(f"{self._prefix}/{what}/0", make())
        return self._get(what, 0, self.deadline)

    @contextlib.contextmanager
    def abort_on_failure(self, *, hosts_store: bool) -> Iterator[None]:
        """Runs a block; when it fails here, or this process ends, the other ranks fail too.

        Only the first failure is reported, so that all ranks raise the root cause. The rank that
        hosts the store stays until all ranks have finished. Raises as `raise_if_peer_failed` does.
        """
        ended = _pack_failure(self.launch.rank, f"{self._own_name} ended while the ranks met")
        self._store.set_last_will(self._failure_key, ended)
        try:
            yield
        except TransportError as error:  # the lost peer may itself have followed another failure
            self.raise_if_peer_failed(_POLL_SECONDS)
            self._report_failure(error)
            raise
        except BaseException as error:
            self._report_failure(error)
            raise
        self._finish(hosts_store)

    def raise_if_peer_failed(self, within: float) -> None:
        """Raises when another rank has given up, or does so within this many seconds.

        The error is a TransportError that names the rank when a rank was lost, otherwise a
        RendezvousError.
        """
        if (failure := self._read_failure(within)) is not None:
            raise _unpack_failure(failure, self.launch.size)

    def _read_failure(self, within: float) -> bytes | None:
        try:
            return self._store.get(self._failure_key, within)
        except (TimeoutError, RendezvousError):  # no failure, or the launcher's store is gone
            return None

    @property
    def _failure_key(self) -> str:
        return f"{self._prefix}/failure"

    @property
    def _own_name(self) -> str:
        return f"rank {self.launch.rank} ({process_name()})"

    def _report_failure(self, error: BaseException) -> None:
        with contextlib.suppress(Error, OSError):
            # A last will is not counted in "failures", but it came first.
            if self._read_failure(0) is None and self._store.add(f"{self._prefix}/failures") == 1:
                lost_rank = error.peer if isinstance(error, TransportError) else None
                failure = _pack_failure(lost_rank, f"{self._own_name} gave up: {describe(error)}")
                self._store.set(self._failure_key, failure)

    def _finish(self, hosts_store: bool) -> None:
        if hosts_store:
            self._all_gather("finished", b"", self.deadline)
            self.raise_if_peer_failed(0)  # another job may have come
            return
        finished = f"{self._prefix}/finished/{self.launch.rank}"
        with contextlib.suppress(*_STORE_GONE):  # its host may have finished before
            self._store.set_last_will(finished, b"")
            # Then the host closes the store. A later request would make that a reset, which not
            # every router between the two passes on.
            self._store.set(finished, b"")

    def _all_gather(self, what: str, own: bytes, deadline: Deadline) -> list[bytes]:
        self._store.set(f"{self._prefix}/{what}/{self.launch.rank}", own)
        return [self._get(what, peer, deadline) for peer in range(self.launch.size)]

    def _get(self, what: str, peer: int, deadline: Deadline) -> bytes:
        def get(seconds: float) -> bytes:
            try:
                return self._store.get(f"{self._prefix}/{what}/{peer}", seconds)
            except TimeoutError:
                self.raise_if_peer_failed(0)
                raise

        def missing() -> list[int]:
            return [rank for rank in range(self.launch.size) if not self._is_set(what, rank)]

        return await_rank(peer, self.launch, deadline, get, missing)

    def _is_set(self, what: str, rank: int) -> bool:
        try:
            self._store.get(f"{self._prefix}/{what}/{rank}", 0)
        except TimeoutError:
            return False
        except _STORE_GONE:  # the store's host is at its deadline too: nothing more is known
            return True
        return True


def await_rank(
    peer: int,
    launch: LaunchInfo,
    deadline: Deadline,
    get: Callable[[float], bytes],
    find_missing: Callable[[], Sequence[int]] = tuple,
) -> bytes:
    """The bytes that a rank publishes.

    `get` waits for them for some seconds, and raises TimeoutError. At the deadline raises
    RendezvousError, which names the ranks that `find_missing` finds then.
    """
    warning = deadline.within(WARN_SECONDS)
    while True:
        with contextlib.suppress(TimeoutError):
            return get(min(_POLL_SECONDS, warning.remaining))
        if deadline.passed:
            raise _did_not_appear(find_missing() or [peer], launch, deadline)
        if warning.passed:
            _log.warning("still waiting for rank %d of %d to appear", peer, launch.size)
            warning = deadline


def _did_not_appear(
    ranks: Sequence[int], launch: LaunchInfo, deadline: Deadline
) -> RendezvousError:
    return RendezvousError(
        f"timed out: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of "
        f"{launch.size} did not appear within {deadline.seconds:g} s; look at their output for "
        f"the reason, check that all {launch.size} were started, or give more time with timeout="
    )


def _pack_failure(lost_rank: int | None, text: str) -> bytes:
    """Encodes why a rank gives up, and which rank it has lost, if any."""
    return encodable(f"{'-' if lost_rank is None else lost_rank} {text}").encode()


def _unpack_failure(data: bytes, size: int) -> Error:
    lost_rank, _, text = data.decode(errors="replace").partition(" ")
    if lost_rank in map(str, range(size)):
        return lost(int(lost_rank), text)
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
