"""The directory of a parameter server: what its processes tell each other through the job's store.

Under `gradwire/JOB/serve/NAME/` stand each shard's address, counters of clients and, in a store on
a Unix socket, which only this user's processes read, a secret where the user gave none. A shard
that is started anew replaces its address; clients read it each time they connect.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._base.shortage import raise_limit
from gradwire._bootstrap.job_secret import find_secret, secret_of_store
from gradwire._bootstrap.launch_info import DEFAULT_JOB
from gradwire._bootstrap.mesh import AddressInfo, Job, unpack_address_info
from gradwire._bootstrap.store import StoreClient, parse_address
from gradwire._errors import Error, InvalidArgument, RendezvousError
from gradwire._host.interfaces import Choice, choose, is_loopback
from gradwire.serve._histories import History, parse

MOST_SHARDS = 1024
_INCARNATIONS = 1 << 16
_THERE, _FAILED = b"there", b"failed"  # what became of initial values


class ShardAddress(NamedTuple):
    """The address of a shard, its history, and the number of shards in all."""

    shards: int
    address: AddressInfo
    history: History


@dataclass(frozen=True)
class Service:
    """The name of one parameter server, and the store through which its processes meet."""

    name: str
    store: str
    job: str
    secret: bytes | None = field(default=None, repr=False)  # of the job, if the user gave one


_found: dict[str, Service] = {}  # those of this launch, by name


def found(service: Service) -> None:
    """Makes a service the one of its name where no store is given."""
    _found[service.name] = service


def service(name: str, store: str | None, secret: bytes | str | None) -> Service:
    """The service of these names, which default to the environment's; raises InvalidArgument.

    Servers that `role` has started go before the environment.
    """
    environment.check()
    raise_limit()
    arguments.text(name, "name")
    if store is None and name in _found and (secret is None or _secret_is(_found[name], secret)):
        return _found[name]
    where = store if store is not None else environment.text("GRADWIRE_STORE")
    if where is None:
        raise InvalidArgument(
            "a parameter server's processes meet at a store: give store='tcp://HOST:PORT', on the "
            "host of shard 0, or set GRADWIRE_STORE; `gradwire run --servers 1` sets it"
        )
    job = environment.text("GRADWIRE_JOB") or DEFAULT_JOB
    return Service(name, arguments.text(where, "store"), job, find_secret(secret))


def _secret_is(service: Service, secret: bytes | str) -> bool:
    """Whether a service's secret is the one that was given."""
    return find_secret(secret) == service.secret


