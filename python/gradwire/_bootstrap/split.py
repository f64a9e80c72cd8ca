"""split: the ranks tell each other their colors, and those of one color connect anew."""

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
    """The ranks of the same color, by their keys; this one alone where it has no color."""
    given = None if color is None else _whole(color, "color")
    if given is not None and given < 0:
        raise InvalidArgument(f"color={color} is negative; use None for no communicator")
    own = np.array([-1 if given is None else given, _whole(key, "key")], np.int64)
    wishes = comm.all_gather(own).reshape(comm.size, 2)
    if given is None:
        return [comm.rank]
    return sorted(np.flatnonzero(wishes[:, 0] == given).tolist(), key=lambda r: (wishes[r, 1], r))


def _whole(value: Any, what: str) -> int:
    """That 64 bits hold; True and False, too, tell two groups apart."""
    return whole(int(value) if isinstance(value, bool | np.bool_) else value, what, bits=64)


def connect(
    comm: Group,
    mesh: Mesh,
    group: Sequence[int],
    name: str | None,
    *,
    transports: Sequence[str],
    hear: Callable[[float], None],
    deadline: Deadline,
) -> Mesh | None:
    """The group's mesh, like the communicator's own `mesh`; None without a name.

    Every rank calls it, with the group of its color and what no other group is called.
    """
    if len(group) < 2:  # but the others need its part of their exchange
        _gather_bytes(comm, b"", deadline)
    if name is None:
        return None

    def exchange(card: bytes, until: Deadline) -> list[bytes]:
        cards = _gather_bytes(comm, card, until)
        return [cards[rank] for rank in group]

    made = connect_mesh(
        mesh.job,
        exchange,
        rank=group.index(comm.rank),
        size=len(group),
        communicator=int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"),
        deadline=deadline,
        transports=transports,
        interface=mesh.interface,
        hear=hear,
    )
    made.model = mesh.model
    return made


def _gather_bytes(comm: Group, data: bytes, deadline: Deadline) -> list[bytes]:
    """Every rank's bytes, in rank order."""
    timeout = max(deadline.remaining, 1e-3)
    own = np.frombuffer(data, np.uint8)
    sizes = comm.all_gather(np.array([own.size], np.int64), timeout=timeout)
    blobs = [np.empty(size, np.uint8) for size in sizes.tolist()]
    comm.all_gather(own, out=blobs, timeout=timeout)
    return [blob.tobytes() for blob in blobs]
