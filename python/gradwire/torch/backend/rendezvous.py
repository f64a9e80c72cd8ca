"""The rendezvous of a group's ranks, through the store that torch gives the group.

Keys outlive a group, and later groups may have the same name: those of the next WORLD, or of the
same rank started anew. A rank that read an old key would dial an address where nobody listens. So
each key contains how many groups of this name and size the rank has made, which the store counts:
the same number on all ranks, also on those that have forgotten it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from gradwire import _core
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.connect import connect_mesh
from gradwire._bootstrap.groups.group_rendezvous import rendezvous_in_group
from gradwire._bootstrap.launch_info import LaunchInfo
from gradwire._bootstrap.mesh import Job, Mesh
from gradwire._bootstrap.rendezvous_exchange import await_rank
from gradwire._communicator import Communicator, from_mesh
from gradwire._errors import InvalidArgument, RendezvousError, TransportError, first_line
from gradwire._host.identity import process_name

# Seconds between two looks into the store. Torch's stores can wait themselves, but do not let
# Ctrl-C through meanwhile, and TCPStore logs two warnings each time that a wait ends early.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


class _World:
    """The groups of one WORLD in this process."""

    def __init__(self) -> None:
        self.family = _core.Family()
        self.progress = _core.ProgressThread()


_world = _World()


def connect(options: Any, chosen: str) -> Communicator:
    """Connects the ranks of the group that torch's `options` describe; each of them calls it.

    `chosen` are the options that the program gave, as a text; raises InvalidArgument on all ranks
    when these differ. A failure of the group will end the other groups of its WORLD in this
    process, and theirs will end this one.
    """
    try:
        made = _rendezvous(options, chosen)
    except TransportError as error:
        job_ranks = options.global_ranks_in_group
        if job_ranks and error.peer >= 0:
            error.job_peer = job_ranks[error.peer]
        raise
    if not options.global_ranks_in_group:
        _world.family = _core.Family()
    join_world(made)
    return made


def join_world(communicator: Communicator) -> None:
    """Has a failure of the communicator end the groups of this WORLD, and theirs the communicator.

    Called before the communicator's first call.
    """
    communicator._core.join(_world.family)


def _rendezvous(options: Any, chosen: str) -> Communicator:
    rank, size = options.group_rank, options.group_size
    timeout = options.timeout.total_seconds()
    deadline = Deadline(timeout)

    def make(mesh: Mesh) -> Communicator:
        mesh.job_ranks = tuple(options.global_ranks_in_group)
        if not mesh.job_ranks:
            _world.progress = _core.ProgressThread()
        mesh.progress = _world.progress
        return from_mesh(mesh, timeout=timeout)

    if size == 1:
        mesh = connect_mesh(
            Job("gradwire", b""),
            lambda own, _: [own],
            rank=0,
            size=1,
            communicator=0,
            deadline=deadline,
        )
        return make(mesh)
    exchange = _StoreExchange(options.store, rank, size, deadline)
    _require_alike([each.decode() for each in exchange.all_gather(chosen.encode())])
    return rendezvous_in_group(rank, size, exchange.all_gather, make, deadline)


def _require_alike(chosen: Sequence[str]) -> None:
    other = next((rank for rank, each in enumerate(chosen) if each != chosen[0]), None)
    if other is not None:
        raise InvalidArgument(
            f"the ranks gave different pg_options=: {chosen[0]} on rank 0, {chosen[other]} on rank "
            f"{other}: give the same ones on all ranks"
        )


class _StoreExchange:
    """Exchanges of bytes between the ranks of a group through torch's store."""

    def __init__(self, store: Any, rank: int, size: int, deadline: Deadline) -> None:
        self._store, self._deadline = store, deadline
        self._launch = LaunchInfo(rank, size)
        self._rounds = itertools.count()
        # The store that torch gives a group puts the group's name before each key.
        self._made = f"gradwire/{size}/made/{rank}"
        self._number = self._call(store.add, self._made, 1)
        self._prefix = f"gradwire/{size}/{self._number}"
        self._before = f"gradwire/{size}/{self._number - 1}"

    def all_gather(self, own: bytes) -> list[bytes]:
        """All ranks' bytes, in rank order; raises RendezvousError, which names missing ranks."""
        key = f"{self._prefix}/{next(self._rounds)}"
        self._call(self._store.set, f"{key}/{self._launch.rank}", own)
        return [self._get(key, peer) for peer in range(self._launch.size)]

    def _get(self, key: str, peer: int) -> bytes:
        def missing() -> list[int]:
            return [
                rank
                for rank in range(self._launch.size)
                if not self._call(self._store.check, [f"{key}/{rank}"])
            ]

        return await_rank(
            peer,
            self._launch,
            self._deadline,
            lambda seconds: self._wait(f"{key}/{peer}", seconds),
            missing,
        )

    def _wait(self, key: str, seconds: float) -> bytes:
        deadline, pause = Deadline(seconds), _FIRST_PAUSE
        while not self._call(self._store.check, [key]):
            if deadline.passed:
                self._require_one_of_each()
                raise TimeoutError(f"nobody set {key}")
            time.sleep(min(pause, deadline.remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return bytes(self._call(self._store.get, key))

    def _require_one_of_each(self) -> None:
        """Raises RendezvousError where a process came with the number of one that still waits.

        The one that waits sees that its number was counted again, and tells all others.
        """
        rank, told = self._launch.rank, "twice"
        if self._call(self._store.add, self._made, 0) > self._number:
            text = f"rank {rank} of {self._launch.size} was given twice: {process_name()} has it"
            self._call(self._store.set, f"{self._prefix}/{told}", text)
        for prefix in (self._prefix, self._before):
            if self._call(self._store.check, [f"{prefix}/{told}"]):
                text = self._call(self._store.get, f"{prefix}/{told}").decode()
                raise RendezvousError(
                    f"{text}, and so has another process; rank {rank} is {process_name()}: give "
                    "each process of the job a RANK of its own"
                )

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {self._launch.rank} lost the store of the process group: "
                f"{first_line(error)}: its process, rank 0 or torchrun, has probably ended"
            ) from None
