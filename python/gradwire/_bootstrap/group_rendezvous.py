"""The rendezvous of ranks that can exchange bytes already: those of a torch process group."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import agreed_model
from gradwire._bootstrap.advertised_store import advertised_store
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.host_info import host_identity, pack_host_info, unpack_host_info
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import Job, Mesh
from gradwire._bootstrap.rendezvous import NO_SECRET, choose_transports, find_secret
from gradwire._bootstrap.rendezvous_exchange import RendezvousExchange
from gradwire._bootstrap.store import Address
from gradwire._errors import RendezvousError, lost
from gradwire._host.interfaces import Choice, Route, choose, route_to

_Made = TypeVar("_Made")

_log = logging.getLogger("gradwire")


def meet_in_group(
    rank: int,
    size: int,
    all_gather: Callable[[bytes], list[bytes]],
    make: Callable[[Mesh], _Made],
    deadline: Deadline,
) -> _Made:
    """Connects the ranks of a group; returns `make(mesh)`. Each of them calls it.

    `all_gather` returns all ranks' bytes, in rank order. The secret is GRADWIRE_SECRET's; without
    one, rank 0 makes it and `all_gather` carries it, so that joining is as private as the group.
    Raises RendezvousError, and TransportError when a rank is lost after the ranks have exchanged
    their first messages.
    """
    environment.check()
    known, route = find_secret(None), _route()
    own = pack_host_info(rank, known, route.target if route else "")
    infos = [unpack_host_info(each, peer) for peer, each in enumerate(all_gather(own))]
    job = _agree(infos, known, rank)
    at = _choose_store_address(infos) if rank == 0 else None

    def broadcast(endpoint: bytes) -> bytes:
        return all_gather(endpoint)[0]

    with advertised_store(job.name, job.secret, at, broadcast, deadline) as store:
        exchange = RendezvousExchange(store, LaunchInfo(rank, size), job.name, deadline)
        with exchange.abort_on_failure(hosts_store=rank == 0):
            choice = _interface(infos)
            _log.info("a rank of the process group listens on %s", choice)
            mesh = connect_mesh(
                job,
                exchange.exchange_addresses,
                rank=rank,
                size=size,
                communicator=0,
                deadline=deadline,
                transports=choose_transports(None),
                interface=choice,
                raise_if_peer_failed=exchange.raise_if_peer_failed,
                lost_peer_error=lost,
            )
            agreed_model.agree(mesh, exchange)
            return make(mesh)


def _agree(infos: Sequence[dict[str, Any]], known: bytes | None, rank: int) -> Job:
    """Makes the job that rank 0 named, with the common secret; raises alike on every rank."""
    first = infos[0]
    differing = [
        str(peer) for peer, each in enumerate(infos) if each["has_secret"] != first["has_secret"]
    ]
    if differing:
        has, have = ("has", "have not") if first["has_secret"] else ("has not", "have")
        raise RendezvousError(
            f"rank 0 {has} a GRADWIRE_SECRET and rank {', '.join(differing)} {have}: "
            "set the same one on all ranks, or none"
        )
    if known is None and rank == 0 and len({each["host"] for each in infos}) > 1:
        _log.warning(NO_SECRET, "the process group")
    if known is None:
        privacy = "no GRADWIRE_SECRET, so joins are as private as the process group"
        return Job(first["job"], bytes.fromhex(first["secret"]), privacy=privacy)
    return Job(first["job"], known, privacy="who joins needs the job's secret")


def _route() -> Route | None:
    """The route to torch's own store, when the environment says where it is."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    try:
        return route_to(host, int(port or 0)) if host else None
    except RendezvousError:  # the process group exists, so its ranks met elsewhere
        return None


def _interface(infos: Sequence[dict[str, Any]]) -> Choice:
    """Chooses the interface; on several hosts, the one that reaches torch's own store."""
    route, here = _route(), host_identity()
    beyond = [each["reached"] for each in infos if each["host"] != here]
    return choose(
        route.source if route and beyond else None,
        pattern=environment.text("GRADWIRE_SOCKET_IFNAME"),
        several_hosts=bool(beyond),
        reached=[each for each in beyond if each],
    )


def _choose_store_address(infos: Sequence[dict[str, Any]]) -> Address:
    if len({each["host"] for each in infos}) == 1:
        return Address("unix", f"gradwire-{secrets.token_hex(8)}")
    return Address("tcp", _interface(infos).interface.address)
