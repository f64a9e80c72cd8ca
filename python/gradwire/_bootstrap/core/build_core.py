"""Building a communicator's core, which takes over the sockets of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire import _core
from gradwire._base import environment, stops
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.core.renewal import watch
from gradwire._bootstrap.mesh import Mesh
from gradwire._bootstrap.sites import agree_on_sites, view_of
from gradwire._host import transport_kinds
from gradwire._host.sealed_socket import hand_over
from gradwire._host.tcp_sockets import watched

# Share of the connect timeout in which links must be made. A rank that waits for a link then names
# the peer it waits for before ranks that have all links, and are in a call, give up on it.
_LINKS_SHARE = 0.75

Groups = Sequence[Sequence[int]]


def build_core(
    mesh: Mesh, hosts: Groups | None, tuning: Mapping[str, int], connect_timeout: float
) -> tuple[_core.Communicator, Groups]:
    """Makes the core, and the list of each host's ranks; every rank calls it.

    `hosts` overrides what the mesh says of hosts. `tuning` are the sizes of frames and segments, as
    `_core.Communicator` takes them. `connect_timeout` is in seconds.
    """
    groups = _groups(mesh.hosts) if hosts is None else hosts
    core = _create(mesh, groups, tuning)
    if mesh.model is not None:
        core.set_model(mesh.model)
    try:
        limit, view = Deadline(connect_timeout), view_of(mesh)
        _attach_sockets(core, mesh, _LINKS_SHARE * connect_timeout)
        agree_on_sites(core, mesh, view, limit.left)
    except BaseException:
        mesh.close()
        core.abort(f"rank {mesh.rank} could not connect")
        core.close(connect_timeout)
        raise
    return core, groups


def _create(mesh: Mesh, groups: Groups, tuning: Mapping[str, int]) -> _core.Communicator:
    try:
        return _core.Communicator(
            mesh.rank,
            mesh.size,
            mesh.communicator,
            groups,
            **tuning,
            stall_seconds=environment.seconds("GRADWIRE_STALL_SECONDS"),
            job=mesh.job.name,
            tag=mesh.job.tag,
            about=_about(mesh),
            contexts=_contexts(mesh),
            job_ranks=mesh.job_ranks,
            stop_request=stops.REQUEST,
            progress=mesh.progress,
        )
    except BaseException:
        mesh.close()
        raise


def _attach_sockets(core: _core.Communicator, mesh: Mesh, timeout: float) -> None:
    for number, peer in mesh.peers.items():
        for sock in peer.sockets():
            mesh.tcp_sockets += watched(sock, number)
    ways = {number: _core.Ways(len(peer.ways)) for number, peer in mesh.peers.items() if peer.ways}
    for number, peer in mesh.peers.items():
        for way, sock in enumerate((peer.control, *peer.controls)):
            core.adopt_control(*hand_over(sock), number, ways=ways.get(number), way=way)
    for number, peer in mesh.peers.items():
        for lane, link in peer.links.items():
            streams, roles = [hand_over(sock) for sock in link.sockets()], link.roles()
            core.adopt_link(
                lane, link.transport, streams, number, timeout, ways=ways.get(number), roles=roles
            )
    watch(mesh, ways)


def _contexts(mesh: Mesh) -> dict[str, _core.TransportContext]:
    """Opens the context of each transport in use that has one."""
    opened = {name: transport_kinds.context(name) for name in mesh.transports}
    return {name: context for name, context in opened.items() if context is not None}


def _about(mesh: Mesh) -> str:
    """A line for `gradwire doctor --job`: the address listened on, and what keeps joins private."""
    if not mesh.peers:
        return ""
    return "; ".join(filter(None, [f"listens on {mesh.interface}", mesh.job.privacy]))


def _groups(hosts: Sequence[str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())
