"""The rendezvous: ranks find each other through a store, agree on a secret and connect a mesh."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._base.shortage import told
from gradwire._bootstrap import agreed_model
from gradwire._bootstrap.advertised_store import serve_until_reported
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.job_secret import find_secret, secret_of_store
from gradwire._bootstrap.launch_info import DEFAULT_JOB, LaunchInfo
from gradwire._bootstrap.mesh import Job, Membership, Mesh
from gradwire._bootstrap.rendezvous_exchange import RendezvousExchange, Start, another_job
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.through_torch.torch_store import parse_torch_address
from gradwire._bootstrap.torch_rendezvous import TorchRendezvous
from gradwire._errors import Error, InvalidArgument, RendezvousError, lost
from gradwire._host import emulated_link, encryption, transport_kinds
from gradwire._host.identity import host_identity, process_name
from gradwire._host.interfaces import LOOPBACK, Choice, Route, choose, is_loopback

_OTHERS_SECONDS = 0.1  # that a job without a name of its own gives others to say they are here
_OTHER_HOST_SECONDS = 5.0  # to tell a rank 0 of another job that there are two

_Made = TypeVar("_Made")
_Launch = tuple[str, int, str | None, int]  # job, epoch, store and rank

_log = logging.getLogger("gradwire")
_generations: Counter[_Launch] = Counter()
_starts: dict[_Launch, int] = {}  # of launches of which this process is a rank; see Start


def rendezvous(
    launch: LaunchInfo,
    make: Callable[[Mesh], _Made],
    *,
    timeout: float,
    transports: Sequence[str] | None = None,
    secret: bytes | str | None = None,
) -> _Made:
    """Connects to the other ranks of `launch`; returns `make(mesh)`.

    Every rank must call it the same number of times. Until `make` has returned on all ranks, raises
    TransportError when a rank is lost, and RendezvousError, which names the ranks that are missing
    after `timeout` seconds or the rank that gave up, or says what the system refuses.
    """
    with told(f"rank {launch.rank} of {launch.size} ({process_name()})"):
        environment.check()
        deadline = Deadline(timeout)
        names = choose_transports(transports)
        given = find_secret(secret)
        membership = Membership(store=launch.store, secret=given, offered=names)
        if launch.size == 1:
            mesh = _mesh_alone(launch, given)
            mesh.membership = membership
            return make(mesh)
        with open_rendezvous(launch, deadline, given) as found:
            job = Job(launch.job, found.secret, found.start.number, _privacy(launch, given))
            number = found.start.generation
            mesh = connect_ranks(found.exchange, job, names, found.interface, number)
            mesh.membership = membership
            return make(mesh)


def connect_ranks(
    exchange: RendezvousExchange,
    job: Job,
    transports: Sequence[str],
    interface: Choice,
    communicator: int = 0,
) -> Mesh:
    """The mesh of the ranks that meet by an exchange, with rank 0's cost model; all call it.

    `communicator` is as in `connect_mesh`. Raises as `rendezvous` does.
    """
    mesh = connect_mesh(
        job,
        exchange.exchange_addresses,
        rank=exchange.launch.rank,
        size=exchange.launch.size,
        communicator=communicator,
        deadline=exchange.deadline,
        transports=transports,
        interface=interface,
        raise_if_peer_failed=exchange.raise_if_peer_failed,
        lost_peer_error=lost,
    )
    agreed_model.agree(mesh, exchange)
    return mesh


def _mesh_alone(launch: LaunchInfo, secret: bytes | None) -> Mesh:
    """The mesh of a job of one rank; its secret is also for those that join it later."""
    start = _own_start(launch, _next_generation(launch))
    over_tcp = secret is None and (launch.store or "").startswith("tcp:")
    everybody_may_join = over_tcp and environment.flag("GRADWIRE_INSECURE")
    known = b"" if everybody_may_join else secret or secrets.token_bytes(32)
    job = Job(launch.job, known, start.number)
    return Mesh(job, 0, 1, start.generation, (host_identity(),), {}, LOOPBACK)


@dataclass(frozen=True)
class Rendezvous:
    """The secret, the start and the exchange that ranks share until all have left."""

    exchange: RendezvousExchange
    secret: bytes = field(repr=False)  # of the job
    start: Start  # of the job
    interface: Choice  # at which the others reach this process


@contextlib.contextmanager
def open_rendezvous(
    launch: LaunchInfo, deadline: Deadline, given: bytes | str | None
) -> Iterator[Rendezvous]:
    """The rendezvous of the ranks of `launch`, without a mesh; every rank enters it.

    Raises as `rendezvous` does.
    """
    environment.check()
    secret, generation = find_secret(given), _next_generation(launch)
    prefix = f"gradwire/{launch.job}/{'any' if launch.restarts else launch.epoch}"
    if not launch.rank_0_hosts:  # whose store is a new one in each rendezvous
        prefix += f"/{generation}"
    with _open_store(launch, secret, prefix, deadline) as (store, known):
        exchange = RendezvousExchange(store, launch, prefix, deadline)
        rank_0_hosts = launch.rank_0_hosts or _uses_torch_store(launch)
        with exchange.abort_on_failure(hosts_store=rank_0_hosts and launch.rank == 0):
            start = _agree_on_start(exchange, launch, generation)
            agreed = exchange.agree_on_secret() if known is None else known
            interface = _choose_interface(exchange, store.route())
            yield Rendezvous(exchange, agreed, start, interface)
        _starts[_key_of(launch)] = start.number


def _agree_on_start(exchange: RendezvousExchange, launch: LaunchInfo, generation: int) -> Start:
    """The start that rank 0 tells, once no rank is here twice; raises RendezvousError otherwise."""
    exchange.claim_rank()
    if launch.rank_0_hosts and launch.rank == 0 and launch.job == DEFAULT_JOB:
        exchange.raise_if_peer_failed(_OTHERS_SECONDS)
    found = exchange.agree_on_start(_own_start(launch, generation))
    if found.number != _starts.get(_key_of(launch), found.number):
        raise another_job(
            f"rank 0 of job {launch.job!r} is not the process that rank {launch.rank} "
            f"({process_name()}) has met before; if it was started anew, start all ranks anew, or"
        )
    return found


def _own_start(launch: LaunchInfo, generation: int) -> Start:
    """The start that this rank tells if it is rank 0."""
    number = _starts.get(_key_of(launch))
    if number is None:
        number = secrets.randbits(32)
        if launch.rank == 0:
            _starts[_key_of(launch)] = number
    return Start(number, generation, launch.size)


def choose_transports(given: Sequence[str] | None) -> tuple[str, ...]:
    """The transports to offer, best first; raises InvalidArgument for an unknown one or none.

    With GRADWIRE_LINK set that is only the emulated one, which replaces tcp. When one is requested
    by name and cannot be used, InvalidArgument says why.
    """
    names = environment.items("GRADWIRE_TRANSPORT") if given is None else _named(given)
    emulated = transport_kinds.context(transport_kinds.EMULATED)
    if emulated is not None and (not names or "tcp" in names):
        return (transport_kinds.EMULATED,)
    if given is None and not names:
        return encryption.allowed(transport_kinds.DEFAULTS)
    unknown = [name for name in names if name not in transport_kinds.DEFAULTS]
    if unknown or not names:
        what = f"{unknown[0]!r} is no transport between processes" if unknown else "no transport"
        raise InvalidArgument(f"{what}: use {', '.join(transport_kinds.DEFAULTS)}")
    emulated_link.require_none(f"the transports are {', '.join(names)}")
    for name in names:
        if not encryption.can_be_sealed(name):
            encryption.require_allowed(name, "leave it out of GRADWIRE_TRANSPORT or transports=")
        transport_kinds.context(name)
    return names


def _named(transports: Sequence[str]) -> tuple[str, ...]:
    wanted = "a list of names of transports"
    given = arguments.items(transports, "transports", wanted)
    return tuple(arguments.instance(each, "transports", str, wanted) for each in given)


def _uses_torch_store(launch: LaunchInfo) -> bool:
    return launch.store is not None and launch.store.startswith("torch:")


@contextlib.contextmanager
def _open_store(
    launch: LaunchInfo, secret: bytes | None, prefix: str, deadline: Deadline
) -> Iterator[tuple[StoreClient, bytes | None]]:
    """A client of the store where ranks meet; and the secret, None where they agree on it there."""
    assert launch.store is not None  # LaunchInfo has one whenever there are several ranks
    if _uses_torch_store(launch):
        place = parse_torch_address(launch.store)
        with TorchRendezvous(launch, place, secret, prefix, deadline).open_store() as found:
            yield found
        return
    address = parse_address(launch.store)
    known = secret_of_store(address, secret)
    with contextlib.ExitStack() as stack:
        if launch.rank_0_hosts and launch.rank == 0:
            stack.enter_context(serve_until_reported(_serve(launch, address, known, prefix)))
        lost_error = partial(lost, 0) if launch.rank_0_hosts else RendezvousError
        client = StoreClient(address, launch.job, known, deadline, lost_error, rank=launch.rank)
        stack.callback(client.close)
        yield client, None if address.local and secret is None else known
        # Rank 0 closes the store when all have finished. The others wait for that, or their next
        # rendezvous would begin in this one's store.
        if launch.rank_0_hosts and launch.rank != 0:
            client.wait_closed(deadline.remaining)


def _serve(launch: LaunchInfo, address: Address, secret: bytes, prefix: str) -> StoreServer:
    """The store that rank 0 serves during the rendezvous."""
    also = _addresses_beyond_loopback(launch, address, secret)
    try:
        return StoreServer(address, launch.job, secret, also, one_rendezvous=True)
    except RendezvousError as error:
        _tell_other_host(launch, address, secret, prefix, error)
        raise


def _tell_other_host(
    launch: LaunchInfo, address: Address, secret: bytes, prefix: str, taken: RendezvousError
) -> None:
    """Raises RendezvousError where another rank 0 of the same name serves the store, and tells it.

    Then all ranks that meet there raise it, too. Returns for a store that is not of such a job.
    """
    if not isinstance(taken.__cause__, OSError) or taken.__cause__.errno != errno.EADDRINUSE:
        return
    limit = Deadline(_OTHER_HOST_SECONDS)
    try:
        client = StoreClient(address, launch.job, secret, limit, listens=True)
    except Error:
        return
    exchange = RendezvousExchange(client, launch, prefix, limit)
    with contextlib.closing(client), exchange.abort_on_failure(hosts_store=False):
        raise another_job(
            f"{process_name()} is rank 0 of job {launch.job!r}, and so is the process that serves "
            f"the store at {address}"
        ) from taken


def _addresses_beyond_loopback(
    launch: LaunchInfo, address: Address, secret: bytes
) -> list[Address]:
    """More addresses for the store to listen at: a host's name may mean loopback on that host."""
    elsewhere = address.named and launch.local_size != launch.size
    if not (elsewhere and secret and _leads_to_loopback(address)):
        return []
    try:
        choice = choose(None, several_hosts=True)
    except RendezvousError:  # then all ranks are here, or the other ranks' errors say so
        return []
    _log.info("%s means loopback here, so the store also listens on %s", address.host, choice)
    return [address._replace(host=choice.interface.address)]


