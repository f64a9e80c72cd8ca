"""A communicator over the ranks of a torch process group, which carries their first messages."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap import agreed_model
from gradwire._bootstrap.advertised_store import advertised_store
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.host_info import host_identity, pack_host_info, unpack_host_info
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import Job
from gradwire._bootstrap.rendezvous import choose_transports, find_secret
from gradwire._bootstrap.rendezvous_exchange import RendezvousExchange
from gradwire._bootstrap.store import Address
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import RendezvousError, lost
from gradwire._host.interfaces import Choice, Route, choose, route_to

_log = logging.getLogger("gradwire")


def communicator_of(group: dist.ProcessGroup, timeout: float = 300) -> Communicator:
    """Connects the ranks of `group`; each of them calls it.

    The secret is GRADWIRE_SECRET's; without one, rank 0 makes it and the group carries it, so that
    joining is as private as the group. Raises RendezvousError, and TransportError when a rank is
    lost after the ranks have exchanged their first messages.
    """
    rank, size, deadline = group.rank(), group.size(), Deadline(timeout)

    def all_gather(data: bytes) -> list[bytes]:
        return _all_gather_bytes(group, data, deadline)

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
            return from_mesh(mesh, timeout=timeout)


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
    if known is None and rank == 0:
        several = len({each["host"] for each in infos}) > 1
        _log.log(
            logging.WARNING if several else logging.INFO,
            "no GRADWIRE_SECRET: rank 0 makes one, and who may join is as private as "
            "the process group",
        )
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


def _all_gather_bytes(group: dist.ProcessGroup, data: bytes, deadline: Deadline) -> list[bytes]:
    """All ranks' bytes, in rank order; nothing is unpickled."""
    try:
        at = _device(group)
        own = torch.tensor(list(data), dtype=torch.uint8, device=at)
        length = torch.tensor([own.numel()], device=at)
        sizes = [int(each) for each in _all_gather(group, length, deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=at)
        padded[: own.numel()] = own
        gathered = _all_gather(group, padded, deadline)
    except RuntimeError as error:
        raise RendezvousError(
            f"another rank of the process group ended, or did not register in time: which one, "
            f"torch did not tell rank {group.rank()} ({error}); all its ranks must register, and "
            "it needs a backend for CPU tensors, such as gloo, or NCCL; or give communicator="
        ) from error
    return [bytes(each[:size].tolist()) for each, size in zip(gathered, sizes, strict=True)]


def _device(group: dist.ProcessGroup) -> torch.device:
    """The device of tensors that the group can exchange: this process's GPU if it has only NCCL."""
    kinds = {each.type for each in getattr(group, "_device_types", [])}
    if kinds == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _all_gather(
    group: dist.ProcessGroup, own: torch.Tensor, deadline: Deadline
) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(gathered, own, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    work.wait(max(timedelta(seconds=deadline.remaining), timedelta(milliseconds=10)))
    return gathered
