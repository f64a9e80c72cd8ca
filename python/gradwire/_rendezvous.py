"""How the ranks find each other: a store to meet at, a secret, an address, then the mesh."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gradwire import _environment
from gradwire._connect import Exchange, connect_mesh
from gradwire._deadline import Deadline
from gradwire._errors import InvalidArgument, RendezvousError
from gradwire._interfaces import Choice, address_towards, choose, is_loopback
from gradwire._mesh import DEFAULT_TRANSPORTS, Job, Mesh
from gradwire._store import Address, Store, StoreClient, parse_address
from gradwire._store_server import StoreServer
from gradwire._torch_store import TorchStore
from gradwire._world import World

MIN_SECRET = 16  # bytes
WARN_SECONDS = 30.0

_log = logging.getLogger("gradwire")
_generations: Counter[tuple[str, int, str | None, int]] = Counter()


def rendezvous(
    world: World,
    *,
    timeout: float,
    transports: Sequence[str] | None = None,
    secret: bytes | str | None = None,
) -> Mesh:
    """Meets the other ranks of `world` and connects to them; every rank calls it, equally often.

    Raises RendezvousError, which names who is missing after `timeout` seconds.
    """
    deadline = Deadline(timeout)
    names = choose_transports(transports)
    known = find_secret(secret)
    generation = _next_generation(world)
    if world.size == 1:
        return connect_mesh(
            Job(world.job, b""), _nobody, rank=0, size=1, communicator=generation, deadline=deadline
        )
    with _meeting_place(world, known, deadline) as place:
        prefix = f"gradwire/{world.job}/{world.epoch}/{generation}"
        agreed = known or _agree_on_secret(place.store, prefix, world, deadline)
        interface = _choose_interface(world, place.towards)
        return connect_mesh(
            Job(world.job, agreed, world.epoch),
            store_exchange(place.store, prefix, world.rank, world.size),
            rank=world.rank,
            size=world.size,
            communicator=generation,
            deadline=deadline,
            transports=names,
            interface=interface,
        )


def choose_transports(given: Sequence[str] | None) -> tuple[str, ...]:
    """The transports to offer, best first; raises InvalidArgument for an unknown one or none."""
    names = tuple(given if given is not None else _environment.items("GRADWIRE_TRANSPORT"))
    if given is None and not names:
        return DEFAULT_TRANSPORTS
    unknown = [name for name in names if name not in DEFAULT_TRANSPORTS]
    if unknown or not names:
        what = f"{unknown[0]!r} is no transport between processes" if unknown else "no transport"
        raise InvalidArgument(f"{what}: use {', '.join(DEFAULT_TRANSPORTS)}")
    return names


def find_secret(given: bytes | str | None) -> bytes | None:
    """The job's secret: the argument, GRADWIRE_SECRET or GRADWIRE_SECRET_FILE; None for none."""
    path = _environment.text("GRADWIRE_SECRET_FILE")
    text = given or _environment.text("GRADWIRE_SECRET") or (_read_secret(path) if path else None)
    if text is None:
        return None
    secret = text.encode() if isinstance(text, str) else text
    if len(secret) < MIN_SECRET:
        raise RendezvousError(
            f"the secret has {len(secret)} bytes, fewer than {MIN_SECRET}: make one with "
            '`python -c "import secrets; print(secrets.token_hex())"`'
        )
    return secret


def store_exchange(store: Store, prefix: str, rank: int, size: int) -> Exchange:
    """An all_gather by way of a store, under keys that no other exchange uses."""

    def exchange(card: bytes, deadline: Deadline) -> list[bytes]:
        store.set(f"{prefix}/card/{rank}", card)
        return [_get(store, f"{prefix}/card", peer, size, deadline) for peer in range(size)]

    return exchange


@dataclass
class _Place:
    store: Store
    towards: str | None  # the own address that reaches the store; None for a local one


@contextlib.contextmanager
def _meeting_place(world: World, secret: bytes | None, deadline: Deadline) -> Iterator[_Place]:
    assert world.store is not None  # _world gives one whenever there are several ranks
    if world.store.startswith("torch:"):
        parts = urlsplit(world.store)
        host, port = parts.hostname or "", parts.port or 0
        store = TorchStore(host, port, world.rank, world.size, deadline)
        _tell_privacy(world, "torch's store", secret)
        yield _Place(store, address_towards(host, port))
        return
    address = parse_address(world.store)
    _require_privacy(address, secret)
    with _own_store(world, address, secret or b"", deadline) as client:
        yield _Place(client, client.local_address())


