"""How the ranks find each other: a store to meet at, a secret, an address, then the mesh."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import agreed_model
from gradwire._bootstrap.announced_store import announced_store, heard, pack_failure
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.meeting import Meeting, await_rank
from gradwire._bootstrap.mesh import DEFAULT_TRANSPORTS, EMULATED, Job, Mesh
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._bootstrap.torch_store import TorchStore
from gradwire._bootstrap.world import World
from gradwire._errors import Error, InvalidArgument, RendezvousError, describe, lost
from gradwire._host import emulated_link, rdma
from gradwire._host.interfaces import Choice, Route, choose, is_loopback, route_to

MIN_SECRET = 16  # bytes
_MAX_SECRET = 1 << 16
_TURN = 0.1  # seconds; torch's store does not let Ctrl-C through while it waits

_Made = TypeVar("_Made")

_log = logging.getLogger("gradwire")
_generations: Counter[tuple[str, int, str | None, int]] = Counter()


def rendezvous(
    world: World,
    *,
    timeout: float,
    transports: Sequence[str] | None = None,
    secret: bytes | str | None = None,
) -> Mesh:
    """Meets the other ranks of `world` and connects to them; see `meet`."""
    return meet(world, lambda mesh: mesh, timeout=timeout, transports=transports, secret=secret)


def meet(
    world: World,
    make: Callable[[Mesh], _Made],
    *,
    timeout: float,
    transports: Sequence[str] | None = None,
    secret: bytes | str | None = None,
) -> _Made:
    """Meets the other ranks of `world`, connects to them, and makes something of the mesh.

    Every rank calls it, equally often. Until all have made theirs, it raises TransportError on a
    rank that is lost, and RendezvousError, which names who is missing after `timeout` seconds or
    who gave up.
    """
    deadline = Deadline(timeout)
    names = choose_transports(transports)
    known = find_secret(secret)
    generation = _next_generation(world)
    if world.size == 1:
        job = Job(world.job, b"")
        alone = connect_mesh(
            job, _nobody, rank=0, size=1, communicator=generation, deadline=deadline
        )
        return make(alone)
    prefix = f"gradwire/{world.job}/{world.epoch}/{generation}"
    with _meeting_place(world, known, prefix, deadline) as store:
        meeting = Meeting(store, world, prefix, deadline)
        hosts = world.rank_0_hosts or _is_torchs(world)
        with meeting.together(hosting=hosts and world.rank == 0):
            agreed = known or meeting.agree_on_secret()
            interface = _choose_interface(meeting, store.route())
            mesh = connect_mesh(
                Job(world.job, agreed, world.epoch, _privacy(world, known)),
                meeting.exchange,
                rank=world.rank,
                size=world.size,
                communicator=generation,
                deadline=deadline,
                transports=names,
                interface=interface,
                hear=meeting.hear,
                ended=lost,
            )
            agreed_model.agree(mesh, meeting)
            return make(mesh)


def choose_transports(given: Sequence[str] | None) -> tuple[str, ...]:
    """The transports to offer, best first; raises InvalidArgument for an unknown one or none.

    Where GRADWIRE_LINK is set it is the emulated one alone, in place of tcp. For rdma, asked for by
    name where it cannot be used, InvalidArgument says why.
    """
    names = environment.items("GRADWIRE_TRANSPORT") if given is None else _named(given)
    if emulated_link.of_this_rank() is not None and (not names or "tcp" in names):
        return (EMULATED,)
    if given is None and not names:
        return DEFAULT_TRANSPORTS
    unknown = [name for name in names if name not in DEFAULT_TRANSPORTS]
    if unknown or not names:
        what = f"{unknown[0]!r} is no transport between processes" if unknown else "no transport"
        raise InvalidArgument(f"{what}: use {', '.join(DEFAULT_TRANSPORTS)}")
    emulated_link.require_none(f"the transports are {', '.join(names)}")
    if rdma.NAME in names:
        rdma.of_this_rank()
    return names


def _named(transports: Sequence[str]) -> tuple[str, ...]:
    wanted = "a list of names of transports"
    given = arguments.items(transports, "transports", wanted)
    return tuple(arguments.instance(each, "transports", str, wanted) for each in given)


def find_secret(given: bytes | str | None) -> bytes | None:
    """The job's secret: the argument, GRADWIRE_SECRET or GRADWIRE_SECRET_FILE; None for none.

    One that is there and empty is refused like any short one: it was meant to be a secret.
    """
    found = _environment_secret() if given is None else given
    if found is None:
        return None
    if not isinstance(found, bytes | str):
        raise InvalidArgument(f"secret= is of type {type(found).__name__}: give bytes, or a str")
    secret = found.encode() if isinstance(found, str) else found
    if len(secret) < MIN_SECRET:
        raise RendezvousError(
            f"the secret has {len(secret)} bytes, fewer than {MIN_SECRET}: make one with "
            '`python -c "import secrets; print(secrets.token_hex())"`, or unset it to have none'
        )
    return secret


def _environment_secret() -> bytes | str | None:
    if environment.is_set("GRADWIRE_SECRET"):
        return environment.text("GRADWIRE_SECRET") or ""
    if environment.is_set("GRADWIRE_SECRET_FILE"):
        return _read_secret(environment.text("GRADWIRE_SECRET_FILE") or "")
    return None


def _is_torchs(world: World) -> bool:
    return world.store is not None and world.store.startswith("torch:")


def _meeting_place(
    world: World, secret: bytes | None, prefix: str, deadline: Deadline
) -> contextlib.AbstractContextManager[StoreClient]:
    assert world.store is not None  # _world gives one whenever there are several ranks
    if _is_torchs(world):
        _tell_privacy(world, "torch's store", secret)
        return _beside_torchs_store(world, secret, prefix, deadline)
    address = parse_address(world.store)
    _require_privacy(address, secret)
    _tell_privacy(world, f"the store at {address}", secret)
    return _own_store(world, address, secret or b"", deadline)


@contextlib.contextmanager
def _beside_torchs_store(
    world: World, secret: bytes | None, prefix: str, deadline: Deadline
) -> Iterator[StoreClient]:
    """A client of the store that rank 0 opens and announces in torch's."""
    parts = urlsplit(world.store or "")
    host, port = parts.hostname or "", parts.port or 0
    torch = TorchStore(host, port, world.rank, world.size, deadline)
    route = route_to(host, port)
    torch.set(f"{prefix}/route/{world.rank}", route.target.encode())

    def read(what: str, peer: int) -> bytes:
        key = f"{prefix}/{what}/{peer}"
        return await_rank(peer, world, deadline, lambda turn: torch.get(key, min(turn, _TURN)))

    def carry(notice: bytes) -> bytes:
        if notice:
            torch.set(f"{prefix}/store/0", notice)
        return read("store", 0)

    at = _place_of_store(world, route, read) if world.rank == 0 else None
    try:
        with announced_store(world.job, secret, at, carry, deadline) as client:
            yield client
    except BaseException as error:
        if world.rank == 0:
            with contextlib.suppress(Error):
                torch.set(f"{prefix}/store/0", pack_failure(describe(error)))
        raise


