"""split: ranks exchange their colors, and those of one color connect to each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradwire._base.arguments import whole
from gradwire._base.deadline import Deadline
from gradwire._base.group import Group
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.mesh import Mesh
from gradwire._errors import InvalidArgument


def members(comm: Group, color: int | None, key: int) -> list[int]:
    """The ranks of this rank's color, ordered by key; this rank alone when it has no color."""
    given = None if color is None else _whole(color, "color")
    if given is not None and given < 0:
        raise InvalidArgument(f"color={color} is negative; use None for no communicator")
    own = np.array([-1 if given is None else given, _whole(key, "key")], np.int64)
    all_given = comm.all_gather(own).reshape(comm.size, 2)
    if given is None:
        return [comm.rank]
    return sorted(
        np.flatnonzero(all_given[:, 0] == given).tolist(), key=lambda r: (all_given[r, 1], r)
    )


def _whole(value: Any, what: str) -> int:
    """Checks an integer of 64 bits; True and False are taken as 1 and 0."""
    return whole(int(value) if isinstance(value, bool | np.bool_) else value, what, bits=64)


def connect(
    comm: Group,
    mesh: Mesh,
    group: Sequence[int],
    name: str | None,
    *,
    transports: Sequence[str],
    raise_if_peer_failed: Callable[[float], None],
    deadline: Deadline,
) -> Mesh | None:
    """Connects the ranks of a group; returns their mesh, or None without a name.

    Every rank of `comm` calls it, with the ranks of its color and a name that no other group has.
    Job, interface, cost model and progress thread are those of the communicator's own `mesh`.
    """
    if len(group) < 2:  # it connects to nobody, but the other groups' exchange needs its part
        gather_bytes(comm, b"", deadline)
    if name is None:
        return None

    def exchange(own: bytes, until: Deadline) -> list[bytes]:
        addresses = gather_bytes(comm, own, until)
        return [addresses[rank] for rank in group]

    made = connect_mesh(
        mesh.job,
        exchange,
        rank=group.index(comm.rank),
        size=len(group),
        communicator=int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"),
        deadline=deadline,
        transports=transports,
        interface=mesh.interface,
        raise_if_peer_failed=raise_if_peer_failed,
        job_ranks=map(mesh.job_rank, group),
    )
    made.model, made.progress = mesh.model, mesh.progress
    return made


def gather_bytes(comm: Group, data: bytes, deadline: Deadline) -> list[bytes]:
    """All ranks' bytes, in rank order."""
    timeout = deadline.left
    own = np.frombuffer(data, np.uint8)
    sizes = comm.all_gather(np.array([own.size], np.int64), timeout=timeout)
    blobs = [np.empty(size, np.uint8) for size in sizes.tolist()]
    comm.all_gather(own, out=blobs, timeout=timeout)
    return [blob.tobytes() for blob in blobs]
