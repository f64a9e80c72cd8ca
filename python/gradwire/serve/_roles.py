"""Roles: of the processes of one launch, the first ones serve shards and the others are replicas.

The processes meet as ranks do. Each replica then holds a connection to the servers' store for as
long as it lives, with a last will, by which the servers learn when all replicas have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from gradwire._base import arguments, environment
from gradwire._base.deadline import Deadline
from gradwire._bootstrap.launch_info import from_environment
from gradwire._bootstrap.rendezvous import Rendezvous, open_rendezvous
from gradwire._bootstrap.store import Address, StoreClient, parse_address
from gradwire._bootstrap.store_server import StoreServer
from gradwire._errors import Error, InvalidArgument
from gradwire.serve import _directory
from gradwire.serve._server import Server

_held: list[StoreClient] = []  # until this process ends

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Replica:
    """The place of this process among the replicas of a launch.

    `index` is its number, from 0, among so many `replicas`; `servers` is the number of shards.
    """

    index: int
    replicas: int
    servers: int


def role(
    servers: int = 1,
    *,
    name: str = "parameters",
    secret: bytes | str | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    interval: float = 60.0,
    timeout: float = 300.0,
) -> Replica | None:
    """Gives each process of a launch its role: the first ones serve a shard each, the others train.

    All processes that torchrun, srun, mpirun or `gradwire run` have started from one program call
    it, as the first thing that the program does. In the processes of rank 0 to `servers` - 1 it
    serves until all others have ended, or until SIGINT or SIGTERM, and returns None: the program
    then has nothing left to do. In the others it returns their place at once; `connect` and
    `gradwire.torch.Downpour` without `store` then find these servers, by `name`.

    Under ``gradwire run --servers`` the servers are there already, and all processes are replicas.
    `name`, `secret`, `snapshot` and `interval` are as in `Server`. On several hosts srun and mpirun
    need a secret, the argument or GRADWIRE_SECRET; under torchrun rank 0 makes one where there is
    none. `timeout` limits the rendezvous, in seconds.

    Raises InvalidArgument where no process would be left to train, ``--servers`` is another number
    or it was called before, RendezvousError, which names the ranks that are missing, and in a
    server Error where its last snapshot could not be written.
    """
    shards = arguments.whole(servers, "servers", least=1)
    launch = from_environment()
    started = environment.text("GRADWIRE_SERVERS")
    if started is not None:
        if started != str(shards):
            raise InvalidArgument(
                f"servers={shards}, and `gradwire run --servers {started}` has started {started}"
            )
        return Replica(launch.rank, launch.size, shards)
    if launch.size <= shards:
        raise InvalidArgument(
            f"servers={shards} and {launch.launcher} started {launch.size} in all: no process is "
            f"left to train; start {shards + 1} or more"
        )
    if _held:
        raise InvalidArgument(
            "role() was called before in this process: its servers serve one service, once"
        )
    deadline = Deadline(arguments.seconds(timeout))

    def serve(store: str) -> Server:
        return Server(
            shards,
            only=[launch.rank],
            store=store,
            name=name,
            secret=found.secret or None,
            snapshot=snapshot,
            interval=interval,
            timeout=deadline.left,
        )

    with contextlib.ExitStack() as ends:
        with open_rendezvous(launch, deadline, secret) as found:
            first = None
            if launch.rank == 0:
                first = ends.enter_context(serve(_open_store(found, name, ends)))
            store = found.exchange.broadcast_from_rank_0(
                "servers", lambda: b"" if first is None else first.store.encode()
            ).decode()
            server = first
            if 0 < launch.rank < shards:
                server = ends.enter_context(serve(store))
            service = _directory.service(name, store, found.secret or None)
            client = StoreClient(parse_address(store), service.job, found.secret, deadline)
            if server is None:
                client.set_last_will(_ended(launch.rank), b"ended")
                client.set(_begun(launch.rank), b"begun")
        if server is not None:
            patience = Deadline(arguments.seconds(timeout))
            server.run_while(_Lives(client, range(shards, launch.size), patience))
            if server.snapshot_error:
                raise Error(f"the last snapshot failed: {server.snapshot_error}")
            return None
    _held.append(client)
    _directory.found(service)
    return Replica(launch.rank - shards, launch.size - shards, shards)


def _open_store(found: Rendezvous, name: str, ends: contextlib.ExitStack) -> str:
    """The URL of the servers' store: on a Unix socket, served here, where all are on this host.

    Else at a free port, which the other hosts reach; the server of shard 0 is to listen there.
    """
    interface = found.interface.interface
    if not interface.loopback:
        return str(Address("tcp", interface.address, 0))
    address = Address("unix", f"gradwire-{secrets.token_hex(8)}")
    service = _directory.service(name, str(address), found.secret or None)
    ends.enter_context(StoreServer(address, service.job, found.secret))
    return service.store


def _ended(rank: int) -> str:
    return f"gradwire/roles/ended/{rank}"


def _begun(rank: int) -> str:
    return f"gradwire/roles/begun/{rank}"


class _Lives:
    """Whether a replica still lives.

    One that has not begun when `patience` is over has ended: before it left a last will.
    """

    def __init__(self, store: StoreClient, ranks: Iterable[int], patience: Deadline) -> None:
        self._store, self._ranks, self._patience = store, list(ranks), patience

    def __call__(self) -> bool:
        try:
            while self._ranks and self._has_ended(self._ranks[0]):
                del self._ranks[0]
        except Error:  # the server of shard 0, which hosts the store, has ended
            return False
        return bool(self._ranks)

    def _has_ended(self, rank: int) -> bool:
        if self._is_set(_ended(rank)):
            return True
        if not self._patience.passed or self._is_set(_begun(rank)):
            return False
        _log.warning("rank %d ended before it began as a replica", rank)
        return True

    def _is_set(self, key: str) -> bool:
        try:
            self._store.get(key, 0)
        except TimeoutError:
            return False
        return True


def _forget() -> None:
    """Closes the connections in a forked child, which would outlive the replica."""
    for client in _held:
        client.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