def _place_of_store(world: World, route: Route, read: Callable[[str, int], bytes]) -> Address:
    """Where the other ranks reach rank 0, whose way to torch's store is `route`."""
    here = Address("unix", f"gradwire-{secrets.token_hex(8)}")
    if world.local_size == world.size:
        return here
    reached: list[str] = []
    if is_loopback(route.source):  # torch's store is on this host: at which address, others know
        known = [read("route", peer).decode(errors="replace") for peer in range(1, world.size)]
        reached = [target for target in known if _leads_elsewhere(target)]
        if not reached:
            return here
    pattern = environment.text("GRADWIRE_SOCKET_IFNAME")
    choice = choose(
        route.source,
        pattern=pattern,
        several_hosts=world.several_hosts or pattern is None,  # where unknown, the user knows
        reached=reached,
    )
    return Address("tcp", choice.interface.address)


def _leads_elsewhere(target: str) -> bool:
    try:
        return not is_loopback(target)
    except ValueError:  # it is no address
        return False


@contextlib.contextmanager
def _own_store(
    world: World, address: Address, secret: bytes, deadline: Deadline
) -> Iterator[StoreClient]:
    """A client of our own store, which rank 0 hosts for the time of the rendezvous."""
    with contextlib.ExitStack() as stack:
        if world.rank_0_hosts and world.rank == 0:
            also = _beyond_loopback(world, address, secret)
            stack.enter_context(heard(StoreServer(address, world.job, secret, also)))
        ended = partial(lost, 0) if world.rank_0_hosts else RendezvousError
        client = StoreClient(address, world.job, secret, deadline, ended)
        stack.callback(client.close)
        yield client
        # Rank 0 closes it when all are through; the others see that it did, lest their next
        # rendezvous begins in this one's store.
        if world.rank_0_hosts and world.rank != 0:
            client.wait_closed(deadline.remaining)