class Directory:
    """A connection to the store, for one parameter server."""

    def __init__(self, service: Service, deadline: Deadline) -> None:
        """Waits for a store that is not there yet; raises RendezvousError."""
        address = parse_address(service.store)
        known = secret_of_store(address, service.secret)
        self._service = service
        # None: the first process makes it, and the store keeps it.
        self._secret = None if address.local and service.secret is None else known
        self._prefix = f"gradwire/{service.job}/serve/{service.name}"
        self._store = StoreClient(address, service.job, known, deadline)

    @property
    def service_id(self) -> int:
        """32 bits that tell the services of a job apart; handshakes have them."""
        return int.from_bytes(hashlib.sha256(self._service.name.encode()).digest()[:4], "little")

    def publish_secret(self) -> Job:
        """The job with its secret, which the first process makes where the user gave none."""
        key = f"{self._prefix}/secret"
        if self._secret is None and self._store.add(f"{key}/makers") == 1:
            self._store.set(key, secrets.token_bytes(32))
        return self.job(Deadline(10.0))

    def job(self, deadline: Deadline) -> Job:
        """The job with its secret; waits for the servers to make it where the user gave none."""
        found = self._secret
        if found is None:
            with self._waiting("no server has begun", deadline):
                found = self._store.get(f"{self._prefix}/secret", deadline.remaining)
        return Job(self._service.job, found)

    def publish(self, shard: int, shards: int, address: AddressInfo, history: History) -> None:
        """Tells clients where a shard is, and which starts it had."""
        record = {"shards": shards, "address": json.loads(address.pack()), "starts": history}
        self._store.set(f"{self._prefix}/shard/{shard}", json.dumps(record).encode())

    def find(self, shard: int, deadline: Deadline) -> ShardAddress:
        """Waits for a shard and returns its address; raises RendezvousError that names it."""
        with self._waiting(f"shard {shard} has not begun", deadline):
            data = self._store.get(f"{self._prefix}/shard/{shard}", deadline.remaining)
        try:
            record = json.loads(data)
            shards = record["shards"]
            address = unpack_address_info(json.dumps(record["address"]).encode(), shard)
            history = parse(record["starts"])
        except (ValueError, KeyError, TypeError, RecursionError, RendezvousError) as error:
            raise RendezvousError(f"shard {shard} published no address: {error}") from None
        if type(shards) is not int or not shard < shards <= MOST_SHARDS:
            raise RendezvousError(f"shard {shard} says that there are {shards!r} shards")
        return ShardAddress(shards, address, history)

    def publish_coordinator(self, address: AddressInfo) -> None:
        """Tells replicas where the coordinator is; a later one takes its place."""
        self._store.set(f"{self._prefix}/coordinator", address.pack())

    def find_coordinator(self, deadline: Deadline) -> AddressInfo:
        """Waits for a coordinator and returns its address, at which it may have ended since."""
        with self._waiting("no coordinator has begun", deadline):
            data = self._store.get(f"{self._prefix}/coordinator", deadline.remaining)
        try:
            return unpack_address_info(data, 0)
        except RendezvousError as error:
            raise RendezvousError(f"the coordinator published no address: {error}") from None

    def number(self, client: str, previous: int = 0) -> int:
        """A client's number: a later incarnation of one name has a larger one in 16 bits.

        It is larger than `previous`, too, which may be from another store.
        """
        name = int.from_bytes(hashlib.sha256(client.encode()).digest()[:6], "little")
        key = f"{self._prefix}/incarnation/{client}"
        incarnation = self._store.add(key)
        least = previous % _INCARNATIONS + 1
        if incarnation < least:
            incarnation = self._store.add(key, least - incarnation)
        return name << 16 | incarnation % _INCARNATIONS

    def count_client(self) -> int:
        """The number of clients without a name so far, this one included."""
        return self._store.add(f"{self._prefix}/clients")

    @contextlib.contextmanager
    def first_alone(self, shards: int, deadline: Deadline) -> Iterator[None]:
        """Lets one client go through the block before all others; these wait for it.

        So the initial values of all shards are those of one client. Where it fails or its process
        ends, the next one is first; where shards are started anew, there is a new first one.
        """
        addresses = (self.find(shard, deadline).address.pack() for shard in range(shards))
        servers = hashlib.sha256(b"".join(addresses)).hexdigest()[:16]
        for attempt in itertools.count(1):
            key = f"{self._prefix}/values/{servers}/{attempt}"
            self._store.set_last_will(key, _FAILED)
            if self._store.add(f"{key}/clients") == 1:
                yield
                self._store.set(key, _THERE)
                return
            self._store.set_last_will("", b"")
            with self._waiting("the first client has not brought its values", deadline):
                became = self._store.get(key, deadline.remaining)
            if became == _THERE:
                yield
                return

    def interface(self) -> Choice:
        """The interface towards the store: the other processes reach this one at it."""
        route = self._store.route()
        source = None if route is None else route.source
        return choose(source, several_hosts=source is not None and not is_loopback(source))

    def store_is_gone(self) -> bool:
        """Whether the process that hosts the store has ended."""
        return self._store.gone()

    def close(self) -> None:
        """Closes the connection; what was published stays."""
        self._store.close()

    @contextlib.contextmanager
    def _waiting(self, what: str, deadline: Deadline) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise RendezvousError(
                f"timed out: {what} within {deadline.seconds:g} s at the store "
                f"{self._service.store} (job {self._service.job!r}, service "
                f"{self._service.name!r}): is `gradwire serve` running there?"
            ) from None


@contextlib.contextmanager
def opened(service: Service, deadline: Deadline) -> Iterator[Directory]:
    """A directory that is closed at the end of the block."""
    directory = Directory(service, deadline)
    try:
        yield directory
    finally:
        with contextlib.suppress(Error):
            directory.close()
