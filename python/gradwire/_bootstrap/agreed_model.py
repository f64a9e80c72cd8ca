"""Agreement on the cost model: all ranks of a mesh use rank 0's."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence

from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.rendezvous_exchange import RendezvousExchange
from gradwire._host import emulated_link
from gradwire._host.identity import machine_of
from gradwire._host.transport_kinds import EMULATED
from gradwire._model import HostSet, find, pack, unpack, usable_cores

_log = logging.getLogger("gradwire")


def host_set(mesh: Mesh) -> HostSet:
    """The hosts and links of a mesh, as this rank sees them."""
    names = mesh.names or (socket.gethostname(),) * mesh.size
    name_of = dict(zip(mesh.hosts, names, strict=True))
    hosts = tuple(sorted((name_of[host], ranks) for host, ranks in Counter(mesh.hosts).items()))
    used = {peer.same_host: peer.links["collective"].transport for peer in mesh.peers.values()}
    within, between = used.get(True, "shm"), used.get(False, "tcp")
    link = emulated_link.spec() if within == EMULATED else None
    return HostSet(hosts, within, between, link, _hosts_a_machine(mesh.hosts))


def _hosts_a_machine(hosts: Sequence[str]) -> int:
    """The most hosts that share a machine's cores: one, where this process has its own cores."""
    if usable_cores() < (os.cpu_count() or 1):
        return 1
    return max(Counter(map(machine_of, set(hosts))).values())


def agree(mesh: Mesh, exchange: RendezvousExchange) -> None:
    """Gives the mesh rank 0's model; every rank calls it.

    Raises RendezvousError, and on rank 0 also as `find` does; closes the mesh then.
    """

    def pack_own() -> bytes:
        model, source = find(host_set(mesh))
        _log.info("algorithm='auto' is decided by %s", source)
        return pack(model)

    try:
        mesh.model = unpack(exchange.broadcast_from_rank_0("model", pack_own))
    except BaseException:
        mesh.close()
        raise
