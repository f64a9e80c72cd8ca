"""The core of a communicator, which takes over the sockets of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire import _core
from gradwire._base import environment
from gradwire._bootstrap.mesh import Mesh
from gradwire._host import emulated_link, rdma

# Of the patience with others: links are made in less, so that a rank which waits for one names whom
# it waits for before those that have theirs, and are in a call, lose their patience with it.
_LINKS_SHARE = 0.75

Groups = Sequence[Sequence[int]]


def adopt(
    mesh: Mesh, hosts: Groups | None, tuning: Mapping[str, int], patience: float
) -> tuple[_core.Communicator, Groups]:
    """With the ranks of each host: `hosts`, or as the mesh says. Every rank calls it.

    `patience` is how long it waits for the others, in seconds. `tuning` are the sizes of frames and
    segments, as `_core.Communicator` takes them.
    """
    groups = _groups(mesh.hosts) if hosts is None else hosts
    core = _made(mesh, groups, tuning)
    if mesh.model is not None:
        core.set_model(mesh.model)
    try:
        _link_up(core, mesh, _LINKS_SHARE * patience)
    except BaseException:
        mesh.close()
        core.abort(f"rank {mesh.rank} could not connect")
        core.close(patience)
        raise
    return core, groups


def _made(mesh: Mesh, groups: Groups, tuning: Mapping[str, int]) -> _core.Communicator:
    try:
        return _core.Communicator(
            mesh.rank,
            mesh.size,
            mesh.communicator,
            groups,
            **tuning,
            stall_seconds=environment.seconds("GRADWIRE_STALL_SECONDS", 0, 1e6),
            job=mesh.job.name,
            tag=mesh.job.tag,
            about=_about(mesh),
            link=emulated_link.of_this_rank(),
            rdma=rdma.of_this_rank() if _uses_rdma(mesh) else None,
        )
    except BaseException:
        mesh.close()
        raise


def _link_up(core: _core.Communicator, mesh: Mesh, patience: float) -> None:
    for number, peer in mesh.peers.items():
        core.adopt_control(peer.control.detach(), number)
    for number, peer in mesh.peers.items():
        for lane, link in peer.links.items():
            core.adopt_link(lane, link.transport, link.sock.detach(), number, patience)


def _uses_rdma(mesh: Mesh) -> bool:
    return any(
        link.transport == rdma.NAME for peer in mesh.peers.values() for link in peer.links.values()
    )


def _about(mesh: Mesh) -> str:
    """By what the ranks joined, for `gradwire doctor --job`."""
    if not mesh.peers:
        return ""
    return "; ".join(filter(None, [f"listens on {mesh.interface}", mesh.job.privacy]))


def _groups(hosts: Sequence[str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())
