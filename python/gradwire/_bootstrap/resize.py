"""The arguments of a resize, and the transports and addresses for those who join."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gradwire._base import arguments, environment
from gradwire._bootstrap.join_listener import JoinListener, require_given_secret
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.shrink import ResizeOptions
from gradwire._bootstrap.store import parse_address
from gradwire._bootstrap.through_torch.torch_store import parse_torch_address
from gradwire._errors import InvalidArgument, RendezvousError
from gradwire._host.encryption import allowed
from gradwire._host.interfaces import choose, is_loopback, route_to
from gradwire._host.transport_kinds import DEFAULTS

_log = logging.getLogger("gradwire")


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
    least, most = _least_ranks(min_ranks), _most_ranks()
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
    most = _most_ranks()
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


def _least_ranks(given: int | None) -> int | None:
    """The ranks that are needed to go on; None: a majority of those before."""
    if given is None:
        return _ranks_in("GRADWIRE_MIN_RANKS")
    return arguments.whole(given, "min_ranks", least=1)


def _most_ranks() -> int | None:
    return _ranks_in("GRADWIRE_MAX_RANKS")


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
        pattern = environment.text("GRADWIRE_SOCKET_IFNAME")
        mesh.interface = choose(source, pattern=pattern, several_hosts=True)
