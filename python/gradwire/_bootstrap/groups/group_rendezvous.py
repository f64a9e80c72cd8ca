"""The rendezvous of ranks that can exchange bytes already: those of a torch process group."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gradwire._base import environment
from gradwire._base.deadline import Deadline
from gradwire._base.shortage import told
from gradwire._bootstrap.advertised_store import (
    ANSWER_BYTES,
    Endpoint,
    advertised_store,
    endpoint_at,
    require_here,
    unpack_place,
)
from gradwire._bootstrap.job_secret import find_secret
from gradwire._bootstrap.launch_info import LaunchInfo, from_environment
from gradwire._bootstrap.mesh import Job, Mesh
from gradwire._bootstrap.rendezvous import choose_transports, connect_ranks
from gradwire._bootstrap.rendezvous_exchange import RendezvousExchange
from gradwire._bootstrap.shared_port import chosen_port
from gradwire._bootstrap.store import Address
from gradwire._bootstrap.through_torch.host_info import pack_host_info, unpack_host_info
from gradwire._bootstrap.through_torch.open_exchange import Question
from gradwire._bootstrap.torch_rendezvous import warn_of_no_secret
from gradwire._errors import RendezvousError
from gradwire._host.identity import host_identity, process_name
from gradwire._host.interfaces import Choice, Route, choose, route_to

_Made = TypeVar("_Made")

_log = logging.getLogger("gradwire")


def rendezvous_in_group(
    rank: int,
    size: int,
    all_gather: Callable[[bytes], list[bytes]],
    make: Callable[[Mesh], _Made],
    deadline: Deadline,
) -> _Made:
    """Connects the ranks of a group; returns `make(mesh)`. Each of them calls it.

    `all_gather` returns all ranks' bytes, in rank order, which others may read: no secret is among
    them (`advertised_store`). The job's is GRADWIRE_SECRET's, or rank 0 makes one. Raises
    RendezvousError, and TransportError when a rank is lost after the ranks have exchanged their
    first messages.
    """
    with told(f"rank {rank} of {size} of a process group ({process_name()})"):
        environment.check()
        known, route = find_secret(None), _route()
        question = Question() if known is None else None
        asked = None if question is None else question.message
        own = pack_host_info(rank, asked, route.target if route else "")
        infos = [unpack_host_info(each, peer) for peer, each in enumerate(all_gather(own))]
        name = _agreed_name(infos, rank)
        at = _choose_store_address(infos) if rank == 0 else None

        def advertise(endpoint: Endpoint) -> None:
            all_gather(_pack(endpoint, [info["question"] for info in infos]))

        def find() -> Endpoint:
            place, answer = _unpack(all_gather(b"")[0], rank)
            if known is None and _are_all_here():
                require_here(place.address)
            return endpoint_at(place, answer, known, question)

        with advertised_store(name, known, at, advertise, find, deadline, rank=rank) as found:
            store, agreed = found
            exchange = RendezvousExchange(store, LaunchInfo(rank, size), name, deadline)
            with exchange.abort_on_failure(hosts_store=rank == 0):
                exchange.claim_rank()
                secret = exchange.agree_on_secret() if agreed is None else agreed
                choice = _interface(infos)
                _log.info("a rank of the process group listens on %s", choice)
                job = Job(name, secret, privacy=_privacy(known))
                return make(connect_ranks(exchange, job, choose_transports(None), choice))


def _pack(endpoint: Endpoint, questions: Sequence[bytes | None]) -> bytes:
    """Encodes rank 0's endpoint: where it is, and its answers to all ranks, of equal size."""
    packed = f"{endpoint.where}\n".encode()
    for peer, question in enumerate(questions):
        try:
            packed += endpoint.answer_to(question or b"")
        except ValueError as error:
            raise RendezvousError(
                f"rank {peer} did not ask for a secret as a rank does ({error}): somebody else "
                "writes into torch's store; set GRADWIRE_SECRET on all ranks"
            ) from None
    return packed


def _unpack(data: bytes, rank: int) -> tuple[Endpoint, bytes]:
    """Decodes where rank 0's store is, and its answer to a rank; raises RendezvousError."""
    where, _, answers = data.partition(b"\n")
    begin = rank * ANSWER_BYTES
    return unpack_place(where), answers[begin : begin + ANSWER_BYTES]


def _agreed_name(infos: Sequence[dict[str, Any]], rank: int) -> str:
    """The job's name, by rank 0; raises alike on every rank where only some have a secret."""
    given = [each["question"] is None for each in infos]
    differing = [str(peer) for peer, each in enumerate(given) if each != given[0]]
    if differing:
        has, have = ("has", "have not") if given[0] else ("has not", "have")
        raise RendezvousError(
            f"rank 0 {has} a GRADWIRE_SECRET and rank {', '.join(differing)} {have}: "
            "set the same one on all ranks, or none"
        )
    if not given[0] and rank == 0 and len({each["host"] for each in infos}) > 1:
        warn_of_no_secret("the process group")
    return str(infos[0]["job"])


def _privacy(secret: bytes | None) -> str:
    if secret is None:
        return "no GRADWIRE_SECRET, so nobody may join"
    return "who joins needs the job's secret"


def _are_all_here() -> bool:
    """Whether the launcher says that it started all ranks on this host."""
    with contextlib.suppress(RendezvousError):
        launch = from_environment()
        return launch.size > 1 and launch.local_size == launch.size
    return False


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
        several_hosts=bool(beyond),
        reached=[each for each in beyond if each],
    )


def _choose_store_address(infos: Sequence[dict[str, Any]]) -> Address:
    if len({each["host"] for each in infos}) == 1:
        return Address("unix", f"gradwire-{secrets.token_hex(8)}")
    return Address("tcp", _interface(infos).interface.address, chosen_port())