def _beyond_loopback(world: World, address: Address, secret: bytes) -> list[Address]:
    """Where the store listens too: a host's name may mean loopback on that host alone."""
    elsewhere = address.named and world.local_size != world.size
    if not (elsewhere and secret and _leads_to_loopback(address)):
        return []
    try:
        choice = choose(
            None, pattern=environment.text("GRADWIRE_SOCKET_IFNAME"), several_hosts=True
        )
    except RendezvousError:  # then all ranks are here, or the others' messages say it
        return []
    _log.info("%s means loopback here, so the store also listens on %s", address.host, choice)
    return [address._replace(host=choice.interface.address)]


def _leads_to_loopback(address: Address) -> bool:
    """False also for an unknown host, which has its own message when it is connected to."""
    try:
        return all(is_loopback(str(target[0])) for _, target in address.resolve())
    except OSError:
        return False


def _nobody(card: bytes, _: Deadline) -> list[bytes]:
    return [card]


def _next_generation(world: World) -> int:
    """How many communicators this rank has made of this world: the number of the next one."""
    key = world.job, world.epoch, world.store, world.rank
    _generations[key] += 1
    return _generations[key] - 1


def _choose_interface(meeting: Meeting, route: Route | None) -> Choice:
    hosts = meeting.compare_hosts(route)
    choice = choose(
        None if route is None else route.source,
        pattern=environment.text("GRADWIRE_SOCKET_IFNAME"),
        several_hosts=hosts.several,
        reached=hosts.reached,
    )
    _log.info("rank %d listens on %s", meeting.world.rank, choice)
    return choice


def _require_privacy(address: Address, secret: bytes | None) -> None:
    """Beyond loopback a secret is needed, or the user's word that none is."""
    if secret or address.local or environment.flag("GRADWIRE_INSECURE"):
        return
    if _leads_to_loopback(address):
        return
    raise RendezvousError(
        f"the store at {address} can be reached from other hosts and there is no secret: set "
        "GRADWIRE_SECRET or GRADWIRE_SECRET_FILE on all ranks, or GRADWIRE_INSECURE=1 "
        "where every host of the network may join"
    )


def _privacy(world: World, secret: bytes | None) -> str:
    if secret is not None:
        return "who joins needs the job's secret"
    store = (world.store or "").replace("torch://", "torch's store at ")
    return f"no GRADWIRE_SECRET, so joins are as private as {store}"


def _tell_privacy(world: World, store: str, secret: bytes | None) -> None:
    if secret is None and world.rank == 0:
        level = logging.WARNING if world.several_hosts else logging.INFO
        _log.log(
            level,
            "no GRADWIRE_SECRET: rank 0 makes one, and who may join is as private as %s",
            store,
        )


def _read_secret(name: str) -> bytes:
    try:
        with open(name, "rb", opener=_open_at_once) as file:
            info = os.fstat(file.fileno())
            if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or info.st_uid != os.getuid():
                raise RendezvousError(
                    f"GRADWIRE_SECRET_FILE={name} can be read by others, or is another user's: "
                    f"chown it to this one, and chmod 600 {name}"
                )
            return file.read(_MAX_SECRET).strip()
    except OSError as error:
        raise RendezvousError(f"cannot read GRADWIRE_SECRET_FILE: {error}") from error


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer
