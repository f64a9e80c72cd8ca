"""A communicator over the ranks of a torch process group, which serves as the meeting place."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire import _environment
from gradwire._communicator import Communicator, from_mesh
from gradwire._connect import connect_mesh
from gradwire._deadline import Deadline
from gradwire._errors import RendezvousError
from gradwire._interfaces import Choice, Route, choose, route_to
from gradwire._mesh import Job, host_identity
from gradwire._rendezvous import choose_transports, find_secret

_log = logging.getLogger("gradwire")


def communicator_of(group: dist.ProcessGroup, timeout: float = 300) -> Communicator:
    """Connects the ranks of `group`; each of them calls it.

    The secret is GRADWIRE_SECRET's; without one, rank 0 makes it and the group carries it, so that
    joining is as private as the group. Raises RendezvousError.
    """
    rank, size, deadline = group.rank(), group.size(), Deadline(timeout)

    def exchange(data: bytes, deadline: Deadline) -> list[bytes]:
        return _all_gather_bytes(group, data, deadline)

    known = find_secret(None)
    introductions = [
        _read_introduction(each, peer)
        for peer, each in enumerate(exchange(_introduction(rank, known), deadline))
    ]
    mesh = connect_mesh(
        _agree(introductions, known, rank),
        exchange,
        rank=rank,
        size=size,
        communicator=0,
        deadline=deadline,
        transports=choose_transports(None),
        interface=_interface(introductions),
    )
    return from_mesh(mesh, timeout=timeout)


def _introduction(rank: int, known: bytes | None) -> bytes:
    route = _route()
    said: dict[str, Any] = {"host": host_identity(), "has_secret": known is not None}
    said["reached"] = route.target if route else ""
    if rank == 0:
        said["job"] = f"process-group-{secrets.token_hex(8)}"
        if known is None:
            said["secret"] = secrets.token_hex(32)
    return json.dumps(said).encode()


def _read_introduction(data: bytes, rank: int) -> dict[str, Any]:
    """What a rank says of itself; raises RendezvousError for anything else."""
    wanted: dict[str, type] = {"host": str, "has_secret": bool, "reached": str}
    try:
        said: dict[str, Any] = json.loads(data)
        if rank == 0:
            wanted["job"] = str
        if rank == 0 and not said["has_secret"]:
            wanted["secret"] = str
            bytes.fromhex(said["secret"])
        if {key: type(said[key]) for key in said} == wanted:
            return said
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise RendezvousError(f"rank {rank} did not introduce itself: another gradwire version?")


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
    choice = choose(
        route.source if route and beyond else None,
        pattern=_environment.text("GRADWIRE_SOCKET_IFNAME"),
        several_hosts=bool(beyond),
        reached=[each for each in beyond if each],
    )
    _log.info("a rank of the process group listens on %s", choice)
    return choice


def _all_gather_bytes(group: dist.ProcessGroup, data: bytes, deadline: Deadline) -> list[bytes]:
    """Every rank's bytes, in rank order, by way of CPU tensors; nothing is unpickled."""
    try:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = [int(each) for each in _all_gather(group, torch.tensor([own.numel()]), deadline)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        gathered = _all_gather(group, padded, deadline)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {group.rank()} could not exchange addresses through the process group "
            f"({error}): all its ranks must register, and it needs a backend for CPU tensors, "
            "such as gloo; or give communicator="
        ) from error
    return [bytes(each[:size].tolist()) for each, size in zip(gathered, sizes, strict=True)]


def _all_gather(
    group: dist.ProcessGroup, own: torch.Tensor, deadline: Deadline
) -> list[torch.Tensor]:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(gathered, own, group=group, async_op=True)
    assert work is not None  # this rank is in the group
    work.wait(max(timedelta(seconds=deadline.remaining), timedelta(milliseconds=10)))
    return gathered
