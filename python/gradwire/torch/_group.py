"""A communicator over the ranks of a torch process group, which serves as the meeting place."""

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
from gradwire._bootstrap.announced_store import announced_store
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.introduction import introduction, read_introduction
from gradwire._bootstrap.meeting import Meeting
from gradwire._bootstrap.mesh import Job, host_identity
from gradwire._bootstrap.rendezvous import choose_transports, find_secret
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.world import World
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import RendezvousError, lost
from gradwire._host.interfaces import Choice, Route, choose, route_to

_log = logging.getLogger("gradwire")


def communicator_of(group: dist.ProcessGroup, timeout: float = 300) -> Communicator:
    """Connects the ranks of `group`; each of them calls it.

    The secret is GRADWIRE_SECRET's; without one, rank 0 makes it and the group carries it, so that
    joining is as private as the group. Raises RendezvousError, and TransportError on a rank that is
    lost when all have heard of each other.
    """
    rank, size, deadline = group.rank(), group.size(), Deadline(timeout)

    def exchange(data: bytes, deadline: Deadline) -> list[bytes]:
        return _all_gather_bytes(group, data, deadline)

    known, route = find_secret(None), _route()
    own = introduction(rank, known, route.target if route else "")
    introductions = [
        read_introduction(each, peer) for peer, each in enumerate(exchange(own, deadline))
    ]
    job = _agree(introductions, known, rank)
    at = _place_of_store(introductions) if rank == 0 else None

    def carry(notice: bytes) -> bytes:
        return exchange(notice, deadline)[0]

    with announced_store(job.name, job.secret, at, carry, deadline) as store:
        meeting = Meeting(store, World(rank, size), job.name, deadline)
        with meeting.together(hosting=rank == 0):
            choice = _interface(introductions)
            _log.info("a rank of the process group listens on %s", choice)
            mesh = connect_mesh(
                job,
                meeting.exchange,
                rank=rank,
                size=size,
                communicator=0,
                deadline=deadline,
                transports=choose_transports(None),
                interface=choice,
                hear=meeting.hear,
                ended=lost,
            )
            agreed_model.agree(mesh, meeting)
            return from_mesh(mesh, timeout=timeout)


def _agree(introductions: Sequence[dict[str, Any]], known: bytes | None, rank: int) -> Job:
    """The job that rank 0 named, with the secret that all know; the same outcome on every rank."""
    first = introductions[0]
    differing = [
        str(peer)
        for peer, each in enumerate(introductions)
        if each["has_secret"] != first["has_secret"]
    ]
    if differing:
        has, have = ("has", "have not") if first["has_secret"] else ("has not", "have")
        raise RendezvousError(
            f"rank 0 {has} a GRADWIRE_SECRET and rank {', '.join(differing)} {have}: "
            "set the same one on all ranks, or none"
        )
    if known is None and rank == 0:
        several = len({each["host"] for each in introductions}) > 1
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
    """To torch's own meeting place, where the environment says which it is."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    try:
        return route_to(host, int(port or 0)) if host else None
    except RendezvousError:  # the process group exists, so it met elsewhere
        return None


def _interface(introductions: Sequence[dict[str, Any]]) -> Choice:
    """On several hosts, the address from which the ranks reach torch's own meeting place."""
    route, here = _route(), host_identity()
    beyond = [each["reached"] for each in introductions if each["host"] != here]
    return choose(
        route.source if route and beyond else None,
        pattern=environment.text("GRADWIRE_SOCKET_IFNAME"),
        several_hosts=bool(beyond),
        reached=[each for each in beyond if each],
    )


def _place_of_store(introductions: Sequence[dict[str, Any]]) -> Address:
    if len({each["host"] for each in introductions}) == 1:
        return Address("unix", f"gradwire-{secrets.token_hex(8)}")
    return Address("tcp", _interface(introductions).interface.address)


def _all_gather_bytes(group: dist.ProcessGroup, data: bytes, deadline: Deadline) -> list[bytes]:
    """Every rank's bytes, in rank order; nothing is unpickled."""
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
    """Of tensors that the group can exchange: this process's GPU where it has only NCCL."""
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
