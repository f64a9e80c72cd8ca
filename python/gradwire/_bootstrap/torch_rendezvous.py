"""The rendezvous through torch's own store, in which rank 0 advertises one of gradwire's.

Whoever reaches torch's store reads and writes it. So ranks of one host meet at a Unix socket, which
other users neither reach nor serve; on several, who only reads torch's store learns nothing.

    PREFIX/store/0   where rank 0's store is, or why it gives up; not where agents restart ranks
    PREFIX/ask/RANK, PREFIX/answer/RANK/NAME   see `asks`
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from functools import cache

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.advertised_store import (
    Endpoint,
    advertised_store,
    endpoint_at,
    pack_failure,
    require_here,
    unpack_endpoint,
    unpack_place,
)
from gradwire._bootstrap.handshake import dial
from gradwire._bootstrap.job_secret import HOW_TO_MAKE
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.rendezvous_exchange import await_rank
from gradwire._bootstrap.shared_port import chosen_port
from gradwire._bootstrap.store import Address, StoreClient
from gradwire._bootstrap.through_torch import asks
from gradwire._bootstrap.through_torch.open_exchange import Question
from gradwire._bootstrap.through_torch.torch_store import TorchStore
from gradwire._errors import Error, describe, lost
from gradwire._host.interfaces import Route, choose, is_loopback, route_to

_POLL_SECONDS = 0.1  # torch's store does not let Ctrl-C through while it waits

_log = logging.getLogger("gradwire")


class TorchRendezvous:
    """One rank's part in a rendezvous through torch's store, which is at `place`."""

    def __init__(
        self,
        launch: LaunchInfo,
        place: tuple[str, int],
        secret: bytes | None,
        prefix: str,
        deadline: Deadline,
    ) -> None:
        self._launch, self._place, self._secret = launch, place, secret
        self._prefix, self._deadline = prefix, deadline
        self._torch = TorchStore(*place, launch.rank, launch.size, deadline)
        self._route = route_to(*place)
        self._question = Question() if secret is None else None
        question = b"" if self._question is None else self._question.message
        self._answer = asks.ask(self._torch, prefix, launch.rank, self._route.target, question)
        self._answers: asks.Answers | None = None

    @contextlib.contextmanager
    def open_store(self) -> Iterator[tuple[StoreClient, bytes | None]]:
        """A client of the store that rank 0 opens and advertises in torch's; and the job's secret.

        Returns and raises as `advertised_store`.
        """
        rank, failure = self._launch.rank, None
        where = (self._advertise, self._find, self._deadline)
        try:
            at = self._choose_address() if rank == 0 else None
            with advertised_store(self._launch.job, self._secret, at, *where, rank=rank) as found:
                yield found
        except BaseException as error:
            failure = pack_failure(describe(error))
            raise
        finally:
            if rank == 0:
                self._end(failure)

    def _choose_address(self) -> Address:
        """Chooses an address at which the other ranks reach rank 0."""
        at = _choose_store_address(self._launch, self._route, self._route_of)
        if self._secret is None and not at.local:
            warn_of_no_secret("torch's store at {}:{}".format(*self._place))
        return at

    def _advertise(self, endpoint: Endpoint) -> None:
        """Tells the other ranks where rank 0's store is."""
        if not self._launch.restarts:
            self._torch.set(f"{self._prefix}/store/0", endpoint.where.encode())
        if self._launch.restarts or not (endpoint.given or endpoint.address.local):
            self._begin_answers(endpoint.pack_for)

    def _find(self) -> Endpoint:
        """Waits for what rank 0 advertises."""
        if self._launch.restarts:
            return self._unpack(self._await(self._answer))
        place = unpack_place(self._await(f"{self._prefix}/store/0"))
        self._check(place.address)
        if self._secret is not None or place.given or place.address.local:
            return endpoint_at(place, b"", self._secret, self._question)
        return self._unpack(self._await(self._answer, lambda: _require_alive(place.address)))

    def _end(self, failure: bytes | None) -> None:
        """Ends rank 0's part; with a `failure`, tells the ranks that have come or will."""
        with contextlib.suppress(Error):
            if failure is not None and not self._launch.restarts:
                self._torch.set(f"{self._prefix}/store/0", failure)
            if failure is not None and self._answers is None and self._launch.restarts:
                self._begin_answers(lambda _: failure)
        if self._answers is not None:
            self._answers.end(failure)

    def _begin_answers(self, answer: Callable[[bytes], bytes]) -> None:
        beside = TorchStore(*self._place, 1, 2, self._deadline)
        self._answers = asks.Answers(beside, self._prefix, self._launch.size, answer)

    def _unpack(self, answer: bytes) -> Endpoint:
        endpoint = unpack_endpoint(answer, self._secret, self._question)
        self._check(endpoint.address)
        return endpoint

    def _check(self, address: Address) -> None:
        if self._secret is None and self._launch.local_size == self._launch.size:
            require_here(address)

    def _route_of(self, peer: int) -> str:
        return asks.route_in(self._await(f"{self._prefix}/ask/{peer}", peer=peer))

    def _await(self, key: str, check: Callable[[], None] = lambda: None, peer: int = 0) -> bytes:
        def get(limit: float) -> bytes:
            try:
                return self._torch.get(key, min(limit, _POLL_SECONDS))
            except TimeoutError:
                check()
                raise

        return await_rank(peer, self._launch, self._deadline, get)


@cache  # a job's groups, one by one, have nothing new to say
def warn_of_no_secret(carrier: str) -> None:
    """Logs on rank 0 what ranks on several hosts are open to without a secret, and the remedy."""
    _log.warning(
        "no GRADWIRE_SECRET on several hosts: ranks exchange public keys through %s, which keeps "
        "out who only listens, and not who changes what is in it or on the way. Set a secret, the "
        "same on all hosts: `%s`",
        *(carrier, HOW_TO_MAKE),
    )


def _require_alive(address: Address) -> None:
    """Raises TransportError where nobody listens any more at the address of rank 0's store."""
    try:
        dial(*address.resolve()[0], 1.0).close()
    except ConnectionRefusedError as error:
        raise lost(0, f"the store at {address} is gone ({error})") from error
    except OSError:  # a busy one is not gone
        return


def _choose_store_address(
    launch: LaunchInfo, route: Route, route_of: Callable[[int], str]
) -> Address:
    """Chooses an address at which the other ranks reach rank 0; `route` leads to torch's store."""
    here = Address("unix", f"gradwire-{secrets.token_hex(8)}")
    if launch.local_size == launch.size:
        return here
    reached: list[str] = []
    if is_loopback(route.source):  # torch's store is on this host; the others know its address
        known = [route_of(peer) for peer in range(1, launch.size)]
        reached = [target for target in known if _is_reachable_elsewhere(target)]
        if not reached:
            return here
    # Where nothing says whether there are several hosts, the user's choice of interface does.
    several = launch.several_hosts or environment.text("GRADWIRE_SOCKET_IFNAME") is None
    choice = choose(route.source, several_hosts=several, reached=reached)
    return Address("tcp", choice.interface.address, chosen_port())


def _is_reachable_elsewhere(target: str) -> bool:
    try:
        return not is_loopback(target)
    except ValueError:  # not an address
        return False