def _leads_to_loopback(address: Address) -> bool:
    """Whether the address is loopback; False for an unknown host, which fails when connected to."""
    try:
        return all(is_loopback(str(target[0])) for _, target in address.resolve())
    except OSError:
        return False


def _next_generation(launch: LaunchInfo) -> int:
    """Counts this rank's communicators of a launch, from 0."""
    key = _key_of(launch)
    _generations[key] += 1
    return _generations[key] - 1


def _key_of(launch: LaunchInfo) -> _Launch:
    return launch.job, launch.epoch, launch.store, launch.rank


def _choose_interface(exchange: RendezvousExchange, route: Route | None) -> Choice:
    hosts = exchange.compare_hosts(route)
    choice = choose(
        None if route is None else route.source,
        several_hosts=hosts.several,
        reached=hosts.reached,
    )
    _log.info("rank %d listens on %s", exchange.launch.rank, choice)
    return choice


def _privacy(launch: LaunchInfo, secret: bytes | None) -> str:
    if secret is not None:
        return "who joins needs the job's secret"
    if _uses_torch_store(launch):
        return "no GRADWIRE_SECRET, so nobody may join"
    if (launch.store or "").startswith("unix:"):
        return "no GRADWIRE_SECRET, so this user's processes on this host may join"
    return "GRADWIRE_INSECURE and no secret, so whoever reaches the ranks may join"