@contextlib.contextmanager
def _own_store(
    world: World, address: Address, secret: bytes, deadline: Deadline
) -> Iterator[StoreClient]:
    """A client of our own store, which rank 0 hosts for the time of the rendezvous."""
    with contextlib.ExitStack() as stack:
        if world.rank_0_hosts and world.rank == 0:
            stack.enter_context(StoreServer(address, world.job, secret))
        client = StoreClient(address, world.job, secret, deadline)
        stack.callback(client.close)
        yield client
        # Rank 0's mesh is complete only when all have read the store, so it may close it then; the
        # others see that it did, lest their next rendezvous begins in this one's store.
        if world.rank_0_hosts and world.rank != 0:
            client.wait_closed(deadline.remaining)


def _nobody(card: bytes, _: Deadline) -> list[bytes]:
    return [card]


def _next_generation(world: World) -> int:
    """How many communicators this rank has made of this world: the number of the next one."""
    key = world.job, world.epoch, world.store, world.rank
    _generations[key] += 1
    return _generations[key] - 1


def _get(store: Store, prefix: str, peer: int, size: int, deadline: Deadline) -> bytes:
    for wait in (deadline.within(WARN_SECONDS), deadline):
        try:
            return store.get(f"{prefix}/{peer}", wait.remaining)
        except TimeoutError:
            if deadline.passed:
                break
            _log.warning("still waiting for rank %d of %d to appear", peer, size)
    missing = [rank for rank in range(size) if not _present(store, f"{prefix}/{rank}")]
    raise RendezvousError(_missing_message(missing or [peer], size, deadline))


def _present(store: Store, key: str) -> bool:
    try:
        store.get(key, 0)
    except TimeoutError:
        return False
    except RendezvousError:  # the store's host is at its deadline too: nothing more can be known
        return True
    return True


def _missing_message(missing: list[int], size: int, deadline: Deadline) -> str:
    names = ", ".join(map(str, missing))
    return (
        f"rank{'s' if len(missing) > 1 else ''} {names} of {size} did not appear within "
        f"{deadline.seconds:g} s; look at their output for the reason, check that all {size} "
        "were started, or give more time with timeout="
    )


def _agree_on_secret(store: Store, prefix: str, world: World, deadline: Deadline) -> bytes:
    """Rank 0 makes a secret for this communicator; it is as private as the store."""
    key = f"{prefix}/secret"
    if world.rank == 0:
        store.set(f"{key}/0", secrets.token_bytes(32))
    return _get(store, key, 0, world.size, deadline)


def _choose_interface(world: World, towards: str | None) -> Choice:
    pattern = _environment.text("GRADWIRE_SOCKET_IFNAME")
    choice = choose(towards, pattern=pattern, several_hosts=world.several_hosts)
    _log.info("rank %d listens on %s", world.rank, choice)
    return choice


def _require_privacy(address: Address, secret: bytes | None) -> None:
    """Beyond loopback a secret is needed, or the user's word that none is."""
    if secret or address.local or _environment.flag("GRADWIRE_INSECURE"):
        return
    with contextlib.suppress(
        OSError
    ):  # an unknown host has its own message when it is connected to
        if all(is_loopback(str(target[0])) for _, target in address.resolve()):
            return
    raise RendezvousError(
        f"the store at {address} can be reached from other hosts and there is no secret: set "
        "GRADWIRE_SECRET or GRADWIRE_SECRET_FILE on all ranks, or GRADWIRE_INSECURE=1 "
        "where every host of the network may join"
    )


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
        path = Path(name)
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) or path.stat().st_uid != os.getuid():
            raise RendezvousError(
                f"GRADWIRE_SECRET_FILE={name} can be read by others: chmod 600 {name}"
            )
        return path.read_bytes().strip()
    except OSError as error:
        raise RendezvousError(f"cannot read GRADWIRE_SECRET_FILE: {error}") from error
